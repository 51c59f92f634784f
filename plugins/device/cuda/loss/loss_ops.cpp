// lm_loss: cross-entropy of logits x W^T against the targets, in nats, chunk by chunk over tokens so that logits are
// never stored whole. lm_loss_train makes the gradients in the same pass; the weight's gradient adds up over chunks in
// its own dtype, as it does over micro-steps.

#include <algorithm>
#include <memory>
#include <string>

#include "loss/cross_entropy.h"
#include "loss/loss_chunk.h"
#include "products/library/matmul_plan.h"
#include "products/own/own_matmul.h"
#include "quantization/observe.h"
#include "quantization/transpose.h"
#include "quern/error.h"
#include "quern/numeric.h"
#include "runtime/kernels.h"
#include "runtime/operand_check.h"
#include "shared/operands/loss_operands.h"

namespace quern::cuda {

namespace {

using enum operands::LossInput;
using operands::loss_is_quantized, operands::loss_weight_of;

struct Loss {
  std::int64_t tokens = 0, width = 0, vocabulary = 0, chunk = 0;
  DType dtype = DType::bf16;  ///< of x, weight, logits and dx
  bool train = false, input_gradient = false, weight_gradient = false, add_weight_gradient = false;
  DType weight_gradient_dtype = DType::bf16;
  /// Matmuls of 8-bit values: of x and weight as they are given, of the logits' gradients with a scale that is fixed,
  /// since |softmax - onehot| <= 1; it leaves room to 1.75 for what z_loss adds, and saturates beyond.
  bool quantized = false;
  bool fast_output = false, fast_input_gradient = false, fast_weight_gradient = false;  ///< sums in fewer bits
  DType x_format = DType::e4m3, weight_format = DType::e4m3, gradient_format = DType::e4m3;
  float gradient_scale = 1;
  bool observe = false, add_observation = false;  ///< the logits' gradients quantized

