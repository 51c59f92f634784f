#pragma once
// Scratch memory that matmuls are timed and compared on, filled with random numbers: power, and so speed, depend on
// the data. Allocated and freed at prepare.

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "products/library/matmul_plan.h"

namespace quern::cuda {

/// Operands of a matmul in one allocation, once or in several sets; empty when there is no memory for them.
class MatmulScratch {
 public:
  MatmulScratch(const MatmulKey& key, cudaStream_t stream, std::size_t sets = 1);
  ~MatmulScratch();
  MatmulScratch(const MatmulScratch&) = delete;
  MatmulScratch& operator=(const MatmulScratch&) = delete;
  explicit operator bool() const { return memory_ != nullptr; }
  const MatmulOperands& operands() const { return operands_; }
  /// A set's operands, of which there are sets(); the first is operands().
  MatmulOperands operands(std::size_t set) const;
  std::size_t sets() const { return sets_; }

  /// Sets every byte of y.
  void reset_result(std::uint8_t byte) const;
  /// Each row of y, f32 or bf16, summed under random signs: equal results give equal sums, and the root mean square of
  /// sums' differences is about the whole rows', since errors of other signs do not cancel. Overwrites the
  /// workspace. Waits for the stream.
  std::vector<float> signed_row_sums() const;

 private:
  cudaStream_t stream_;
  DType type_;  ///< of y
  std::int64_t rows_, columns_, stride_;
  std::size_t sets_, a_bytes_ = 0, b_bytes_ = 0, y_bytes_ = 0;
  void* memory_ = nullptr;
  MatmulOperands operands_;
};

/// sets_beyond of timing.h, for a matmul's operands.
std::size_t sets_beyond(std::size_t l2_bytes, const MatmulKey& key);

/// Fills with reproducible normal-like numbers of deviation about 1, or such numbers in 8 bits.
void fill_random(void* memory, std::size_t bytes, DType type, std::uint32_t seed, cudaStream_t stream);

}  // namespace quern::cuda
