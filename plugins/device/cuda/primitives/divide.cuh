#pragma once
// Division by a number known at launch, as a multiplication. Granlund & Montgomery, "Division by Invariant Integers
// using Multiplication" (1994).

#include <cuda_runtime.h>

#include <cstdint>

namespace quern::cuda {

/// n / divisor and the rest, for n below 2^31.
class FastDivide {
 public:
  explicit FastDivide(std::uint32_t divisor = 1) : divisor_(divisor) {
    while ((std::uint64_t{1} << shift_) < divisor) ++shift_;
    multiplier_ = static_cast<std::uint32_t>((((std::uint64_t{1} << shift_) - divisor) << 32) / divisor + 1);
  }
  __device__ __forceinline__ std::uint32_t divide(std::uint32_t n, std::uint32_t& rest) const {
    const std::uint32_t quotient = (__umulhi(n, multiplier_) + n) >> shift_;
    rest = n - quotient * divisor_;
    return quotient;
  }

 private:
  std::uint32_t divisor_, multiplier_ = 0, shift_ = 0;
};

}  // namespace quern::cuda
