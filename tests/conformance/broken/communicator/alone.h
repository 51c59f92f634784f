#pragma once
// A group of one rank, sound but for `gathered`, how many bytes an all_gather hands on, `knows`, whether memory is
// registered, `refuses`, whether calls that do not fit are refused, and `ends`, whether calls after abort() do nothing.

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
  void all_reduce(const quern::View& view, quern::Reduction reduction, quern::Stream) override {
    reduce(view, reduction);
    begin(view);
  }
  void reduce_scatter(const quern::View& in, const quern::View& out, quern::Counts counts, quern::Reduction reduction,
                      quern::Stream stream) override {
    reduce(in, reduction);
    copy(in, out, counts, in.bytes(), stream);
  }
  void all_gather(const quern::View& in, const quern::View& out, quern::Counts counts, quern::Stream stream) override {
    copy(in, out, counts, gathered(in.bytes()), stream);
  }
  void all_to_all(const quern::View& in, const quern::View& out, quern::Counts counts, quern::Stream stream) override {
    copy(in, out, counts, in.bytes(), stream);
  }
  void broadcast(const quern::View& view, int root, quern::Stream) override {
    need(root == 0, "no such rank");
    begin(view);
  }
  void send(const quern::View&, int, quern::Stream) override { need(false, "no other rank"); }
  void receive(const quern::View&, int, quern::Stream) override { need(false, "no other rank"); }
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

  virtual bool refuses() const { return true; }
  virtual bool ends() const { return true; }

 private:
  void need(bool fits, const char* what) const {
    if (!fits && refuses()) quern::fail_internal(traits_.id, what);
  }
  void reduce(const quern::View& view, quern::Reduction reduction) const {
    const bool narrow = view.dtype == quern::DType::bf16 || view.dtype == quern::DType::f64;
    need(view.dtype == quern::DType::f32 || (narrow && reduction == quern::Reduction::sum), "not a dtype of sums");
  }
  void begin(const quern::View& view) const {
    if (!knows(view)) quern::fail_internal(traits_.id, "memory that is not registered");
  }
  void copy(const quern::View& in, const quern::View& out, quern::Counts counts, std::size_t bytes,
            quern::Stream stream) const {
    need(counts.empty() || (counts.size() == 1 && counts[0] == in.count()), "counts of another group");
    need(in.count() == out.count() && in.dtype == out.dtype, "another size or dtype");
    begin(in);
    begin(out);
    if (!aborted_ || !ends()) device_->copy(out.data, in.data, bytes, stream);
  }
  quern::CommunicatorTraits traits_;
  quern::Device* device_ = nullptr;
  std::map<const char*, std::size_t> buffers_;
  std::atomic<bool> aborted_ = false;
};
