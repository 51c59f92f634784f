#include "shared/operands/head_norm_check.h"

namespace quern::operands {

void check_head_norm(OperandCheck& check, const OpInstance& op, bool rotated) {
  const PackedHeads packed(op.attributes);
  check_packed(check, op, 0, "qkv");
  check.input(1, "query_weight", {packed.head_dim}).input(2, "key_weight", {packed.head_dim});
  check.output(0, "y", extents_of(op, 0)).output(1, "rstd", {matrix_of(op, 0).rows, packed.rotated()}, DType::f32);
  if (rotated) {
    check_rope(check, op, 3);
    check.output(2, "z", extents_of(op, 0));
  }
}

void check_head_norm_grad(OperandCheck& check, const OpInstance& op) {
  const PackedHeads packed(op.attributes);
  check_packed(check, op, 0, "dy");
  check_packed(check, op, 1, "qkv");
  check.input(2, "query_weight", {packed.head_dim}).input(3, "key_weight", {packed.head_dim});
  check.input(4, "rstd", {matrix_of(op, 1).rows, packed.rotated()}, DType::f32).output(0, "dqkv", extents_of(op, 1));
  check.sum(1, "dquery_weight", {packed.head_dim}).sum(2, "dkey_weight", {packed.head_dim});
}

}  // namespace quern::operands
