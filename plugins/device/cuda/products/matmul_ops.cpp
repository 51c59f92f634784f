// matmul: y (M, N) (+)= op(a) op(b) * scale_a * scale_b + bias, accumulated in fp32, rounded once. library/ has
// cuBLASLt's GEMMs, own/ quern's own, a unit of each form in own/forms/, and swiglu/ GEMMs that SwiGLU is fused with.

#include <cstdint>
#include <string>

#include "products/library/library_i8_matmul.h"
#include "products/library/matmul_bias.h"
#include "products/library/matmul_plan.h"
#include "products/own/own_matmul.h"
#include "quern/block_scales.h"
#include "quern/error.h"
#include "runtime/hopper_kernels.h"
#include "runtime/kernels.h"

namespace quern::cuda {

namespace {

enum Input : std::size_t { kA, kB, kBias, kScaleA, kScaleB };

bool present(const OpInstance& op, std::size_t i) { return i < op.inputs.size() && op.inputs[i].present; }
bool is_wide(DType type) { return type == DType::f32 || type == DType::bf16; }
bool is_float8(DType type) { return type == DType::e4m3 || type == DType::e5m2; }

MatmulKey make_key(const OpInstance& op) {
  const Operand &a = op.inputs[kA], &b = op.inputs[kB], &y = op.outputs[0];
  MatmulKey key;
  key.transpose_a = op.attributes.integer_or("transpose_a", 0) != 0;
  key.transpose_b = op.attributes.integer_or("transpose_b", 0) != 0;
  key.m = a.extents[key.transpose_a ? 1 : 0];
  key.k = a.extents[key.transpose_a ? 0 : 1];
  key.n = b.extents[key.transpose_b ? 0 : 1];
  key.a = a.dtype;
  key.b = b.dtype;
  key.y = y.dtype;
  key.accumulate = y.accumulate;
  if (present(op, kBias)) {
    DType taken = size_of(a.dtype) == 1 ? DType::bf16 : y.dtype;
    // Where rows of any operand are no multiple of 16 bytes, the library was seen to round before it adds the bias.
    auto even = [](const Operand& matrix) {
      return matrix.extents[1] * static_cast<std::int64_t>(size_of(matrix.dtype)) % 16 == 0;
    };
    key.bias =
        op.inputs[kBias].dtype == taken && !key.accumulate && (key.a == DType::i8 || (even(a) && even(b) && even(y)));
  }
  if (present(op, kScaleA) || present(op, kScaleB)) {
    auto is_vector = [&op](std::size_t i) { return present(op, i) && op.inputs[i].count() > 1; };
    key.scales = is_vector(kScaleA) || is_vector(kScaleB) ? ScaleMode::vector : ScaleMode::tensor;
  }
  const std::int64_t block_rows = op.attributes.integer_or("scale_rows_b", 0);
  if (block_rows != 0) key.scales = block_rows == 1 ? ScaleMode::block : ScaleMode::square_block;
  key.squares = block_rows != 0 && op.attributes.integer_or("square_scales", 0) != 0;
  key.fast_accumulation = op.attributes.integer_or("fast_accumulation", 0) != 0;
  return key;
}

std::string refuse_formats(const MatmulKey& key, const CudaTraits& gpu) {
  const std::string pair = "matmul: " + std::string(name_of(key.a)) + " times " + std::string(name_of(key.b));
  if (!is_wide(key.y)) return "matmul: y must be f32 or bf16, not " + std::string(name_of(key.y));
  if (key.a == DType::bf16 && key.b == DType::bf16) return {};
  if (key.a == DType::f32 && key.b == DType::f32)
    return key.y == DType::f32 ? "" : pair + " gives f32 only on this device";
  if (key.a == DType::i8 && key.b == DType::i8) {
    if (key.y != DType::bf16) return pair + " gives bf16 on this device, gradients too (optimizer.gradient = \"bf16\")";
    const std::string own = refuse_own_matmul(key, gpu), library = refuse_library_i8(key, gpu);
    return own.empty() || library.empty() ? "" : pair + ": " + own + ", and " + library;
  }
  if (!is_float8(key.a) || !is_float8(key.b)) return pair + ": no such matmul on this device";
  if (key.a == DType::e5m2 && key.b == DType::e5m2) return pair + ": at most one operand can be e5m2";
  if (gpu.compute_capability < 89) return pair + ": needs compute capability 8.9 (Ada) or later";
  if (key.turns()) {
    const std::string own = refuse_own_matmul(key, gpu);
    return own.empty() ? "" : pair + ": contracted dimensions must come last (transpose_a 0, transpose_b 1); " + own;
  }
  if (key.m % 16 != 0 || key.n % 16 != 0 || key.k % 16 != 0)
    return pair + ": sizes must be multiples of 16, found " + to_string(Extents{key.m, key.n, key.k});
  return {};
}

std::string refuse_block_scales(const OpInstance& op, const MatmulKey& key, const CudaTraits& gpu) {
  const std::int64_t block_rows = op.attributes.integer_or("scale_rows_b", 0);
  if (block_rows != 1 && block_rows != kScaleBlock) return "matmul: scale_rows_b must be 1 or 128";
  if (gpu.compute_capability != 90) return "matmul: block scales need compute capability 9.0 (Hopper)";
  if (key.k % kScaleBlock != 0)
    return "matmul: block scales need a contracted dimension that is a multiple of 128, found " + std::to_string(key.k);
  const Extents scale_b = block_rows == 1 ? row_block_scales(key.n, key.k) : square_scales(key.n, key.k);
  auto fits = [&op](std::size_t i, std::int64_t least) {
    return present(op, i) && op.inputs[i].dtype == DType::f32 && op.inputs[i].count() >= least;
  };
  if (!fits(kScaleA, scale_blocks(key.k) * key.m) || !fits(kScaleB, element_count(scale_b)))
    return "matmul: block scales must be f32 " + to_string(row_block_scales(key.m, key.k)) + " and " +
           to_string(scale_b);
  return {};
}

std::string refuse_scales(const OpInstance& op, const MatmulKey& key, const CudaTraits& gpu) {
  if (key.scales == ScaleMode::none) return {};
  if (size_of(key.a) > 1) return "matmul: scales need 8-bit operands on this device";
  if (of_blocks(key.scales)) return refuse_block_scales(op, key, gpu);
  auto fits = [&](std::size_t i, std::int64_t size) {
    if (!present(op, i)) return key.scales == ScaleMode::tensor;
    return op.inputs[i].dtype == DType::f32 && op.inputs[i].count() == (key.scales == ScaleMode::vector ? size : 1);
  };
  if (!fits(kScaleA, key.m) || !fits(kScaleB, key.n))
    return "matmul: scales must be f32, one each, or one a row of a and one a column of b";
  if (key.scales == ScaleMode::vector && key.a != DType::i8 && gpu.compute_capability != 90)
    return "matmul: one scale a row needs compute capability 9.0 (Hopper)";
  return {};
}

std::string refusal(const OpInstance& op, const CudaTraits& gpu) {
  if (op.inputs.size() < 2 || op.outputs.size() != 1) return "matmul: takes a and b, gives y";
  const Operand &a = op.inputs[kA], &b = op.inputs[kB], &y = op.outputs[0];
  if (a.extents.size() != 2 || b.extents.size() != 2 || y.extents.size() != 2)
    return "matmul: a, b and y must be matrices";
  MatmulKey key = make_key(op);
  if (b.extents[key.transpose_b ? 1 : 0] != key.k || y.extents != Extents{key.m, key.n}) {
    return "matmul: shapes " + to_string(a.extents) + " and " + to_string(b.extents) + " do not give " +
           to_string(y.extents);
  }
  if (present(op, kBias) && (op.inputs[kBias].count() != key.n || !is_wide(op.inputs[kBias].dtype)))
    return "matmul: bias must have one element a column, f32 or bf16";
  if (key.a == DType::i8 && present(op, kBias) && !key.bias)
    return "matmul: i8 takes a bf16 bias, and no sums with one";
  if (std::string text = refuse_formats(key, gpu); !text.empty()) return text;
  return refuse_scales(op, key, gpu);
}

bool is_of_library_i8(const MatmulKey& key, const CudaTraits& gpu) {
  return key.a == DType::i8 && !refuse_own_matmul(key, gpu).empty();
}

OpSupport query(const OpInstance& op, const CudaTraits& gpu) {
  if (std::string text = refusal(op, gpu); !text.empty()) return {text, 0};
  const MatmulKey key = make_key(op);
  return {{}, is_of_library_i8(key, gpu) ? library_i8_workspace(key) : kMatmulWorkspace};
}

Launch prepare_own(const MatmulKey& key, CudaContext& context) {
  hopper_kernels().load_own_matmul(key);
  return [key, multiprocessors = context.multiprocessors](std::span<const View> in, std::span<const View> out,
                                                          const Exec& exec) {
    auto data = [&in](std::size_t i) { return i < in.size() ? in[i].data : nullptr; };
    hopper_kernels().run_own_matmul(key,
                                    {.a = data(kA),
                                     .b = data(kB),
                                     .bias = data(kBias),
                                     .scale_a = static_cast<const float*>(data(kScaleA)),
                                     .scale_b = static_cast<const float*>(data(kScaleB)),
                                     .y = out[0].data,
                                     .workspace = exec.workspace},
                                    multiprocessors, stream_of(exec));
  };
}

Launch prepare(const OpInstance& op, CudaContext& context) {
  MatmulKey key = make_key(op);
  if (is_of_library_i8(key, context.traits)) return prepare_library_i8(key, context);
  if (key.a == DType::i8) return prepare_own(key, context);
  RowStart start = key.accumulate ? RowStart::add : RowStart::write;
  bool separate_bias = present(op, kBias) && !key.bias;
  std::shared_ptr<const MatmulPlan> plan;
  if (!separate_bias) {
    plan = context.plans->make(context, key);
    separate_bias = plan == nullptr && key.bias;
  }
  if (separate_bias) {
    key.bias = false;
    key.accumulate = true;
    plan = context.plans->make(context, key);
  }
  if (plan == nullptr) {
    throw Error(ErrorCode::resources, {.where = "device cuda",
                                       .what = "cuBLASLt has no algorithm for the matmul " + key.text(),
                                       .found = {},
                                       .expected = {},
                                       .next = "choose another precision, or sizes that are multiples of 16"});
  }
  return [plan, separate_bias, start, lt = context.lt](std::span<const View> inputs, std::span<const View> outputs,
                                                       const Exec& exec) {
    auto data = [&inputs](std::size_t i) { return i < inputs.size() ? inputs[i].data : nullptr; };
    if (separate_bias) start_rows(outputs[0], inputs[kBias], start, stream_of(exec));
    plan->run(lt,
              {data(kA), data(kB), data(kBias), static_cast<const float*>(data(kScaleA)),
               static_cast<const float*>(data(kScaleB)), outputs[0].data, exec.workspace},
              stream_of(exec));
  };
}

}  // namespace

void add_matmul_ops(OpTable& table) { table["matmul"] = {prepare, query}; }

}  // namespace quern::cuda
