#pragma once
// Operands of the norms of query and key heads, which every device checks alike.

#include "shared/operands/operand_check.h"

namespace quern::operands {

/// Checks all operands of head_norm, or of head_norm_rope where `rotated`.
void check_head_norm(OperandCheck& check, const OpInstance& op, bool rotated);
void check_head_norm_grad(OperandCheck& check, const OpInstance& op);

}  // namespace quern::operands
