#pragma once
// Plan-time checks of an op instance, for devices. The first fault found becomes the refusal that people read.

#include <cstdint>
#include <string>
#include <vector>

#include "quern/device.h"

namespace quern::operands {

/// Dtypes that an operand may have, and what a refusal calls them.
struct Dtypes {
  Dtypes(DType only) : any{only}, name(name_of(only)) {}  // NOLINT(google-explicit-constructor): a set of one
  Dtypes(std::vector<DType> any_of, std::string called) : any(std::move(any_of)), name(std::move(called)) {}
  std::vector<DType> any;
  std::string name;
};

class OperandCheck {
 public:
  /// Expects that many operands. Those whose dtype a check does not name are of `plain`, sums of `sums`. `op` must
  /// outlive the check.
  OperandCheck(const OpInstance& op, std::size_t inputs, std::size_t outputs, Dtypes plain, Dtypes sums);

  /// An operand must be there, with these extents and such a dtype.
  OperandCheck& input(std::size_t i, const char* name, const Extents& extents);
  OperandCheck& input(std::size_t i, const char* name, const Extents& extents, const Dtypes& dtypes);
  /// An output that the program has no value for is passed over; others cannot be added to.
  OperandCheck& output(std::size_t i, const char* name, const Extents& extents);
  OperandCheck& output(std::size_t i, const char* name, const Extents& extents, const Dtypes& dtypes);
  /// An output that may be added to.
  OperandCheck& sum(std::size_t i, const char* name, const Extents& extents);
  OperandCheck& sum(std::size_t i, const char* name, const Extents& extents, const Dtypes& dtypes);
  OperandCheck& that(bool holds, const std::string& otherwise);

  bool ok() const { return refusal_.empty(); }
  OpSupport support(std::size_t workspace_bytes = 0) const { return {refusal_, ok() ? workspace_bytes : 0}; }

 private:
  void operand(const Operand& operand, const char* name, const Extents& extents, const Dtypes& dtypes);

  const OpInstance& op_;
  Dtypes plain_, sums_;
  std::string refusal_;
};

/// Extents of input i; empty when there is none, so that shapes can be named before they are checked.
Extents extents_of(const OpInstance& op, std::size_t input);
/// All dimensions but the last multiplied, and the last; (0, 0) when there is no such input.
struct Matrix {
  std::int64_t rows = 0, columns = 0;
};
Matrix matrix_of(const OpInstance& op, std::size_t input);

/// Heads of a packed qkv row, from an op's attributes: queries, keys, values.
struct PackedHeads {
  explicit PackedHeads(const Attributes& attributes);
  std::int64_t all() const { return heads + 2 * kv_heads; }
  std::int64_t rotated() const { return heads + kv_heads; }
  std::int64_t packed() const { return all() * head_dim; }
  std::int64_t values_begin() const { return rotated() * head_dim; }
  std::int64_t heads, kv_heads, head_dim;
};
/// Stretches of a packed row that have one rstd each in head_norm: heads, or all queries and all keys.
struct NormedHeads {
  explicit NormedHeads(const Attributes& attributes) : packed(attributes), width(attributes.has("over")) {}
  std::int64_t queries() const { return width ? 1 : packed.heads; }
  std::int64_t keys() const { return width ? 1 : packed.kv_heads; }
  std::int64_t all() const { return queries() + keys(); }
  std::int64_t query_size() const { return width ? packed.heads * packed.head_dim : packed.head_dim; }
  std::int64_t key_size() const { return width ? packed.kv_heads * packed.head_dim : packed.head_dim; }

  PackedHeads packed;
  bool width;
};
/// Checks that input i is a packed qkv, (N, packed).
void check_packed(OperandCheck& check, const OpInstance& op, std::size_t i, const char* name);
/// Checks the frequencies of a rotation and that input i is positions, (N) i32.
void check_rope(OperandCheck& check, const OpInstance& op, std::size_t i);

}  // namespace quern::operands
