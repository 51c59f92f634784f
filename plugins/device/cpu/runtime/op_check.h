#pragma once
// Plan-time checks of an op instance. The first fault found becomes the refusal that people read.

#include <string>

#include "quern/device.h"

namespace quern::cpu {

class OpCheck {
 public:
  /// Expects that many operands. `op` must outlive the check.
  OpCheck(const OpInstance& op, std::size_t inputs, std::size_t outputs);

  /// An operand must have these extents and be of a real dtype.
  OpCheck& input(std::size_t i, const char* name, const Extents& extents);
  OpCheck& output(std::size_t i, const char* name, const Extents& extents);
  /// ... and of exactly this dtype.
  OpCheck& input(std::size_t i, const char* name, const Extents& extents, DType dtype);
  OpCheck& output(std::size_t i, const char* name, const Extents& extents, DType dtype);
  /// An output that this op cannot add to.
  OpCheck& overwrites(std::size_t i, const char* name);
  OpCheck& that(bool holds, const std::string& otherwise);

  bool ok() const { return refusal_.empty(); }
  OpSupport support(std::size_t workspace_bytes = 0) const { return {refusal_, ok() ? workspace_bytes : 0}; }

 private:
  void operand(const Operand& operand, bool must_be_present, const char* name, const Extents& extents,
               const DType* dtype);

  const OpInstance& op_;
  std::string refusal_;
};

/// Extents of input i; empty when there is none, so that shapes can be named before they are checked.
Extents extents_of(const OpInstance& op, std::size_t input);
/// Product of all dimensions but the last, and the last; (0, 0) when there is no such input.
struct Matrix {
  std::int64_t rows = 0, columns = 0;
};
Matrix matrix_of(const OpInstance& op, std::size_t input);

}  // namespace quern::cpu
