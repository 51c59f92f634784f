// How ranks of the memcpy communicator connect and find out whether they can copy from each other's device memory.
#include <algorithm>
#include <cstdint>
#include <utility>

#include "memcpy_communicator.h"
#include "quern/error.h"

namespace quern::memcpy {

using collectives::RankReduction;

namespace {

constexpr const char* kWhere = "communicator memcpy";

/// Of a message between ranks.
constexpr std::size_t kMostReason = 1000;

[[noreturn]] void fault(const std::string& text) {
  throw Error(ErrorCode::communication, {.where = kWhere, .what = text});
}

}  // namespace

void MemcpyCommunicator::connect(const Rendezvous& rendezvous, Device& device) {
  if (device_) fail_internal(kWhere, "connected twice");
  if (rendezvous.size > kMostRanks)
    throw Error(ErrorCode::config, {.where = kWhere,
                                    .what = "too many ranks",
                                    .found = std::to_string(rendezvous.size),
                                    .expected = std::to_string(kMostRanks) + " at most",
                                    .next = "choose another communicator"});
  reduction_ = std::make_unique<RankReduction>(kWhere, device, rendezvous.rank, rendezvous.size);
  device_ = &device;
  rank_ = rendezvous.rank;
  size_ = rendezvous.size;
  meeting_ = std::make_unique<Meeting>(rendezvous);
  if (size_ == 1) return;
  board_ = std::make_unique<Board>(*meeting_, rendezvous, device);
  const std::size_t sums = traits_.peer_bytes * static_cast<std::size_t>(size_);
  staging_ = static_cast<char*>(device.allocate(MemoryKind::device, sums + traits_.own_bytes));
  window_ = staging_ + sums;
  buffers_.push_back({{staging_, sums + traits_.own_bytes}});
  choose_way();
  for (Event* event : {&begun_, &summed_}) *event = device.make_event();
}

void MemcpyCommunicator::choose_way() {
  std::string reason;
  if (through_ != "host") {
    const std::string own = reach_peers();
    std::vector<Message> all = exchange({.bytes = own.substr(0, kMostReason)});
    for (Message& message : all)
      if (reason.empty()) reason = std::move(message.bytes);
    if (reason.empty()) return;
    if (through_ == "peer")
      throw Error(ErrorCode::resources,
                  {.where = kWhere,
                   .what = "ranks cannot copy from each other's device memory",
                   .found = reason,
                   .next = "set parallel.memcpy.through = \"host\", or choose another communicator"});
    traits_.warnings.push_back(
        "communicator memcpy copies through host memory, since ranks cannot copy from each other's "
        "device memory: " +
        reason);
  }
  for (char*& peer : buffers_[0].peers)
    if (peer) device_->release_imported(std::exchange(peer, nullptr));
  relay_ = std::make_unique<Relay>(*meeting_, *board_, *device_, rank_, size_, piece_);
  window_ = relay_->message(rank_);
}

std::string MemcpyCommunicator::reach_peers() {
  std::string reason;
  const auto attempt = [&](const std::function<void()>& work) {
    try {
      if (reason.empty()) work();
    } catch (const Error& error) {
      if (error.code() != ErrorCode::resources) throw;
      reason = "rank " + std::to_string(rank_) + ": " + error.detail().what + ": " + error.detail().found;
    }
  };
  SharedHandle own;
  attempt([&] { own = device_->export_memory(staging_); });
  const std::vector<Message> all = exchange({.bytes = own.bytes, .descriptor = Descriptor(own.descriptor)});
  attempt([&] { buffers_[0].peers = import_all(all); });
  return check_copies(std::move(reason));
}

/// Some GPUs map each other's memory and yet read something else from there.
std::string MemcpyCommunicator::check_copies(std::string reason) {
  const std::size_t bytes = std::min(piece_, std::size_t{1} << 20);
  std::vector<std::uint32_t> words(bytes / sizeof(std::uint32_t));
  const auto word = [](int rank, std::size_t i) {
    return (static_cast<std::uint32_t>(i) * 2654435761u) ^ (static_cast<std::uint32_t>(rank + 1) * 40503u);
  };
  for (std::size_t i = 0; i < words.size(); ++i) words[i] = word(rank_, i);
  const Stream stream = device_->stream(StreamKind::compute);
  device_->copy(staging_, words.data(), bytes, stream);
  device_->synchronize(stream);
  exchange({});  // the others' are there
  for (const int peer : peers()) {
    const char* const from = reason.empty() ? buffers_[0].peers[static_cast<std::size_t>(peer)] : nullptr;
    if (!from) continue;
    device_->copy(window_, from, bytes, stream);
    device_->copy(words.data(), window_, bytes, stream);
    device_->synchronize(stream);
    for (std::size_t i = 0; i < words.size() && reason.empty(); ++i)
      if (words[i] != word(peer, i))
        reason = "a copy from the memory of rank " + std::to_string(peer) + " to rank " + std::to_string(rank_) +
                 " has wrong bytes: found " + std::to_string(words[i]) + " in word " + std::to_string(i) +
                 ", expected " + std::to_string(word(peer, i));
  }
  exchange({});  // all have read
  return reason;
}

void MemcpyCommunicator::register_buffer(void* memory, std::size_t bytes) { buffers_.push_back(share(memory, bytes)); }

void MemcpyCommunicator::unregister_buffer(void* memory) {
  const auto found = std::find_if(buffers_.begin(), buffers_.end(), [&](const Buffer& b) { return b.begin == memory; });
  if (memory == nullptr || found == buffers_.end())
    fail_internal(kWhere, "unregister_buffer of memory that is not registered");
  barrier();
  for (char* peer : found->peers)
    if (peer) device_->release_imported(peer);
  *found = {};
  barrier();  // CUDA's IPC handles: memory is released by those who mapped it before its owner does
}

void MemcpyCommunicator::barrier() {
  if (!board_ && ended_) throw Error(ErrorCode::communication, {.where = kWhere, .what = *error()});
  exchange({});
}

/// All faults of set-up are faults of the group.
std::vector<Message> MemcpyCommunicator::exchange(Message own) {
  if (!meeting_) fail_internal(kWhere, "used before connect");
  if (!board_) return meeting_->exchange(std::move(own));
  if (auto text = error()) fault(*text);
  try {
    return meeting_->exchange(std::move(own));
  } catch (const Error& error) {
    if (error.code() != ErrorCode::communication) throw;
    board_->fail(board_->fault_of_peers().value_or(error.detail().what));
    meeting_->end();
    fault(*board_->fault());
  }
}

MemcpyCommunicator::Buffer MemcpyCommunicator::share(void* memory, std::size_t bytes) {
  Buffer buffer{{static_cast<char*>(memory), bytes}};
  if (size_ == 1 || relay_) return buffer;
  // A rank that has nothing of it, or cannot share it, says so to those who wait.
  SharedHandle own;
  if (bytes > 0) own = device_->export_memory(memory);
  buffer.peers = import_all(exchange({.bytes = own.bytes, .descriptor = Descriptor(own.descriptor)}));
  return buffer;
}

std::vector<char*> MemcpyCommunicator::import_all(const std::vector<Message>& all) {
  std::vector<char*> peers(all.size());
  try {
    for (std::size_t peer = 0; peer < all.size(); ++peer)
      if (static_cast<int>(peer) != rank_ && !all[peer].bytes.empty())
        peers[peer] = static_cast<char*>(
            device_->import_memory({.bytes = all[peer].bytes, .descriptor = all[peer].descriptor.get()}));
  } catch (...) {
    for (char* peer : peers)
      if (peer) device_->release_imported(peer);
    throw;
  }
  return peers;
}

}  // namespace quern::memcpy
