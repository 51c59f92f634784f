#pragma once
// What holds of every communicator that is made of others: they know the same buffers, and a fault of one is the fault
// of all.

#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "quern/communicator.h"

namespace quern {

/// Who hears of a fault calls abort(), which may take time, for streams that wait in other parts.
class CommunicatorParts : public Communicator {
 public:
  const CommunicatorTraits& traits() const override { return traits_; }
  void register_buffer(void* memory, std::size_t bytes) override;
  void unregister_buffer(void* memory) override;
  // ---- by the first part, unless overridden ----
  int rank() const override { return first().rank(); }
  int size() const override { return first().size(); }
  void barrier() override { first().barrier(); }
  void all_gather(const View& in, const View& out, Counts counts, Stream stream) override {
    first().all_gather(in, out, counts, stream);
  }
  void all_to_all(const View& in, const View& out, Counts counts, Stream stream) override {
    first().all_to_all(in, out, counts, stream);
  }
  void broadcast(const View& in_out, int root, Stream stream) override { first().broadcast(in_out, root, stream); }
  void send(const View& in, int to, Stream stream) override { first().send(in, to, stream); }
  void receive(const View& out, int from, Stream stream) override { first().receive(out, from, stream); }

  std::optional<std::string> error() override;
  void abort() noexcept override;

 protected:
  /// The traits are what holds of all parts, or is needed by one; the id names them all: "nccl+memcpy".
  explicit CommunicatorParts(std::vector<std::unique_ptr<Communicator>> parts);

  Communicator& part(std::size_t number) const { return *parts_[number]; }
  Communicator& first() const { return part(0); }
  std::size_t count() const { return parts_.size(); }
  void connect_part(std::size_t number, const Rendezvous& rendezvous, Device& device);
  /// Ranks of that part in messages: "memcpy of ranks 2, 3".
  void name_part(std::size_t number, std::string name) { names_[number] = std::move(name); }

  CommunicatorTraits traits_;

 private:
  const std::vector<std::unique_ptr<Communicator>> parts_;
  std::vector<std::string> names_;
  std::mutex mutex_;  // of fault_
  std::optional<std::string> fault_;
};

}  // namespace quern
