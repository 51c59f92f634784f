#include "transfer_queue.h"

#include <algorithm>
#include <cstring>

namespace quern::disk {

namespace {

/// A smaller part is not worth a request of its own.
constexpr std::size_t kPartBlocks = 64;

}  // namespace

TransferQueue::TransferQueue(DiskFile& file, int threads) : file_(file) {
  for (int i = 0; i < threads; ++i) threads_.emplace_back([this] { work(); });
}

TransferQueue::~TransferQueue() {
  wait_for_all();
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  ready_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

TransferQueue::Ticket TransferQueue::add(const Transfer& transfer) {
  const std::size_t blocks = (transfer.begin + transfer.bytes - 1) / kBlock - transfer.begin / kBlock + 1;
  const std::lock_guard lock(mutex_);
  entries_.push_back({transfer, std::clamp<std::size_t>(blocks / kPartBlocks, 1, threads_.size()), 0, 0});
  ready_.notify_all();
  return ++added_;
}

void TransferQueue::wait(Ticket ticket) {
  std::unique_lock lock(mutex_);
  ended_.wait(lock, [&] { return finished_ >= ticket; });
}

void TransferQueue::wait_for_all() {
  std::unique_lock lock(mutex_);
  ended_.wait(lock, [&] { return finished_ == added_; });
}

std::optional<std::string> TransferQueue::error() {
  const std::lock_guard lock(mutex_);
  return fault_;
}

void TransferQueue::work() {
  alignas(kBlock) std::byte edge[kBlock];
  std::unique_lock lock(mutex_);
  for (;;) {
    ready_.wait(lock,
                [&] { return stopping_ || (!entries_.empty() && entries_.front().next < entries_.front().parts); });
    if (stopping_) return;
    Entry& entry = entries_.front();  // stays where it is while others are added behind it
    const std::size_t part = entry.next++;
    std::string fault;
    if (!fault_) {
      lock.unlock();
      fault = run(entry.transfer, part, entry.parts, edge);
      lock.lock();
    }
    if (!fault.empty() && !fault_) fault_ = std::move(fault);
    if (++entry.ended < entry.parts) continue;
    entries_.pop_front();
    ++finished_;
    ended_.notify_all();
    ready_.notify_all();
  }
}

// The blocks that the range does not cover whole keep what else they have: it is read before they are written.
std::string TransferQueue::run(const Transfer& transfer, std::size_t part, std::size_t parts, std::byte* edge) {
  const std::size_t first = transfer.begin / kBlock, end = transfer.begin + transfer.bytes;
  const std::size_t blocks = (end - 1) / kBlock - first + 1;
  const std::size_t from = blocks * part / parts, to = blocks * (part + 1) / parts;
  std::byte* memory = transfer.memory + from * kBlock;
  if (!transfer.write) return file_.read(memory, first + from, to - from);
  const std::size_t before = transfer.begin % kBlock, behind = blocks * kBlock - (before + transfer.bytes);
  for (const std::size_t block : {std::size_t{0}, blocks - 1}) {
    const bool has_before = block == 0 && before > 0, has_behind = block == blocks - 1 && behind > 0;
    if (block < from || block >= to || !(has_before || has_behind)) continue;
    if (std::string fault = file_.read(edge, first + block, 1); !fault.empty()) return fault;
    std::byte* at = transfer.memory + block * kBlock;
    if (has_before) std::memcpy(at, edge, before);
    if (has_behind) std::memcpy(at + kBlock - behind, edge + kBlock - behind, behind);
  }
  return file_.write(memory, first + from, to - from);
}

}  // namespace quern::disk
