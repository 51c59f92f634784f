#pragma once
// A large product of random square matrices on a device: what its peaks are measured with.

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "quern/device.h"

namespace quern {

/// Memory of a device, given back.
class DeviceMemory {
 public:
  DeviceMemory(Device& device, MemoryKind kind, std::size_t bytes)
      : device_(device), kind_(kind), data_(static_cast<std::byte*>(device.allocate(kind, bytes))) {}
  ~DeviceMemory() { device_.release(kind_, data_); }
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;
  std::byte* data() const { return data_; }

 private:
  Device& device_;
  MemoryKind kind_;
  std::byte* data_;
};

/// y = a b^T of 8192 x 8192 matrices (512 where the host computes), y in bf16 (f32 of f32 operands). e5m2 meets e4m3:
/// a product of two e5m2 matrices is nowhere offered.
class LargeProduct {
 public:
  /// Why the device has none in this format; empty: it has.
  static std::string refusal(const Device& device, DType format);
  /// `device` is open and outlives this.
  LargeProduct(Device& device, DType format);
  /// Enqueues it on the compute stream.
  void launch();
  double flops() const;

 private:
  View place(const Operand& operand);

  Device& device_;
  OpInstance op_;
  std::unique_ptr<Kernel> kernel_;
  DeviceMemory workspace_;
  std::vector<std::unique_ptr<DeviceMemory>> memory_;
  std::vector<View> inputs_, outputs_;
};

}  // namespace quern
