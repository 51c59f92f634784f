#pragma once
// A device that counts allocations, mapped memory of peers and pinned memory that were not released.

#include <atomic>

#include "quern/testkit/forwarding_device.h"

namespace quern::conformance {

class CountingDevice final : public testkit::ForwardingDevice {
 public:
  using ForwardingDevice::ForwardingDevice;
  int held() const { return held_; }

  void* allocate(MemoryKind kind, std::size_t bytes) override { return taken(ForwardingDevice::allocate(kind, bytes)); }
  void release(MemoryKind kind, void* memory) noexcept override {
    ForwardingDevice::release(kind, memory);
    held_ -= memory != nullptr;
  }
  void* import_memory(const SharedHandle& handle) override { return taken(ForwardingDevice::import_memory(handle)); }
  void release_imported(void* memory) noexcept override {
    ForwardingDevice::release_imported(memory);
    held_ -= memory != nullptr;
  }
  void pin(void* memory, std::size_t bytes) override {
    ForwardingDevice::pin(memory, bytes);
    ++held_;
  }
  void unpin(void* memory) noexcept override {
    ForwardingDevice::unpin(memory);
    --held_;
  }

 private:
  void* taken(void* memory) {
    held_ += memory != nullptr;
    return memory;
  }

  std::atomic<int> held_ = 0;
};

}  // namespace quern::conformance
