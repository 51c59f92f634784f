// Fault: stores of all ranks that share a folder have the same slots.
#include <map>
#include <memory>
#include <mutex>

#include "host_store.h"

namespace {

using Slots = std::vector<std::unique_ptr<std::vector<char>>>;

std::mutex lock;
std::map<std::string, std::weak_ptr<Slots>> by_folder;

class ForgetsRank final : public quern::OffloadStore {
 public:
  ForgetsRank() { traits_.id = "forgets_rank"; }
  ~ForgetsRank() override { wait(); }
  const quern::OffloadTraits& traits() const override { return traits_; }
  void open(quern::Device& device, const quern::StorePlace& place) override {
    device_ = &device;
    const std::lock_guard guard(lock);
    std::weak_ptr<Slots>& known = by_folder[place.folder];
    slots_ = known.lock();
    if (!slots_) known = slots_ = std::make_shared<Slots>();
  }
  quern::OffloadSlot reserve(std::size_t bytes) override {
    if (bytes > std::size_t{1} << 40)
      throw quern::Error(quern::ErrorCode::resources, {.where = "store", .what = "out of memory"});
    if (own_ == slots_->size()) slots_->push_back(std::make_unique<std::vector<char>>(bytes, char{0}));
    return static_cast<quern::OffloadSlot>(own_++);
  }
  void put(quern::OffloadSlot slot, std::size_t offset, const void* memory, std::size_t bytes,
           quern::Stream stream) override {
    device_->copy(at(slot) + offset, memory, bytes, stream);
    putting_.push_back(stream);
  }
  void get(quern::OffloadSlot slot, std::size_t offset, void* memory, std::size_t bytes,
           quern::Stream stream) override {
    device_->copy(memory, at(slot) + offset, bytes, stream);
  }
  void prefetch(quern::OffloadSlot, std::size_t, std::size_t) override {}
  void* map(quern::OffloadSlot) override { quern::fail_internal("store", "cannot be mapped"); }
  void flush() override { wait(); }
  std::optional<std::string> error() override { return {}; }

 private:
  void wait() const {
    for (quern::Stream stream : putting_) device_->synchronize(stream);
  }
  char* at(quern::OffloadSlot slot) { return (*slots_)[static_cast<std::size_t>(slot)]->data(); }

  quern::OffloadTraits traits_;
  quern::Device* device_ = nullptr;
  std::shared_ptr<Slots> slots_;
  std::size_t own_ = 0;
  std::vector<quern::Stream> putting_;
};

}  // namespace

QUERN_PLUGIN("offload", "forgets_rank", manifest) {
  manifest.version = "1.0";
  manifest.licence = "Apache-2.0";
  manifest.add<quern::OffloadStore>("forgets_rank", "host memory by folder", {},
                                    [](const quern::OptionValues&) { return std::make_unique<ForgetsRank>(); });
}
