#pragma once
// A store in host memory, sound but for what `offset_of` makes of an offset and how `copy` copies.

#include <vector>

#include "quern/error.h"
#include "quern/plugin.h"

class HostStore : public quern::OffloadStore {
 public:
  explicit HostStore(std::string id) { traits_.id = std::move(id); }
  ~HostStore() override { wait(); }
  const quern::OffloadTraits& traits() const override { return traits_; }
  void open(quern::Device& device, const quern::StorePlace&) override { device_ = &device; }
  quern::OffloadSlot reserve(std::size_t bytes) override {
    if (bytes > std::size_t{1} << 40)
      throw quern::Error(quern::ErrorCode::resources, {.where = "store", .what = "out of memory"});
    slots_.emplace_back(bytes, char{0});
    return static_cast<quern::OffloadSlot>(slots_.size()) - 1;
  }
  void put(quern::OffloadSlot slot, std::size_t offset, const void* memory, std::size_t bytes,
           quern::Stream stream) override {
    copy(slots_[static_cast<std::size_t>(slot)].data() + offset_of(offset), memory, bytes, stream);
    putting_.push_back(stream);
  }
  void get(quern::OffloadSlot slot, std::size_t offset, void* memory, std::size_t bytes,
           quern::Stream stream) override {
    copy(memory, slots_[static_cast<std::size_t>(slot)].data() + offset_of(offset), bytes, stream);
  }
  void prefetch(quern::OffloadSlot, std::size_t, std::size_t) override {}
  void* map(quern::OffloadSlot) override { quern::fail_internal("store", "cannot be mapped"); }
  void flush() override { wait(); }
  std::optional<std::string> error() override { return {}; }

 protected:
  virtual std::size_t offset_of(std::size_t offset) const { return offset; }
  virtual void copy(void* to, const void* from, std::size_t bytes, quern::Stream stream) {
    device_->copy(to, from, bytes, stream);
  }

  quern::Device* device_ = nullptr;
  std::vector<std::vector<char>> slots_;

 private:
  void wait() const {
    for (quern::Stream stream : putting_) device_->synchronize(stream);
  }

  quern::OffloadTraits traits_;
  std::vector<quern::Stream> putting_;
};
