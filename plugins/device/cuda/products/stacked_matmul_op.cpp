// stacked_matmul: of each matrix y = alpha op(a) op(b) + beta c, accumulated in fp32, rounded once; one call of
// cuBLASLt for the stack.

#include <algorithm>
#include <memory>

#include "products/library/matmul_plan.h"
#include "quern/error.h"
#include "runtime/kernels.h"
#include "runtime/operand_check.h"
#include "shared/operands/op_checks.h"

namespace quern::cuda {

namespace {

using operands::StackedMatmul;

OpSupport query(const OpInstance& op, const CudaTraits&) {
  OperandCheck check(op, std::clamp<std::size_t>(op.inputs.size(), 2, 3), 1);
  operands::check_stacked_matmul(check, op);
  for (const Operand& operand : op.inputs)
    if (check.ok() && operand.present)
      check.that(operand.dtype == op.outputs[0].dtype, "on cuda takes and makes one dtype");
  return check.support(kMatmulWorkspace);
}

/// The largest power of two, 256 at most, that divides the bytes of all operands' matrices.
int alignment_of(const OpInstance& op) {
  std::int64_t alignment = 256;
  auto count = [&](const Operand& operand) {
    if (!operand.present) return;
    const std::int64_t bytes = operand.bytes() / std::max<std::int64_t>(operand.extents[0], 1);
    while (bytes % alignment != 0) alignment /= 2;
  };
  for (const Operand& operand : op.inputs) count(operand);
  count(op.outputs[0]);
  return static_cast<int>(alignment);
}

Launch prepare(const OpInstance& op, CudaContext& context) {
  const StackedMatmul s(op);
  if (op.outputs[0].count() == 0) return [](std::span<const View>, std::span<const View>, const Exec&) {};
  MatmulKey key;
  key.m = s.m, key.n = s.n, key.k = s.k;
  key.transpose_a = s.transpose_a, key.transpose_b = s.transpose_b;
  key.a = key.b = key.y = op.outputs[0].dtype;
  key.factor = s.alpha, key.stack = s.count, key.beta = s.adds ? s.beta : 0;
  if (s.count > 1) key.alignment = alignment_of(op);
  const std::shared_ptr<const MatmulPlan> plan = context.plans->make(context, key);
  if (!plan)
    throw Error(ErrorCode::resources, {.where = "device cuda",
                                       .what = "cuBLASLt has no algorithm for the matmul " + key.text(),
                                       .next = "set optimizer.muon.matmuls to \"fp32\", or choose another optimizer"});
  return [plan, lt = context.lt](std::span<const View> in, std::span<const View> out, const Exec& exec) {
    plan->run(lt,
              {.a = in[0].data,
               .b = in[1].data,
               .y = out[0].data,
               .workspace = exec.workspace,
               .c = in.size() > 2 ? in[2].data : nullptr},
              stream_of(exec));
  };
}

}  // namespace

void add_stacked_matmul_op(OpTable& table) { table["stacked_matmul"] = {prepare, query}; }

}  // namespace quern::cuda
