#pragma once
// A group of one rank, sound but for `gathered`: how many bytes an all_gather hands on.

#include <atomic>

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
  void register_buffer(void*, std::size_t) override {}
  void unregister_buffer(void*) override {}
  void barrier() override {
    if (const auto fault = error())
      throw quern::Error(quern::ErrorCode::communication, {.where = traits_.id, .what = *fault});
  }
  void all_reduce(const quern::View&, quern::Reduction, quern::Stream) override {}
  void reduce_scatter(const quern::View& in, const quern::View& out, quern::Counts, quern::Reduction,
                      quern::Stream stream) override {
    device_->copy(out.data, in.data, in.bytes(), stream);
  }
  void all_gather(const quern::View& in, const quern::View& out, quern::Counts, quern::Stream stream) override {
    device_->copy(out.data, in.data, gathered(in.bytes()), stream);
  }
  void all_to_all(const quern::View& in, const quern::View& out, quern::Counts, quern::Stream stream) override {
    device_->copy(out.data, in.data, in.bytes(), stream);
  }
  void broadcast(const quern::View&, int, quern::Stream) override {}
  void send(const quern::View&, int, quern::Stream) override {}
  void receive(const quern::View&, int, quern::Stream) override {}
  std::optional<std::string> error() override {
    return aborted_ ? std::optional<std::string>("aborted") : std::nullopt;
  }
  void abort() noexcept override { aborted_ = true; }

 protected:
  virtual std::size_t gathered(std::size_t bytes) const { return bytes; }

 private:
  quern::CommunicatorTraits traits_;
  quern::Device* device_ = nullptr;
  std::atomic<bool> aborted_ = false;
};
