#pragma once
// The communicator memcpy, of which one thing is changed.

#include "memcpy_communicator.h"
#include "quern/plugin.h"

class MemcpyWith : public quern::Communicator {
 public:
  explicit MemcpyWith(std::string id) : traits_(inner_.traits()) { traits_.id = std::move(id); }
  const quern::CommunicatorTraits& traits() const override { return traits_; }
  int rank() const override { return inner_.rank(); }
  int size() const override { return inner_.size(); }
  void connect(const quern::Rendezvous& rendezvous, quern::Device& device) override {
    inner_.connect(rendezvous, device);
  }
  void register_buffer(void* memory, std::size_t bytes) override { inner_.register_buffer(memory, bytes); }
  void unregister_buffer(void* memory) override { inner_.unregister_buffer(memory); }
  void barrier() override { inner_.barrier(); }
  void all_reduce(const quern::View& in_out, quern::Reduction reduction, quern::Stream stream) override {
    inner_.all_reduce(in_out, reduction, stream);
  }
  void reduce_scatter(const quern::View& in, const quern::View& out, quern::Counts counts, quern::Reduction reduction,
                      quern::Stream stream) override {
    inner_.reduce_scatter(in, out, counts, reduction, stream);
  }
  void all_gather(const quern::View& in, const quern::View& out, quern::Counts counts, quern::Stream stream) override {
    inner_.all_gather(in, out, counts, stream);
  }
  void all_to_all(const quern::View& in, const quern::View& out, quern::Counts counts, quern::Stream stream) override {
    inner_.all_to_all(in, out, counts, stream);
  }
  void broadcast(const quern::View& in_out, int root, quern::Stream stream) override {
    inner_.broadcast(in_out, root, stream);
  }
  void send(const quern::View& in, int to, quern::Stream stream) override { inner_.send(in, to, stream); }
  void receive(const quern::View& out, int from, quern::Stream stream) override { inner_.receive(out, from, stream); }
  std::optional<std::string> error() override { return inner_.error(); }
  void abort() noexcept override { inner_.abort(); }

 private:
  quern::memcpy::MemcpyCommunicator inner_{{}};
  quern::CommunicatorTraits traits_;
};
