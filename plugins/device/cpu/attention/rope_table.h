#pragma once
// Cosines and sines of every position of a sequence, computed in double once per op instance. Su et al., "RoFormer"
// (2021).

#include <cstdint>
#include <memory>
#include <vector>

#include "quern/device.h"
#include "runtime/op_check.h"

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

/// Heads of a packed qkv row, from an op's attributes.
struct PackedHeads {
  explicit PackedHeads(const Attributes& attributes);
  std::int64_t packed() const { return (heads + 2 * kv_heads) * head_dim; }
  std::int64_t rotated() const { return heads + kv_heads; }
  std::int64_t values_begin() const { return rotated() * head_dim; }
  std::int64_t heads, kv_heads, head_dim;
};

/// Checks that input i is a packed qkv, (N, packed).
void check_packed(OpCheck& check, const OpInstance& op, std::size_t i, const char* name);
/// Checks the frequencies and that input i is positions, (N) i32.
void check_rope(OpCheck& check, const OpInstance& op, std::size_t i);

}  // namespace quern::cpu
