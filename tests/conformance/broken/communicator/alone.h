#pragma once
// A group of one rank, sound but for `gathered`, how many bytes an all_gather hands on, and `knows`, whether memory is
// registered.

#include <atomic>
#include <iterator>
#include <map>

#include "quern/error.h"
#include "quern/plugin.h"

class Alone : public quern::Communicator {
 public:
  explicit Alone(std::string id) { traits_.id = std::move(id), traits_.sums_in_rank_order = true; }
  const quern::CommunicatorTraits& traits() const override { return traits_; }
  int rank() const override { return 0; }
  int size() const override { return 1; }
  void connect(const quern::Rendezvous& rendezvous, quern::Device& device) override {
    if (rendezvous.size != 1)
      throw quern::Error(quern::ErrorCode::config, {.where = traits_.id, .what = "one rank only"});
    device_ = &device;
  }
  void register_buffer(void* memory, std::size_t bytes) override { buffers_[static_cast<char*>(memory)] = bytes; }
  void unregister_buffer(void* memory) override { buffers_.erase(static_cast<char*>(memory)); }
  void barrier() override {
    if (const auto fault = error())
      throw quern::Error(quern::ErrorCode::communication, {.where = traits_.id, .what = *fault});
  }
  void all_reduce(const quern::View& view, quern::Reduction, quern::Stream) override { begin(view); }
  void reduce_scatter(const quern::View& in, const quern::View& out, quern::Counts, quern::Reduction,
                      quern::Stream stream) override {
    begin(in);
    device_->copy(out.data, in.data, in.bytes(), stream);
  }
  void all_gather(const quern::View& in, const quern::View& out, quern::Counts, quern::Stream stream) override {
    begin(in);
    device_->copy(out.data, in.data, gathered(in.bytes()), stream);
  }
  void all_to_all(const quern::View& in, const quern::View& out, quern::Counts, quern::Stream stream) override {
    device_->copy(out.data, in.data, in.bytes(), stream);
  }
  void broadcast(const quern::View& view, int, quern::Stream) override { begin(view); }
  void send(const quern::View&, int, quern::Stream) override {}
  void receive(const quern::View&, int, quern::Stream) override {}
  std::optional<std::string> error() override {
    return aborted_ ? std::optional<std::string>("aborted") : std::nullopt;
  }
  void abort() noexcept override { aborted_ = true; }

 protected:
  virtual std::size_t gathered(std::size_t bytes) const { return bytes; }
  virtual bool knows(const quern::View& view) const {
    const char* memory = view.as<char>();
    const auto behind = buffers_.upper_bound(memory);
    return behind != buffers_.begin() && memory + view.bytes() <= std::prev(behind)->first + std::prev(behind)->second;
  }

 private:
  void begin(const quern::View& view) const {
    if (!knows(view)) quern::fail_internal(traits_.id, "memory that is not registered");
  }
  quern::CommunicatorTraits traits_;
  quern::Device* device_ = nullptr;
  std::map<const char*, std::size_t> buffers_;
  std::atomic<bool> aborted_ = false;
};
