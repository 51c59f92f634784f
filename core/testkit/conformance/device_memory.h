#pragma once
// Device memory with guarded bytes on both sides, freed with the object.

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "conformance/report.h"
#include "conformance/subject.h"

namespace quern::conformance {

class DeviceMemory {
 public:
  static constexpr std::size_t kGuardBytes = 256;

  DeviceMemory(Device& device, std::size_t bytes, MemoryKind kind = MemoryKind::device)
      : device_(device), kind_(kind), bytes_(bytes), stream_(device.stream(StreamKind::compute)) {
    memory_ = static_cast<char*>(device.allocate(kind, bytes + 2 * kGuardBytes));
    device.fill(memory_, 0xA5, bytes + 2 * kGuardBytes, stream_);
    device.fill(data(), 0xFF, bytes, stream_);
    device.synchronize(stream_);
  }
  ~DeviceMemory() { device_.release(kind_, memory_); }
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;

  void* data() const { return memory_ + kGuardBytes; }
  std::size_t bytes() const { return bytes_; }
  void write(const void* host) { copy(data(), host, bytes_); }
  void read(void* host) const { copy(host, data(), bytes_); }
  /// "before" or "behind", where a guarded byte has changed; else empty.
  std::string touched() const {
    auto changed = [&](const char* from) {
      std::vector<std::uint8_t> guard(kGuardBytes);
      copy(guard.data(), from, guard.size());
      return std::any_of(guard.begin(), guard.end(), [](std::uint8_t byte) { return byte != 0xA5; });
    };
    return changed(memory_) ? "before" : changed(memory_ + kGuardBytes + bytes_) ? "behind" : "";
  }

 private:
  void copy(void* to, const void* from, std::size_t bytes) const {
    device_.copy(to, from, bytes, stream_);
    device_.synchronize(stream_);
  }

  Device& device_;
  MemoryKind kind_;
  std::size_t bytes_;
  Stream stream_;
  char* memory_ = nullptr;
};

/// The device that the check was told to use, open. Skips the contract when its hardware is not here.
inline std::unique_ptr<Device> open_device(PluginHost& host, const CheckOptions& options) {
  auto device = fresh_device(host, options.device);
  try {
    device->open(options.ordinal);
  } catch (const Error& error) {
    if (error.code() == ErrorCode::resources) throw Skipped{error.what()};
    throw;
  }
  return device;
}

}  // namespace quern::conformance
