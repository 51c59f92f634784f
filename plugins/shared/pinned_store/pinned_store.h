#pragma once
// A store in host memory that the device reaches: puts and gets are copies by its copy engines, on the stream that they
// are given. What sets one such store apart is in its traits and in the kind of its memory.

#include <deque>
#include <optional>
#include <string>
#include <vector>

#include "quern/offload.h"
#include "shared/pinned_store/pinned_pages.h"

namespace quern {

class PinnedStore final : public OffloadStore {
 public:
  /// `traits` without the rates, which are the device's. `memory`: pinned, or write_combined.
  PinnedStore(OffloadTraits traits, MemoryKind memory);

  const OffloadTraits& traits() const override { return traits_; }
  void open(Device& device, const StorePlace& place) override;
  OffloadSlot reserve(std::size_t bytes) override;
  void put(OffloadSlot slot, std::size_t offset, const void* device_memory, std::size_t bytes, Stream stream) override;
  void get(OffloadSlot slot, std::size_t offset, void* device_memory, std::size_t bytes, Stream stream) override;
  void prefetch(OffloadSlot, std::size_t, std::size_t) override {}
  /// Kernels reach pinned memory at the host's address.
  void* map(OffloadSlot slot) override;
  void flush() override;
  std::optional<std::string> error() override { return {}; }

 private:
  std::byte* at(OffloadSlot slot, std::size_t offset) const {
    return slots_[static_cast<std::size_t>(slot)].data() + offset;
  }

  OffloadTraits traits_;
  MemoryKind memory_;
  Device* device_ = nullptr;
  std::deque<PinnedPages> slots_;
  std::vector<Stream> putting_;  // that have had puts
};

}  // namespace quern