  std::int64_t stride() const { return logit_stride(vocabulary, dtype); }
  std::size_t logit_bytes() const {
    return (static_cast<std::size_t>(chunk * stride()) * size_of(dtype) + 255) / 256 * 256;
  }
  /// Row-major quantized values of a chunk's gradients; the transposed ones take the logits' place.
  std::size_t code_bytes() const {
    return quantized && train ? (static_cast<std::size_t>(chunk * vocabulary) + 255) / 256 * 256 : 0;
  }
  std::int64_t tail() const { return tokens % chunk; }
};

Loss make_loss(const OpInstance& op) {
  const Operand &x = op.inputs[kX], &weight = op.inputs[loss_weight_of(op)];
  Loss loss;
  loss.tokens = x.extents[0];
  loss.width = x.extents[1];
  loss.vocabulary = weight.extents[0];
  loss.dtype = x.dtype;
  std::int64_t row_bytes = std::max<std::int64_t>(loss.stride() * static_cast<std::int64_t>(size_of(x.dtype)), 1);
  loss.chunk = std::min(op.attributes.integer_or("chunk", default_loss_chunk(loss.tokens, row_bytes)),
                        std::max<std::int64_t>(loss.tokens, 1));
  loss.train = op.outputs.size() >= 3;
  loss.observe = op.outputs.size() > 3 && op.outputs[3].present;
  loss.add_observation = loss.observe && op.outputs[3].accumulate;
  loss.input_gradient = loss.train && op.outputs[1].present;
  loss.weight_gradient = loss.train && op.outputs[2].present;
  if (loss.weight_gradient) {
    loss.add_weight_gradient = op.outputs[2].accumulate;
    loss.weight_gradient_dtype = op.outputs[2].dtype;
  }
  loss.quantized = loss_is_quantized(op);
  if (!loss.quantized) return loss;
  auto fast = [&op](const char* product) { return op.attributes.integer_or(product, 0) != 0; };
  loss.fast_output = fast("fast_output");
  loss.fast_input_gradient = fast("fast_input_gradient");
  loss.fast_weight_gradient = fast("fast_weight_gradient");
  loss.x_format = op.inputs[kXCodes].dtype;
  loss.weight_format = op.inputs[kWeightCodes].dtype;
  if (loss.train) loss.gradient_format = dtype_named(op.attributes.word("gradient_format")).value_or(DType::f32);
  loss.gradient_scale =
      logit_gradient_scale(static_cast<float>(op.attributes.real_or("seed", 1.0)),
                           static_cast<float>(op.attributes.real_or("z_loss", 0.0)), loss.gradient_format);
  return loss;
}

using Plan = std::shared_ptr<const MatmulPlan>;

/// The matmuls of a chunk of `rows` tokens.
struct ChunkPlans {
  Plan logits, input_gradient, first_weight_gradient, weight_gradient;
};

Plan make_plan(CudaContext& context, const MatmulKey& key) {
  Plan plan = context.plans->make(context, key);
  if (plan != nullptr) return plan;
  throw Error(ErrorCode::resources, {.where = "device cuda",
                                     .what = "cuBLASLt has no algorithm for the LM head's matmul " + key.text(),
                                     .found = {},
                                     .expected = {},
                                     .next = "choose another precision"});
}

/// Matmuls of quantized values take both operands K-major.
ChunkPlans make_quantized_plans(CudaContext& context, const Loss& loss, std::int64_t rows) {
  ChunkPlans plans;
  MatmulKey base;
  base.transpose_b = true;
  base.scales = ScaleMode::tensor;
  if (loss.chunk < loss.tokens)  // later chunks begin at a multiple of so many bytes, of which x's columns have fewest
    while (loss.chunk % base.alignment != 0) base.alignment /= 2;
  MatmulKey logits = base;
  logits.m = rows, logits.n = loss.vocabulary, logits.k = loss.width;
  logits.a = loss.x_format, logits.b = loss.weight_format, logits.y = loss.dtype;
  logits.stride_y = loss.stride();
  logits.fast_accumulation = loss.fast_output;
  plans.logits = make_plan(context, logits);
  base.a = loss.gradient_format;
  if (loss.input_gradient) {
    MatmulKey key = base;
    key.m = rows, key.n = loss.width, key.k = loss.vocabulary;
    key.b = loss.weight_format, key.y = loss.dtype;
    key.fast_accumulation = loss.fast_input_gradient;
    plans.input_gradient = make_plan(context, key);
  }
  if (loss.weight_gradient) {
    MatmulKey key = base;
    key.m = loss.vocabulary, key.n = loss.width, key.k = rows;
    key.b = loss.x_format, key.y = loss.weight_gradient_dtype;
    if (rows < loss.tokens) key.stride_b = loss.tokens;
    key.accumulate = true;
    key.fast_accumulation = loss.fast_weight_gradient;
    // The operands as stored, where a GEMM takes them, and a long K makes up for how its tiles begin and end.
    key.transpose_a = true;
    key.transpose_a = rows >= loss.width && refuse_own_matmul(key, context.traits).empty();
    plans.weight_gradient = make_plan(context, key);
    key.accumulate = loss.add_weight_gradient;
    plans.first_weight_gradient = make_plan(context, key);
  }
  return plans;
}

ChunkPlans make_plans(CudaContext& context, const Loss& loss, std::int64_t rows) {
  ChunkPlans plans;
  if (rows == 0) return plans;
  if (loss.quantized) return make_quantized_plans(context, loss, rows);
  MatmulKey base;
  base.a = base.b = base.y = loss.dtype;
  // Later chunks begin at a multiple of this many bytes.
  const std::int64_t chunk_bytes = loss.chunk * loss.width * static_cast<std::int64_t>(size_of(loss.dtype));
  if (loss.chunk < loss.tokens)
    while (chunk_bytes % base.alignment != 0) base.alignment /= 2;
  MatmulKey logits = base;
  logits.m = rows, logits.n = loss.vocabulary, logits.k = loss.width;
  logits.transpose_b = true;
  logits.stride_y = loss.stride();
  plans.logits = make_plan(context, logits);
  if (loss.input_gradient) {
    MatmulKey key = base;
    key.m = rows, key.n = loss.width, key.k = loss.vocabulary;
    key.stride_a = loss.stride();
    plans.input_gradient = make_plan(context, key);
  }
  if (loss.weight_gradient) {
    MatmulKey key = base;
    key.m = loss.vocabulary, key.n = loss.width, key.k = rows;
    key.transpose_a = true;
    key.stride_a = loss.stride();
    key.y = loss.weight_gradient_dtype;
    key.accumulate = true;
    plans.weight_gradient = make_plan(context, key);
    key.accumulate = loss.add_weight_gradient;
    plans.first_weight_gradient = make_plan(context, key);
  }
  return plans;
}

struct Prepared {
  Loss loss;
  CrossEntropy cross_entropy;
  ChunkPlans whole, tail;
  cublasLtContext* lt = nullptr;
  const float* gradient_scale = nullptr;  ///< on the device
};

/// A chunk's quantized matmuls. x's transpose (C, N) is read from its column `begin` on.
void run_quantized_chunk(const Prepared& prepared, std::int64_t begin, std::int64_t rows, std::span<const View> inputs,
                         std::span<const View> outputs, const Exec& exec) {
  const Loss& loss = prepared.loss;
  cudaStream_t stream = stream_of(exec);
  auto* logits = static_cast<std::uint8_t*>(exec.workspace);
  std::uint8_t* codes = logits + loss.logit_bytes();
  void* scratch = codes + loss.code_bytes();
  const ChunkPlans& plans = rows == loss.chunk ? prepared.whole : prepared.tail;
  auto scale = [&inputs](operands::LossInput i) { return inputs[i].as<const float>(); };
  plans.logits->run(prepared.lt,
                    {.a = inputs[kXCodes].as<std::uint8_t>() + begin * loss.width,
                     .b = inputs[kWeightCodes].data,
                     .scale_a = scale(kXScale),
                     .scale_b = scale(kWeightScale),
                     .y = logits,
                     .workspace = scratch},
                    stream);
  const bool gradient = loss.input_gradient || loss.weight_gradient;
  cross_entropy(prepared.cross_entropy, logits, gradient ? codes : nullptr,
                inputs[kTargets].as<const std::int32_t>() + begin,
                outputs[0] ? outputs[0].as<float>() + begin : nullptr, rows, stream);
  if (loss.observe && gradient)
    observe_codes({.codes = codes,
                   .targets = inputs[kTargets].as<const std::int32_t>() + begin,
                   .rows = rows,
                   .columns = loss.vocabulary,
                   .scale = loss.gradient_scale,
                   .format = loss.gradient_format},
                  outputs[3].as<ScaleObservation>(), stream);
  if (loss.input_gradient) {
    plans.input_gradient->run(
        prepared.lt,
        {.a = codes,
         .b = inputs[kWeightTransposed].data,
         .scale_a = prepared.gradient_scale,
         .scale_b = scale(kWeightScale),
         .y = outputs[1].as<char>() + static_cast<std::size_t>(begin * loss.width) * size_of(loss.dtype),
         .workspace = scratch},
        stream);
  }
  if (loss.weight_gradient) {
    const Plan& plan = begin == 0 ? plans.first_weight_gradient : plans.weight_gradient;
    const bool as_they_lie = plan->key().transpose_a;
    if (!as_they_lie) transpose_bytes(codes, logits, rows, loss.vocabulary, stream);
    plan->run(prepared.lt,
              {.a = as_they_lie ? codes : logits,
               .b = inputs[kXTransposed].as<std::uint8_t>() + begin,
               .scale_a = prepared.gradient_scale,
               .scale_b = scale(kXScale),
               .y = outputs[2].data,
               .workspace = scratch},
              stream);
  }
}

void run(const Prepared& prepared, std::span<const View> inputs, std::span<const View> outputs, const Exec& exec) {
  const Loss& loss = prepared.loss;
  cudaStream_t stream = stream_of(exec);
  char* logits = static_cast<char*>(exec.workspace);
  void* scratch = logits + loss.logit_bytes();
  const std::size_t row_bytes = static_cast<std::size_t>(loss.width) * size_of(loss.dtype);
  void* weight = inputs[1].data;
  if (loss.observe && !loss.add_observation) begin_observation(outputs[3].as<ScaleObservation>(), stream);
  for (std::int64_t begin = 0; begin < loss.tokens; begin += loss.chunk) {
    const std::int64_t rows = std::min(loss.chunk, loss.tokens - begin);
    if (loss.quantized) {
      run_quantized_chunk(prepared, begin, rows, inputs, outputs, exec);
      continue;
    }
    const ChunkPlans& plans = rows == loss.chunk ? prepared.whole : prepared.tail;
    const std::size_t offset = static_cast<std::size_t>(begin) * row_bytes;
    void* x = inputs[0].as<char>() + offset;
    float* losses = outputs[0] ? outputs[0].as<float>() + begin : nullptr;
    plans.logits->run(prepared.lt, {.a = x, .b = weight, .y = logits, .workspace = scratch}, stream);
    cross_entropy(prepared.cross_entropy, logits, nullptr, inputs[2].as<const std::int32_t>() + begin, losses, rows,
                  stream);
    if (loss.weight_gradient) {
      const Plan& plan = begin == 0 ? plans.first_weight_gradient : plans.weight_gradient;
      plan->run(prepared.lt, {.a = logits, .b = x, .y = outputs[2].data, .workspace = scratch}, stream);
    }
    if (loss.input_gradient) {
      void* dx = outputs[1].as<char>() + offset;
      plans.input_gradient->run(prepared.lt, {.a = logits, .b = weight, .y = dx, .workspace = scratch}, stream);
    }
  }
}

void check_quantized(OperandCheck& check, const OpInstance& op, const CudaTraits& gpu) {
  const Extents x = extents_of(op, kX), weight = extents_of(op, kWeightCodes);
  const bool train = op.outputs.size() >= 3;
  check.that(op.attributes.has("gradient_format") || !train, "needs a gradient_format of 8 bits: e4m3 or e5m2");
  if (!check.ok()) return;
  const Loss loss = make_loss(op);
  auto is_float8 = [](DType type) { return type == DType::e4m3 || type == DType::e5m2; };
  auto pair = [&](DType a, DType b) {
    check.that(
        is_float8(a) && is_float8(b) && (a != DType::e5m2 || b != DType::e5m2),
        "multiplies e4m3 by e4m3 or e5m2 on cuda, not " + std::string(name_of(a)) + " by " + std::string(name_of(b)));
  };
  pair(loss.x_format, loss.weight_format);
  if (loss.input_gradient) pair(loss.gradient_format, loss.weight_format);
  if (loss.weight_gradient) pair(loss.gradient_format, loss.x_format);
  check.that(gpu.compute_capability >= 89, "of 8-bit operands needs compute capability 8.9 (Ada) or later");
  for (std::int64_t size : {loss.tokens, loss.width, loss.vocabulary, loss.chunk})
    check.that(size % 16 == 0,
               "of 8-bit operands needs tokens, chunk, width and vocabulary to be multiples of 16, found " +
                   to_string(Extents{loss.tokens, loss.chunk, loss.width, loss.vocabulary}));
  check.input(kXCodes, "x_q", x, loss.x_format).input(kXScale, "x_scale", {1}, DType::f32);
  check.input(kWeightCodes, "weight_q", weight, loss.weight_format)
      .input(kWeightScale, "weight_scale", {1}, DType::f32);
  if (loss.weight_gradient) check.input(kXTransposed, "x_t", {x[1], x[0]}, loss.x_format);
  if (loss.input_gradient) check.input(kWeightTransposed, "weight_t", {weight[1], weight[0]}, loss.weight_format);
}

OpSupport query(const OpInstance& op, const CudaTraits& gpu) {
  Extents x = extents_of(op, kX), weight = extents_of(op, loss_weight_of(op));
  if (x.size() != 2 || weight.size() != 2) return {op.kind + ": x and weight must be matrices", 0};
  const bool train = op.kind == "lm_loss_train", observed = train && op.outputs.size() == 4;
  OpInstance without = op;  // the observation, an optional output, is checked apart
  if (observed) without.outputs.pop_back();
  OperandCheck check(without, op.inputs.size() == 9 ? 9 : 3, train ? 3 : 1);
  if (loss_weight_of(op) == kWeight) check.input(kWeight, "weight", {weight[0], x[1]});
  check.input(kX, "x", x)
      .input(2, "targets", {x[0]}, DType::i32)
      .output(0, "token_loss", {x[0]}, DType::f32)
      .that(op.attributes.integer_or("chunk", 1) >= 1, "needs a chunk of at least 1 token")
      .that(weight[0] >= 1 && x[1] >= 1, "needs a vocabulary and a width");
  if (train && check.ok()) {
    check.output(1, "dx", x).sum(2, "dweight", weight);
    if (check.ok() && op.inputs[0].dtype == DType::f32)
      check.that(op.outputs[2].dtype == DType::f32, "operand dweight: of f32 matmuls must be f32");
  }
  const bool quantized = loss_is_quantized(op);
  if (quantized) check_quantized(check, op, gpu);
  if (observed && op.outputs[3].present)
    check.that(quantized && op.outputs[3].dtype == DType::u32 && op.outputs[3].count() == kScaleObservationWords,
               "operand observed: of the gradients of quantized logits, must be u32 (16)");
  if (!check.ok()) return check.support();
  const Loss loss = make_loss(op);
  return check.support(loss.logit_bytes() + loss.code_bytes() + kMatmulWorkspace);
}

Launch prepare(const OpInstance& op, CudaContext& context) {
  auto prepared = std::make_shared<Prepared>();
  prepared->loss = make_loss(op);
  const Loss& loss = prepared->loss;
  prepared->lt = context.lt;
  prepared->whole = make_plans(context, loss, loss.chunk <= loss.tokens ? loss.chunk : 0);
  prepared->tail = make_plans(context, loss, loss.tail());
  bool gradient = loss.input_gradient || loss.weight_gradient;
  prepared->cross_entropy =
      make_cross_entropy(loss.dtype, loss.vocabulary, gradient, loss.quantized ? loss.gradient_format : loss.dtype,
                         static_cast<float>(op.attributes.real_or("cap", 0.0)), context.traits);
  prepared->cross_entropy.z_loss = static_cast<float>(op.attributes.real_or("z_loss", 0.0));
  prepared->cross_entropy.seed = static_cast<float>(op.attributes.real_or("seed", 1.0));
  if (loss.quantized) {
    prepared->cross_entropy.gradient_scale = loss.gradient_scale;
    prepared->gradient_scale = static_cast<const float*>(context.constant(&loss.gradient_scale, sizeof(float)));
    load_transpose_bytes();
    load_observations();
  }
  return [prepared](std::span<const View> inputs, std::span<const View> outputs, const Exec& exec) {
    run(*prepared, inputs, outputs, exec);
  };
}

OpSupport query_stats(const OpInstance& op, const CudaTraits&) {
  const bool correct = op.inputs.size() == 3 && op.inputs[2].present;
  if (op.inputs.size() < 2 || op.inputs.size() > 3 || op.outputs.size() != 1)
    return {"loss_stats: takes a loss, targets and optionally `correct`", 0};
  bool fits = op.inputs[0].dtype == DType::f32 && op.inputs[1].dtype == DType::i32 &&
              op.outputs[0].dtype == DType::f64 && element_count(op.outputs[0].extents) == 4 &&
              element_count(op.inputs[0].extents) == element_count(op.inputs[1].extents) &&
              (!correct || (op.inputs[2].dtype == DType::f32 && op.inputs[2].count() == op.inputs[0].count()));
  return {fits ? "" : "loss_stats: losses f32 and targets i32 of one shape give f64 (4)", 0};
}

Launch prepare_stats(const OpInstance& op, CudaContext&) {
  const LossTerm term{.weight = op.attributes.real_or("weight", 1),
                      .counts = op.attributes.integer_or("counts", 1) != 0};
  return [term, add = op.outputs[0].accumulate](std::span<const View> inputs, std::span<const View> outputs,
                                                const Exec& exec) {
    add_loss_stats(inputs[0].as<const float>(), inputs[1].as<const std::int32_t>(),
                   inputs.size() > 2 ? inputs[2].as<const float>() : nullptr, inputs[1].count(),
                   outputs[0].as<double>(), term, add, stream_of(exec));
  };
}

OpSupport query_stats_grad(const OpInstance& op, const CudaTraits&) {
  const bool fits = op.inputs.size() == 1 && op.outputs.size() == 1 && op.inputs[0].dtype == DType::i32 &&
                    op.outputs[0].dtype == DType::f32 && op.inputs[0].extents == op.outputs[0].extents;
  return {fits ? "" : "loss_stats_grad: targets i32 give f32 of their shape", 0};
}

Launch prepare_stats_grad(const OpInstance& op, CudaContext&) {
  return [factor = static_cast<float>(op.attributes.real("factor"))](std::span<const View> inputs,
                                                                     std::span<const View> outputs, const Exec& exec) {
    loss_stats_gradient(inputs[0].as<const std::int32_t>(), inputs[0].count(), factor, outputs[0].as<float>(),
                        stream_of(exec));
  };
}

}  // namespace

void add_loss_ops(OpTable& table) {
  table["lm_loss"] = {prepare, query};
  table["lm_loss_train"] = {prepare, query};
  table["loss_stats"] = {prepare_stats, query_stats};
  table["loss_stats_grad"] = {prepare_stats_grad, query_stats_grad};
}

}  // namespace quern::cuda
