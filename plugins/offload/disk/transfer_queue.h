#pragma once
// Transfers between staging memory and a file, one after another in the order in which they were added, each by several
// threads at once: a later one may read what an earlier one wrote, and a disk gets enough requests to be fast.

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "disk_file.h"

namespace quern::disk {

/// A range of bytes of the file, and the staging memory that has its blocks from the first byte's on.
struct Transfer {
  bool write = false;
  std::byte* memory = nullptr;  ///< aligned; byte `begin` of the file is at memory + begin % kBlock
  std::size_t begin = 0, bytes = 0;
};

class TransferQueue {
 public:
  /// Number of a transfer; 0: none.
  using Ticket = std::uint64_t;

  TransferQueue(DiskFile& file, int threads);
  /// Ends the transfers that were added first.
  ~TransferQueue();
  TransferQueue(const TransferQueue&) = delete;
  TransferQueue& operator=(const TransferQueue&) = delete;

  /// Borrows the memory until the transfer has ended.
  Ticket add(const Transfer& transfer);
  /// Blocks until the transfer and all before it have ended, be it with a fault.
  void wait(Ticket ticket);
  void wait_for_all();

  /// The first fault; later transfers do nothing.
  std::optional<std::string> error();

 private:
  struct Entry {
    Transfer transfer;
    std::size_t parts = 0, next = 0, ended = 0;
  };
  void work();
  std::string run(const Transfer& transfer, std::size_t part, std::size_t parts, std::byte* edge);

  DiskFile& file_;
  std::mutex mutex_;
  std::condition_variable ready_, ended_;
  std::deque<Entry> entries_;
  Ticket added_ = 0, finished_ = 0;
  bool stopping_ = false;
  std::optional<std::string> fault_;
  std::vector<std::thread> threads_;
};

}  // namespace quern::disk
