// lm_loss: cross-entropy of logits x W^T against the targets, in nats, chunk by chunk over tokens so that logits are
// never stored whole. lm_loss_train makes the gradients in the same pass: each logit is exponentiated once.

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "primitives/rows.h"
#include "primitives/softmax_rows.h"
#include "products/blas.h"
#include "quantization/observe.h"
#include "quern/numeric.h"
#include "runtime/kernels.h"
#include "runtime/operand_check.h"
#include "runtime/support.h"
#include "shared/operands/loss_operands.h"

namespace quern::cpu {

namespace {

using enum operands::LossInput;
using operands::loss_is_quantized, operands::loss_weight_of;

struct Loss {
  std::int64_t tokens = 0, width = 0, vocabulary = 0, chunk = 0;
  DType logit_dtype = DType::f32;     ///< logits and their gradients round to it
  bool quantized = false;             ///< x and weight come in 8 bits with scales,
  DType gradient_dtype = DType::f32;  ///< and the logits' gradients round to this format
  float gradient_scale = 1;           ///< times this
  float z_loss = 0, seed = 1, cap = 0;
  bool train = false;
  bool input_gradient = false, weight_gradient = false;
  bool add_weight_gradient = false;
  bool observe = false, add_observation = false;                          ///< the logits' gradients
  std::int64_t panel_x = 0, panel_weight = 0, sum_x = 0, sum_weight = 0;  ///< floats of workspace
};

Loss make_loss(const OpInstance& op) {
  const Operand &x = op.inputs[kX], &weight = op.inputs[loss_weight_of(op)];
  Loss loss;
  loss.tokens = x.extents[0];
  loss.width = x.extents[1];
  loss.vocabulary = weight.extents[0];
  loss.logit_dtype = x.dtype == DType::bf16 ? DType::bf16 : DType::f32;
  loss.z_loss = static_cast<float>(op.attributes.real_or("z_loss", 0.0));
  loss.cap = static_cast<float>(op.attributes.real_or("cap", 0.0));
  loss.seed = static_cast<float>(op.attributes.real_or("seed", 1.0));
  // By default a chunk's logits take 8 MiB: they stay in the last-level cache between the matmuls that share them.
  std::int64_t fitting =
      std::clamp<std::int64_t>((std::int64_t{1} << 21) / std::max<std::int64_t>(loss.vocabulary, 1), 64, 1024);
  loss.chunk = std::min(op.attributes.integer_or("chunk", fitting), std::max<std::int64_t>(loss.tokens, 1));
  loss.train = op.outputs.size() >= 3;
  loss.observe = op.outputs.size() > 3 && op.outputs[3].present;
  loss.add_observation = loss.observe && op.outputs[3].accumulate;
  loss.quantized = loss_is_quantized(op);
  loss.gradient_dtype = loss.logit_dtype;
  if (loss.quantized && loss.train) {
    loss.gradient_dtype = *dtype_named(op.attributes.word("gradient_format"));
    loss.gradient_scale = logit_gradient_scale(loss.seed, loss.z_loss, loss.gradient_dtype);
  }
  loss.input_gradient = loss.train && op.outputs[1].present;
  loss.weight_gradient = loss.train && op.outputs[2].present;
  loss.panel_x = x.dtype == DType::f32 && !loss.quantized ? 0 : loss.chunk * loss.width;
  loss.panel_weight = weight.dtype == DType::f32 && !loss.quantized ? 0 : loss.vocabulary * loss.width;
  if (loss.input_gradient && op.outputs[1].dtype != DType::f32) loss.sum_x = loss.chunk * loss.width;
  if (loss.weight_gradient) {
    loss.add_weight_gradient = op.outputs[2].accumulate;
    if (op.outputs[2].dtype != DType::f32) loss.sum_weight = loss.vocabulary * loss.width;
  }
  return loss;
}

/// Cross-entropy of one row of logits; in training the row becomes
/// seed * (softmax - onehot + 2 z_loss logsumexp softmax), times the slope of the cap.
float token_loss(const Loss& loss, float* logits, std::int32_t target) {
  const std::int64_t count = loss.vocabulary;
  round_in_place(loss.logit_dtype, logits, count);
  if (target < 0) {
    if (loss.train) std::fill_n(logits, count, 0.0f);
    return 0.0f;
  }
  float* capped = nullptr;
  if (loss.cap > 0) {
    soft_cap(logits, count, loss.cap, logits);
    round_in_place(loss.logit_dtype, logits, count);
    if (loss.train) std::copy_n(logits, count, capped = scratch(0, count));
  }
  const float maximum = row_maximum(logits, count), chosen = logits[target];
  const double sum = loss.train ? exponentiate(logits, count, maximum) : sum_of_exponentials(logits, count, maximum);
  const double logsumexp = maximum + std::log(sum);
  if (loss.train) {
    multiply(logits, count, static_cast<float>(loss.seed * (1 + 2 * loss.z_loss * logsumexp) / sum), logits);
    logits[target] -= loss.seed;
    if (capped) soft_cap_grad(capped, count, loss.cap, logits);
    if (loss.quantized) multiply(logits, count, 1.0f / loss.gradient_scale, logits);
    round_in_place(loss.gradient_dtype, logits, count);
    if (loss.quantized) multiply(logits, count, loss.gradient_scale, logits);
  }
  return static_cast<float>(logsumexp - chosen);
}

/// Of logits' gradients as they were rounded, rows of tokens that count: every zero counts as underflowed.
void observe_gradients(const Loss& loss, const float* gradients, std::int64_t rows, const std::int32_t* targets,
                       ScaleObservation& seen) {
#pragma omp parallel
  {
    ScaleObservation part = no_observation();
#pragma omp for schedule(static)
    for (std::int64_t i = 0; i < rows; ++i) {
      if (targets[i] < 0) continue;
      for (std::int64_t j = 0; j < loss.vocabulary; ++j) {
        const float magnitude = std::fabs(gradients[i * loss.vocabulary + j]);
        if (std::isfinite(magnitude))
          part.amax = std::max(part.amax, magnitude);
        else
          ++part.non_finite;
        part.underflowed += magnitude == 0;
      }
      part.elements += static_cast<std::uint64_t>(loss.vocabulary);
    }
#pragma omp critical
    merge(part, seen);
  }
}

/// x's rows [begin, begin + count) as floats, times a scale, which is a power of two: as good as scaling the results.
const float* load_rows(const View& x, const View& scale, std::int64_t begin, std::int64_t count, float* panel) {
  View rows = x;
  rows.data = x.as<char>() + static_cast<std::size_t>(begin * x.columns()) * size_of(x.dtype);
  rows.extents = {count, x.columns()};
  const float* values = load_all(rows, panel);
  if (!scale) return values;
#pragma omp parallel for schedule(static)
  for (std::int64_t i = 0; i < count; ++i)
    multiply(panel + i * x.columns(), x.columns(), *scale.as<float>(), panel + i * x.columns());
  return panel;
}

void store_rows(const View& y, std::int64_t begin, std::int64_t count, const float* values, bool add) {
#pragma omp parallel for schedule(static)
  for (std::int64_t i = 0; i < count; ++i) {
    const float* row = values + i * y.columns();
    if (add)
      accumulate(y, (begin + i) * y.columns(), y.columns(), row);
    else
      store(y, (begin + i) * y.columns(), y.columns(), row);
  }
}

void run(const Loss& loss, std::span<const View> inputs, std::span<const View> outputs, const Exec& exec) {
  // The transposed copies hold the same numbers, so that all three matmuls read the same panels.
  const View &x = inputs[loss.quantized ? kXCodes : kX], &targets = inputs[kTargets];
  const View x_scale = loss.quantized ? inputs[kXScale] : View{};
  const View weight_scale = loss.quantized ? inputs[kWeightScale] : View{};
  check_indices(targets, -1, loss.vocabulary, "targets");
  const auto* target_of = targets.as<std::int32_t>();
  const std::int64_t width = loss.width, vocabulary = loss.vocabulary;
  Workspace workspace(exec.workspace);
  float* logits = workspace.floats(loss.chunk * vocabulary);
  float* panel = workspace.floats(loss.panel_x);
  const float* weight = load_rows(inputs[loss.quantized ? kWeightCodes : kWeight], weight_scale, 0, vocabulary,
                                  workspace.floats(loss.panel_weight));
  float* dx_sums = workspace.floats(loss.sum_x);
  float* dweight = loss.sum_weight > 0    ? workspace.floats(loss.sum_weight)
                   : loss.weight_gradient ? outputs[2].as<float>()
                                          : nullptr;
  float* losses = outputs[0].as<float>();
  if (loss.observe) {
    auto& seen = *outputs[3].as<ScaleObservation>();
    if (!loss.add_observation) seen = no_observation();
    seen.largest_scale = seen.smallest_scale = loss.gradient_scale;
  }
  bool add_dweight = loss.add_weight_gradient && loss.sum_weight == 0;
  for (std::int64_t begin = 0; begin < loss.tokens; begin += loss.chunk) {
    const std::int64_t count = std::min(loss.chunk, loss.tokens - begin);
    const float* rows = load_rows(x, x_scale, begin, count, panel);
    gemm(count, vocabulary, width, 1, {rows, width}, {weight, width, MatrixView::Read::transposed}, 0, logits,
         vocabulary);
#pragma omp parallel for schedule(static)
    for (std::int64_t i = 0; i < count; ++i) {
      float value = token_loss(loss, logits + i * vocabulary, target_of[begin + i]);
      if (losses) losses[begin + i] = value;
    }
    if (loss.observe) observe_gradients(loss, logits, count, target_of + begin, *outputs[3].as<ScaleObservation>());
    if (loss.weight_gradient) {
      gemm(vocabulary, width, count, 1, {logits, vocabulary, MatrixView::Read::transposed}, {rows, width},
           add_dweight ? 1 : 0, dweight, width);
      add_dweight = true;
    }
    if (loss.input_gradient) {
      float* dx = loss.sum_x > 0 ? dx_sums : outputs[1].as<float>() + begin * width;
      gemm(count, width, vocabulary, 1, {logits, vocabulary}, {weight, width}, 0, dx, width);
      if (loss.sum_x > 0) store_rows(outputs[1], begin, count, dx, false);
    }
  }
  if (loss.sum_weight > 0) store_rows(outputs[2], 0, vocabulary, dweight, loss.add_weight_gradient);
}

OpSupport query(const OpInstance& op) {
  const std::size_t outputs = op.kind == "lm_loss" ? 1 : 3;
  const bool observed = outputs == 3 && op.outputs.size() == 4;
  OperandCheck check(op, op.inputs.size() == kInputsWithCodes ? op.inputs.size() : 3, outputs + (observed ? 1 : 0));
  const Matrix x = matrix_of(op, kX), weight = matrix_of(op, loss_weight_of(op));
  const Extents targets = extents_of(op, 2);
  check.input(kX, "x", {x.rows, x.columns});
  if (!loss_is_quantized(op)) check.input(kWeight, "weight", {weight.rows, x.columns});
  check.input(2, "targets", targets, DType::i32)
      .that(element_count(targets) == x.rows, "needs a target for each row of x");
  check.output(0, "token_loss", {x.rows}, DType::f32);
  if (outputs == 3) check.output(1, "dx", {x.rows, x.columns}).sum(2, "dweight", {weight.rows, x.columns});
  check.that(op.attributes.integer_or("chunk", 1) >= 1, "needs a chunk of at least 1");
  if (loss_is_quantized(op)) {
    check.input(kXCodes, "x_q", {x.rows, x.columns}).input(kXScale, "x_scale", {1});
    check.input(kWeightCodes, "weight_q", {weight.rows, x.columns}).input(kWeightScale, "weight_scale", {1});
  }
  if (observed) {
    check.that(loss_is_quantized(op), "observes only the gradients of quantized logits");
    check.sum(3, "observation", {kScaleObservationWords}, DType::u32);
  }
  if (!check.ok()) return check.support();
  Loss loss = make_loss(op);
  std::size_t bytes = float_bytes(loss.chunk * loss.vocabulary);
  for (std::int64_t floats : {loss.panel_x, loss.panel_weight, loss.sum_x, loss.sum_weight})
    bytes += float_bytes(floats);
  return check.support(bytes);
}

Launch prepare(const OpInstance& op) {
  return [loss = make_loss(op)](std::span<const View> inputs, std::span<const View> outputs, const Exec& exec) {
    run(loss, inputs, outputs, exec);
  };
}

/// stats[0] (+)= weight times the sum of losses, stats[1] (+)= targets that count, stats[2] (+)= `correct` over
/// them; in order, in fp64.
void add_stats(const View& token_loss, const View& targets, const View& correct, const View& stats, double weight,
               bool counts, bool add) {
  const auto* loss = token_loss.as<float>();
  const auto* target = targets.as<std::int32_t>();
  double sum = 0, valid = 0, right = 0;
  for (std::int64_t i = 0, count = targets.count(); i < count; ++i) {
    sum += target[i] >= 0 ? double{loss[i]} : 0.0;
    valid += target[i] >= 0 ? 1.0 : 0.0;
    if (correct && target[i] >= 0) right += correct.as<float>()[i];
  }
  auto* out = stats.as<double>();
  if (!add) std::fill_n(out, stats.count(), 0.0);
  out[0] += weight * sum;
  if (counts) out[1] += valid;
  out[2] += right;
}

OpSupport query_stats(const OpInstance& op) {
  const bool correct = op.inputs.size() == 3 && op.inputs[2].present;
  OperandCheck check(op, op.inputs.size() == 3 ? 3 : 2, 1);
  const Extents tokens = extents_of(op, 0);
  check.input(0, "loss", tokens, DType::f32).input(1, "targets", tokens, DType::i32);
  if (correct) check.input(2, "correct", tokens, DType::f32);
  return check.sum(0, "stats", {4}, DType::f64).support();
}

Launch prepare_stats(const OpInstance& op) {
  return [weight = op.attributes.real_or("weight", 1), counts = op.attributes.integer_or("counts", 1) != 0,
          add = op.outputs[0].accumulate](std::span<const View> inputs, std::span<const View> outputs, const Exec&) {
    add_stats(inputs[0], inputs[1], inputs.size() > 2 ? inputs[2] : View{}, outputs[0], weight, counts, add);
  };
}

OpSupport query_stats_grad(const OpInstance& op) {
  OperandCheck check(op, 1, 1);
  const Extents targets = extents_of(op, 0);
  return check.input(0, "targets", targets, DType::i32).output(0, "dloss", targets, DType::f32).support();
}

/// The factor where a target counts, 0 elsewhere.
Launch prepare_stats_grad(const OpInstance& op) {
  return [factor = static_cast<float>(op.attributes.real("factor"))](std::span<const View> inputs,
                                                                     std::span<const View> outputs, const Exec&) {
    const auto* target = inputs[0].as<std::int32_t>();
    auto* gradient = outputs[0].as<float>();
    for (std::int64_t i = 0, count = inputs[0].count(); i < count; ++i) gradient[i] = target[i] >= 0 ? factor : 0.0f;
  };
}

}  // namespace

void add_loss_ops(OpTable& table) {
  table["lm_loss"] = {prepare, query};
  table["lm_loss_train"] = {prepare, query};
  table["loss_stats"] = {prepare_stats, query_stats};
  table["loss_stats_grad"] = {prepare_stats_grad, query_stats_grad};
}

}  // namespace quern::cpu
