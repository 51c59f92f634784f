#pragma once
// Matmuls of random matrices on a device, to measure its rates.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "quern/device.h"

namespace quern::bench {

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

enum class ProductScales : std::uint8_t {
  none,
  tensor,   ///< one of each operand
  row,      ///< one a row of a, one a column of y of b
  line,     ///< of 1 x 128 elements of each, along k
  square,   ///< of 1 x 128 elements of a and 128 x 128 of b
  squares,  ///< of 128 x 128 elements of each, of which one in sixteen is another than its neighbours
};

/// y (m, n) = op(a) op(b), sums over k, in bf16 (f32 of f32 operands). e5m2 meets e4m3: a matmul of two e5m2 matrices
/// is nowhere offered.
struct ProductForm {
  DType format = DType::bf16;
  ProductScales scales = ProductScales::none;
  bool transpose_a = false, transpose_b = true;
  std::int64_t m = 0, n = 0, k = 0;
  double flops() const { return 2 * static_cast<double>(m) * static_cast<double>(n) * static_cast<double>(k); }
};
/// Sums of 8-bit floats may be in fewer bits than fp32 where `fast` says so.
OpInstance product_op(const ProductForm& form, bool fast = false);
/// 8192 x 8192 matrices (512 where the host computes).
ProductForm large_product(const Device& device, DType format);

/// A matmul of random matrices on a device.
class RandomProduct {
 public:
  /// `device` is open, takes the op and outlives this.
  RandomProduct(Device& device, const OpInstance& op);
  /// Enqueues it on the compute stream.
  void launch();

 private:
  View place(const Operand& operand);

  Device& device_;
  OpInstance op_;
  std::unique_ptr<Kernel> kernel_;
  DeviceMemory workspace_;
  std::vector<std::unique_ptr<DeviceMemory>> memory_;
  std::vector<View> inputs_, outputs_;
};

}  // namespace quern::bench
