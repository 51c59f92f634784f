// Matmuls of few inner dimensions with columns of a wide matrix: add_matmul, columns_matmul and columns_weight_grad.
// cuBLASLt reads and adds to the columns where they are.

#include <memory>
#include <numeric>

#include "products/library/matmul_plan.h"
#include "quern/error.h"
#include "runtime/check.h"
#include "runtime/kernels.h"
#include "runtime/operand_check.h"
#include "shared/operands/op_checks.h"

namespace quern::cuda {

namespace {

using operands::NarrowMatmul;

MatmulKey make_key(const OpInstance& op, const NarrowMatmul& p) {
  MatmulKey key;
  key.a = key.b = op.inputs[0].dtype, key.y = op.outputs[0].dtype;
  key.factor = p.factor;
  const auto begin = p.first * static_cast<std::int64_t>(size_of(key.a));
  key.alignment = static_cast<int>(std::gcd(begin, std::int64_t{256}));
  if (op.kind == "add_matmul") {
    key.m = p.rows, key.n = p.columns, key.k = p.rank;
    key.transpose_b = p.turned, key.stride_y = p.width, key.accumulate = true;
  } else if (op.kind == "columns_matmul") {
    key.m = p.rows, key.n = p.rank, key.k = p.columns;
    key.stride_a = p.width;
  } else {
    key.m = p.columns, key.n = p.rank, key.k = p.rows;
    key.transpose_a = true, key.stride_a = p.width, key.accumulate = op.outputs[0].accumulate;
  }
  return key;
}

OpSupport query(const OpInstance& op, const CudaTraits&) {
  return operands::check_narrow_matmul(OperandCheck(op, op.kind == "columns_matmul" ? 2 : 3, 1), op)
      .support(kMatmulWorkspace);
}

Launch prepare(const OpInstance& op, CudaContext& context) {
  const NarrowMatmul p(op);
  const MatmulKey key = make_key(op, p);
  if (p.rows == 0) return [](std::span<const View>, std::span<const View>, const Exec&) {};
  const std::shared_ptr<const MatmulPlan> plan = context.plans->make(context, key);
  if (!plan)
    throw Error(ErrorCode::resources, {.where = "device cuda",
                                       .what = "cuBLASLt has no algorithm for the matmul " + key.text(),
                                       .next = "choose a rank that is a multiple of 8"});
  const std::size_t begin = static_cast<std::size_t>(p.first) * size_of(key.a);
  return [plan, begin, adds = op.kind == "add_matmul", lt = context.lt](std::span<const View> in,
                                                                        std::span<const View> out, const Exec& exec) {
    MatmulOperands operands{.workspace = exec.workspace};
    operands.a = adds ? in[1].data : static_cast<const char*>(in[0].data) + begin;
    operands.b = adds ? in[2].data : in[1].data;
    operands.y = adds ? static_cast<char*>(out[0].data) + begin : out[0].data;
    if (adds && out[0].data != in[0].data)
      QUERN_CUDA(cudaMemcpyAsync(out[0].data, in[0].data, in[0].bytes(), cudaMemcpyDeviceToDevice, stream_of(exec)));
    plan->run(lt, operands, stream_of(exec));
  };
}

}  // namespace

void add_narrow_matmul_ops(OpTable& table) {
  for (const char* kind : {"add_matmul", "columns_matmul", "columns_weight_grad"}) table[kind] = {prepare, query};
}

}  // namespace quern::cuda
