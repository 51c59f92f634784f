#pragma once
// State on disk. A put copies into staging memory and is written behind the stream's back; a get reads ahead of its
// copies. Staging memory belongs to a stream, so a stream waits for the disk, and never for another stream.

#include <map>
#include <memory>
#include <vector>

#include "disk_file.h"
#include "options.h"
#include "quern/offload.h"
#include "transfer_queue.h"

namespace quern::disk {

class DiskStore final : public OffloadStore {
 public:
  explicit DiskStore(const DiskOptions& options);
  ~DiskStore() override;

  const OffloadTraits& traits() const override { return traits_; }
  void open(Device& device, const StorePlace& place) override;
  OffloadSlot reserve(std::size_t bytes) override;
  void put(OffloadSlot slot, std::size_t offset, const void* device_memory, std::size_t bytes, Stream stream) override;
  void get(OffloadSlot slot, std::size_t offset, void* device_memory, std::size_t bytes, Stream stream) override;
  void prefetch(OffloadSlot, std::size_t, std::size_t) override {}  // a get reads ahead itself
  void* map(OffloadSlot slot) override;
  void flush() override;
  std::optional<std::string> error() override;

 private:
  /// Pinned memory of one stream. Its tickets are touched in the stream's order only.
  struct Staging;
  Staging& staging_of(Stream stream);
  std::vector<Transfer> chunks_of(OffloadSlot slot, std::size_t offset, std::size_t bytes) const;

  DiskOptions options_;
  OffloadTraits traits_;
  Device* device_ = nullptr;
  std::unique_ptr<DiskFile> file_;
  std::vector<std::size_t> slots_;  // first byte in the file
  std::map<void*, std::unique_ptr<Staging>> staging_;
  std::unique_ptr<TransferQueue> queue_;
};

}  // namespace quern::disk
