#pragma once
// Device memory, poisoned, with guarded bytes on both sides; freed with the object.

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "quern/device.h"

namespace quern::testkit {

class DeviceMemory {
 public:
  /// `guard`: each guarded byte. A read beyond the memory gives NaN in any floating-point format if it is 0xFF.
  DeviceMemory(Device& device, std::size_t bytes, MemoryKind kind = MemoryKind::device, std::uint8_t guard = 0xA5)
      : device_(device),
        kind_(kind),
        guard_(guard),
        front_(std::max(kGuardBytes, device.traits().alignment)),
        bytes_(bytes),
        stream_(device.stream(StreamKind::compute)) {
    memory_ = static_cast<char*>(device.allocate(kind, front_ + bytes + kGuardBytes));
    device.fill(memory_, guard_, front_, stream_);
    device.fill(data(), 0xFF, bytes, stream_);
    device.fill(memory_ + front_ + bytes, guard_, kGuardBytes, stream_);
    device.synchronize(stream_);
  }
  ~DeviceMemory() { device_.release(kind_, memory_); }
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;

  void* data() const { return memory_ + front_; }
  std::size_t bytes() const { return bytes_; }
  void write(const void* host) { copy(data(), host, bytes_); }
  void read(void* host) const { copy(host, data(), bytes_); }
  /// "before" or "behind", where a guarded byte has changed; else empty.
  std::string touched() const {
    std::vector<std::uint8_t> guard(front_);
    auto changed = [&](const char* from, std::size_t bytes) {
      copy(guard.data(), from, bytes);
      return std::any_of(guard.begin(), guard.begin() + static_cast<std::ptrdiff_t>(bytes),
                         [this](std::uint8_t byte) { return byte != guard_; });
    };
    if (changed(memory_, front_)) return "before";
    return changed(memory_ + front_ + bytes_, kGuardBytes) ? "behind" : "";
  }

 private:
  static constexpr std::size_t kGuardBytes = 256;

  void copy(void* to, const void* from, std::size_t bytes) const {
    device_.copy(to, from, bytes, stream_);
    device_.synchronize(stream_);
  }

  Device& device_;
  MemoryKind kind_;
  std::uint8_t guard_;
  std::size_t front_, bytes_;
  Stream stream_;
  char* memory_ = nullptr;
};

}  // namespace quern::testkit
