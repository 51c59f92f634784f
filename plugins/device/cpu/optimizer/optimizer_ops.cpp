// The global gradient norm and the clip factor.

#include <cmath>
#include <cstring>

#include "optimizer/update.h"
#include "primitives/blocks.h"
#include "primitives/rows.h"
#include "primitives/simd.h"
#include "quern/step_state.h"
#include "runtime/kernels.h"
#include "runtime/operand_check.h"
#include "shared/operands/op_checks.h"

namespace quern::cpu {

namespace {

constexpr int kGradient = 0;  // scratch

QUERN_CPU_CLONES double sum_of_squares(const float* x, std::int64_t count) {
  double sum = 0;
#pragma omp simd reduction(+ : sum)
  for (std::int64_t i = 0; i < count; ++i) sum += double{x[i]} * double{x[i]};
  return sum;
}

double sum_of_squares(const View& x, double* partials) {
  for_blocks(x.count(), kBlockElements, [&](std::int64_t block, std::int64_t begin, std::int64_t end) {
    partials[block] = sum_of_squares(load(x, begin, end - begin, scratch(kGradient, kBlockElements)), end - begin);
  });
  double sum = 0;
  for (std::int64_t block = 0; block < block_count(x.count(), kBlockElements); ++block) sum += partials[block];
  return sum;
}

// x (any), n tensors -> sums (n) f64
Launch prepare_sum_squares(const OpInstance&) {
  return [](std::span<const View> in, std::span<const View> out, const Exec& exec) {
    for (std::size_t i = 0; i < in.size(); ++i)
      out[0].as<double>()[i] = sum_of_squares(in[i], static_cast<double*>(exec.workspace));
  };
}

/// Adds all elements of all arrays in the order that docs/ops.md fixes for clip_scale.
double total_of(std::span<const View> arrays) {
  constexpr std::size_t kLanes = 256;
  double lanes[kLanes] = {};
  std::size_t at = 0;
  for (const View& array : arrays)
    for (std::int64_t i = 0; i < array.count(); ++i) lanes[at++ % kLanes] += array.as<double>()[i];
  for (std::size_t half = kLanes / 2; half > 0; half /= 2)
    for (std::size_t lane = 0; lane < half; ++lane) lanes[lane] += lanes[lane + half];
  return lanes[0];
}

UpdateState update_from(const LossStats& stats, float clip_norm, double squares) {
  UpdateState update;
  if (!(stats.valid_tokens > 0)) return update;
  double mean = 1.0 / (stats.valid_tokens * double{kGradientSeed});
  double norm = std::sqrt(squares) * mean;
  update.gradient_norm = static_cast<float>(norm);
  if (!std::isfinite(update.gradient_norm) || !std::isfinite(stats.loss_sum)) return update;
  double clip = clip_norm > 0 && norm > clip_norm ? clip_norm / norm : 1.0;
  update.gradient_scale = static_cast<float>(clip * mean);
  update.apply = 1.0f;
  return update;
}

// stats (4) f64, step (16) u32, sums (any count) f64 each -> update (4) f32
Launch prepare_clip_scale(const OpInstance&) {
  return [](std::span<const View> in, std::span<const View> out, const Exec&) {
    const double squares = total_of(in.subspan(2));
    UpdateState update = update_from(read<LossStats>(in[0]), read<StepState>(in[1]).clip_norm, squares);
    std::memcpy(out[0].data, &update, sizeof update);
  };
}

OpSupport query_sum_squares(const OpInstance& op) {
  OperandCheck check(op, std::max<std::size_t>(op.inputs.size(), 1), 1);
  check.output(0, "sums", {static_cast<std::int64_t>(op.inputs.size())}, DType::f64);
  std::int64_t blocks = 0;
  for (std::size_t i = 0; i < op.inputs.size(); ++i) {
    check.input(i, "x", op.inputs[i].extents);
    blocks = std::max(blocks, block_count(op.inputs[i].count(), kBlockElements));
  }
  return check.support(static_cast<std::size_t>(blocks) * sizeof(double));
}

OpSupport query_clip_scale(const OpInstance& op) { return operands::check_clip_scale(op).support(); }

}  // namespace

void add_optimizer_ops(OpTable& table) {
  table["sum_squares"] = {prepare_sum_squares, query_sum_squares};
  table["clip_scale"] = {prepare_clip_scale, query_clip_scale};
  add_element_update_ops(table);
  add_adamw_8bit_op(table);
  add_muon_ops(table);
}

}  // namespace quern::cpu
