#pragma once
// Cosines and sines of every position of a sequence, made once per op instance.

#include <cstdint>
#include <memory>
#include <vector>

#include "quern/device.h"
#include "runtime/operand_check.h"

namespace quern::cpu {

enum class Rotation { forward, inverse };

class RopeTable {
 public:
  /// For the op's `inverse_frequencies`, `magnitude` and positions below its geometry's sequence.
  RopeTable(const OpInstance& op, Rotation rotation);

  const float* cos(std::int64_t position) const { return values_.data() + position * 2 * half_; }
  const float* sin(std::int64_t position) const { return cos(position) + half_; }
  /// Throws an input error that names the first of `positions` (N) i32 that the table does not hold.
  void require(const View& positions) const;

 private:
  std::int64_t positions_, half_;
  std::vector<float> values_;  ///< (positions, 2, half), times the magnitude
};

/// Kernels share one immutable table with their copies.
std::shared_ptr<const RopeTable> make_rope_table(const OpInstance& op, Rotation rotation);

}  // namespace quern::cpu
