#pragma once
// Host memory that a device reaches: whole pages, near to it where the system knows how, huge ones where it has them.
// Write-combined memory is the driver's own, as it gives it.

#include <cstddef>
#include <string>

#include "quern/device.h"

namespace quern {

class PinnedPages {
 public:
  /// Zeroed. `device` is open and outlives them. Several threads take the pages, each some of them. A resources error
  /// names the shortage of the store `id`, before any page is taken where the system reports it. Ranks of a machine
  /// take theirs one after another.
  PinnedPages(Device& device, const std::string& id, MemoryKind memory, std::size_t bytes);
  ~PinnedPages();
  PinnedPages(const PinnedPages&) = delete;
  PinnedPages& operator=(const PinnedPages&) = delete;

  std::byte* data() const { return data_; }

 private:
  void map_pages(const std::string& id);
  void allocate_combined();

  Device& device_;
  const MemoryKind memory_;
  std::byte* data_ = nullptr;
  std::size_t bytes_ = 0;  // whole pages
};

}  // namespace quern
