#include "runtime/launch_seconds.h"

#include <algorithm>
#include <string_view>

#include "attention/attention.h"
#include "attention/rope_ops.h"
#include "loss/loss_chunk.h"
#include "products/own/own_matmul.h"
#include "shared/operands/loss_operands.h"

namespace quern::cuda {

namespace {

constexpr double kStart = 2e-6;         // seconds from one launch to the next
constexpr double kCopyShare = 0.9;      // of the rated memory rate, by copies and what moves as well as they do
constexpr double kDocuments = 0.4;      // of the speed without documents, by attention that computes what they mask
constexpr double kOwnAttention = 0.43;  // of the instructions that could be issued, by attention on CUDA cores
constexpr double kVectorScales = 0.85, kSquareScales = 0.8, kLineScales = 0.6;  // of the speed with one scale
constexpr double kSquaresOfBoth = 0.93;

double number(std::int64_t count) { return static_cast<double>(count); }
bool present(const OpInstance& op, std::size_t i) { return i < op.inputs.size() && op.inputs[i].present; }

double memory_seconds(const GpuFacts& gpu, double bytes, double share) {
  return bytes / (share * gpu.device.memory_rate);
}

double operand_bytes(const OpInstance& op) {
  double bytes = 0;
  for (const Operand& operand : op.inputs) bytes += number(operand.bytes());
  for (const Operand& operand : op.outputs) bytes += number(operand.bytes()) * (operand.accumulate ? 2 : 1);
  return bytes;
}

/// Peak FLOP/s; of a format without tensor cores bf16's.
double peak(const GpuFacts& gpu, DType format) {
  double bf16 = 0;
  for (const auto& [known, rate] : gpu.device.matmul_rates) {
    if (known == format) return rate;
    if (known == DType::bf16) bf16 = rate;
  }
  return bf16;
}

/// How fast GEMMs are: a share of the peak, and seconds in which multiprocessors are idle while a GEMM starts and
/// ends, its last wave of tiles included. Where multiprocessors are slower tiles are smaller, so the time is about the
/// same.
struct ProductSpeed {
  double share, idle;
};

ProductSpeed speed_of(DType format) {
  switch (format) {
    case DType::bf16: return {0.69, 11.6e-6};
    case DType::i8: return {0.66, 15.2e-6};
    case DType::f32: return {0.75, 10.5e-6};  // not measured
    default: return {0.72, 13.9e-6};
  }
}

double product_seconds(const GpuFacts& gpu, double flops, DType format) {
  const auto [share, idle] = speed_of(format);
  const double reach = format == DType::f32 || format == DType::i8 ? 1 : gpu.reach;
  return flops / (reach * share * peak(gpu, format)) + idle;
}

/// quern's GEMM with an operand that is not K-major, relative to the library's.
double turning_share(const OpInstance& op, std::int64_t depth) {
  const Extents& y = op.outputs[0].extents;
  const bool of_a = op.attributes.integer_or("transpose_a", 0) != 0;
  return own_matmul_share(y[of_a ? 0 : 1], y[of_a ? 1 : 0], depth);
}

/// The share of its transfers' time that a GEMM with SwiGLU in its epilogue does not hide: little of the forward's,
/// most of the gradient's, which reads gate and up too. With block scales arithmetic is not hidden either.
double behind_product(std::string_view kind) {
  const bool lines = kind.ends_with("_blocks"), squares = kind.ends_with("_squares");
  if (kind.starts_with("matmul_swiglu_quantize")) return lines ? 0.5 : squares ? 0.45 : 0.25;
  if (kind.starts_with("matmul_swiglu_grad_quantize")) return lines ? 1.2 : squares ? 1.0 : 0.9;
  return 0.5;
}

double matmul_seconds(const OpInstance& op, const GpuFacts& gpu) {
  enum Input : std::size_t { kA, kB, kBias, kScaleA, kScaleB };
  const Operand &a = op.inputs[kA], &b = op.inputs[kB];
  const bool across = op.attributes.integer_or("transpose_a", 0) != 0;
  const std::int64_t depth = a.extents[across ? 0 : 1];
  const double flops = 2 * number(a.count()) * number(b.count()) / number(std::max<std::int64_t>(depth, 1));
  double seconds = product_seconds(gpu, flops, a.dtype);
  if (size_of(a.dtype) == 1 && depth > 0 && (across || op.attributes.integer_or("transpose_b", 0) == 0))
    seconds *= turning_share(op, depth);
  const bool alone = op.kind == "matmul";
  const bool vectors = (present(op, kScaleA) && op.inputs[kScaleA].count() > 1) ||
                       (present(op, kScaleB) && op.inputs[kScaleB].count() > 1);
  if (const std::int64_t rows = op.attributes.integer_or("scale_rows_b", 0); rows != 0) {
    const bool of_both = op.attributes.integer_or("square_scales", 0) != 0;
    seconds /= of_both ? kSquaresOfBoth : rows == 1 ? kLineScales : kSquareScales;
  } else if (alone && vectors && a.dtype != DType::i8) {
    seconds /= kVectorScales;
  }
  const double transfers = memory_seconds(gpu, operand_bytes(op), kCopyShare);
  return alone ? std::max(seconds, transfers) : seconds + behind_product(op.kind) * transfers;
}

double stacked_matmul_seconds(const OpInstance& op, const GpuFacts& gpu) {
  const Extents& a = op.inputs[0].extents;
  const std::int64_t depth = a[op.attributes.integer("transpose_a") != 0 ? 1 : 2];
  return std::max(product_seconds(gpu, 2 * number(op.outputs[0].count()) * number(depth), op.inputs[0].dtype),
                  memory_seconds(gpu, operand_bytes(op), kCopyShare));
}

/// Whether there are keys that a query does not attend to because they are too far before it.
bool has_window(const OpInstance& op) {
  const std::int64_t window = op.attributes.integer_or("window", 0);
  return window > 0 && window < op.geometry.sequence;
}

/// Whether a kernel takes no time for keys before the window. cuDNN does in its gradient, which writes all score
/// gradients, and where documents are a mask.
bool skips_keys(const OpInstance& op, const CudaTraits& gpu) {
  return runs_by_wgmma(op, gpu) || (op.kind == "attention" && !present(op, 1));
}

/// Keys that a query attends to, on average, or that are computed for it; as if rows were one document, since plans
/// know no others.
double attended_keys(const OpInstance& op, bool skips) {
  const double length = number(op.geometry.sequence), window = number(op.attributes.integer_or("window", 0));
  const double keys = op.attributes.word("mask") == "causal" ? (length + 1) / 2 : length;
  if (!skips || !has_window(op)) return keys;
  return keys - (length - window) * (length - window + 1) / (2 * length);
}

/// Queries and keys that attend to each other, over all heads.
double attention_pairs(const OpInstance& op, bool skips) {
  return number(op.geometry.tokens() * op.attributes.integer("heads")) * attended_keys(op, skips);
}

/// On tensor cores. The longer the ranges of keys, the fewer of their blocks are at the ends, where half of the work is
/// masked: at one end under a causal mask, at both in a window.
double attention_seconds(const OpInstance& op, const GpuFacts& gpu) {
  const bool gradient = op.kind == "attention_grad";
  const bool documents = present(op, gradient ? 4 : 1) && !runs_by_wgmma(op, gpu.cuda);
  const bool causal = op.attributes.word("mask") == "causal", small = op.attributes.integer("head_dim") <= 64;
  const bool skips = skips_keys(op, gpu.cuda);
  const double keys = attended_keys(op, skips), ends = (causal ? 1 : 0) + (skips && has_window(op) ? 1 : 0);
  const double masked = ends * (small ? 350 : 250);  // in keys
  const double share = (small ? 0.447 : gradient ? 0.45 : 0.52) * keys / (keys + masked);
  const double flops = (gradient ? 10 : 4) * attention_pairs(op, skips) * number(op.attributes.integer("head_dim"));
  return flops / (gpu.reach * share * (documents ? kDocuments : 1) * peak(gpu, DType::bf16));
}

/// By own kernels a warp has a row of results. For each pair it loads a vector of `parts` registers a lane, twice, and
/// sums a score by five shuffles; the gradient's two kernels load four vectors and sum four. A
/// multiprocessor issues one such instruction a clock.
double own_attention_seconds(const OpInstance& op, const GpuFacts& gpu) {
  const std::int64_t head_dim = op.attributes.integer("head_dim");
  const double parts = head_dim <= 64 ? 2 : head_dim <= 128 ? 4 : 8;
  const double clocks = op.kind == "attention_grad" ? 4 * parts + 22 : 2 * parts + 5;
  const double flops_a_clock = gpu.cuda.compute_capability == 80 ? 128 : 256;
  return attention_pairs(op, true) * clocks * flops_a_clock / (kOwnAttention * peak(gpu, DType::f32));
}

/// Chunks beyond the usual ones, of which each reads and writes the weight's gradient once more.
double more_chunks_seconds(const OpInstance& op, const GpuFacts& gpu) {
  const Operand &x = op.inputs[0], &weight = op.inputs[operands::loss_weight_of(op)];
  if (op.outputs.size() < 3 || !op.outputs[2].present || x.extents[0] < 1) return 0;
  const std::int64_t tokens = x.extents[0];
  const std::int64_t usual =
      default_loss_chunk(tokens, weight.extents[0] * static_cast<std::int64_t>(size_of(x.dtype)));
  const std::int64_t chunk = std::clamp<std::int64_t>(op.attributes.integer_or("chunk", usual), 1, usual);
  const std::int64_t more = (tokens + chunk - 1) / chunk - (tokens + usual - 1) / usual;
  return memory_seconds(gpu, 2 * number(more) * number(op.outputs[2].bytes()), kCopyShare);
}

/// One matmul or three, and the passes over the logits beside them.
double loss_seconds(const OpInstance& op, const GpuFacts& gpu) {
  const Operand &x = op.inputs[0], &weight = op.inputs[operands::loss_weight_of(op)];
  const bool train = op.kind == "lm_loss_train";
  const double products = train ? 3 : 1;
  const DType format = operands::loss_is_quantized(op) ? op.inputs[operands::kXCodes].dtype : x.dtype;
  const double logits = number(x.extents[0]) * number(weight.extents[0]);
  return more_chunks_seconds(op, gpu) + products * product_seconds(gpu, 2 * logits * number(x.extents[1]), format) +
         memory_seconds(gpu, products * logits * number(static_cast<std::int64_t>(size_of(x.dtype))), kCopyShare);
}

/// The share of the memory rate at which an op moves each operand once: the first whose name the kind begins with.
double memory_share(const OpInstance& op) {
  const std::string_view kind = op.kind;
  static constexpr struct {
    std::string_view begin;
    double share;
  } kShares[] = {{"rope_grad_column_sum_quantize", 0.42},
                 {"rope_grad_column_sum", 0.66},
                 {"quantize_rows", 0.45},
                 {"quantize_columns", 0.45},
                 {"swiglu_quantize_rows_columns", 0.49},
                 {"swiglu_grad_quantize_rows_columns", 0.49},
                 {"add_rms_norm_quantize_blocks", 0.62},  // its input is read twice
                 {"add_rms_norm_quantize_squares", 0.62},
                 {"rms_norm_quantize_blocks", 0.46},
                 {"rms_norm_quantize_squares", 0.46},
                 {"swiglu", 0.8},
                 {"adamw_8bit", 0.6},  // in blocks of 128
                 {"adamw", 0.74},
                 {"sum_squares", 0.9}};
  // The kernel that takes any size and mix of formats.
  if (kind == "adamw_8bit" && op.inputs.size() > 5 &&
      (op.inputs[4].dtype != op.inputs[5].dtype || op.inputs[3].extents[1] % 8 != 0))
    return 0.27;
  const std::int64_t head_dim = op.attributes.integer_or("head_dim", 0);
  if (kind.starts_with("rope_grad_column_sum_quantize") && rope_quantizes_pairs(head_dim)) return 0.56;
  for (const auto& [begin, share] : kShares)
    if (kind.starts_with(begin)) return share;
  return kind.find("quantize") == std::string_view::npos ? 0.8 : 0.68;
}

}  // namespace

double launch_seconds(const OpInstance& op, const GpuFacts& gpu) {
  const std::string_view kind = op.kind;
  if (kind.starts_with("matmul")) return kStart + matmul_seconds(op, gpu);
  if (kind == "stacked_matmul") return kStart + stacked_matmul_seconds(op, gpu);
  if (kind.starts_with("attention")) return kStart + attention_seconds(op, gpu);
  if (kind.starts_with("lm_loss")) return kStart + loss_seconds(op, gpu);
  const double passes = kind.ends_with("quantize") ? 1.6 : 1;  // those find the tensor's scale first
  return kStart + passes * memory_seconds(gpu, operand_bytes(op), memory_share(op));
}

double slow_launch_seconds(const OpInstance& op, const GpuFacts& gpu) {
  return kStart + own_attention_seconds(op, gpu);
}

}  // namespace quern::cuda
