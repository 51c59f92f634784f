#pragma once
// How CUDA kernels are found: each op family (one .cu a family) adds its kinds to a table. `query` answers at plan time
// from the facts of a GPU, without the hardware; `prepare` makes a closure once per op instance, and whatever takes
// time, memory or choice happens there, because launches are captured into graphs.

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <span>
#include <string>

#include "quern/device.h"

struct cublasLtContext;
struct cudnnContext;

namespace quern::cuda {

class MatmulPlans;
class TimedChoices;

/// What runs attention, as the option says.
enum class AttentionChoice : std::uint8_t {
  automatic,  ///< the fastest that takes the op
  cudnn,      ///< cuDNN, or the op is refused
  own,        ///< kernels that take every shape
};

/// What multiplies matrices, as the option says.
enum class ProductChoice : std::uint8_t {
  automatic,  ///< own ones of squares; of bf16 or other blocks where a wide search finds them faster; else as `library`
  library,    ///< own ones only where the library has none
  own,        ///< wherever they take the matmul
};

/// Facts of a GPU that plans depend on.
struct CudaTraits {
  int compute_capability = 90;  ///< 10 * major + minor
  int multiprocessors = 132;
  std::size_t l2_bytes = 50u << 20;
  std::size_t shared_bytes = 227u << 10;  ///< that one block may ask for
  bool wgmma = false;  ///< Hopper's kernels can be used: capability 9.0, and built (hopper_kernels.h)
  AttentionChoice attention = AttentionChoice::automatic;
  ProductChoice products = ProductChoice::library;
};

/// An open GPU, as `prepare` sees it. The device owns everything here and outlives all kernels.
struct CudaContext {
  CudaTraits traits;
  int multiprocessors = 0;       ///< traits.multiprocessors
  cudaStream_t setup = nullptr;  ///< for work at prepare: timing, uploads of constants
  cublasLtContext* lt = nullptr;
  cudnnContext* dnn = nullptr;  ///< null where attention does not use cuDNN
  MatmulPlans* plans = nullptr;
  TimedChoices* choices = nullptr;
  /// A device copy of host bytes, owned by the device; for tables.
  std::function<void*(const void* host, std::size_t bytes)> constant;
  /// Adds to the device's warnings, once: a slower way than the plan's, and why.
  std::function<void(const std::string& text)> note;
};

/// Enqueues one op instance on exec.stream; never allocates, synchronises or chooses.
using Launch = std::function<void(std::span<const View> inputs, std::span<const View> outputs, const Exec& exec)>;

struct CudaOp {
  std::function<Launch(const OpInstance&, CudaContext&)> prepare;
  std::function<OpSupport(const OpInstance&, const CudaTraits&)> query;
};
using OpTable = std::map<std::string, CudaOp, std::less<>>;

inline cudaStream_t stream_of(const Exec& exec) { return static_cast<cudaStream_t>(exec.stream.handle); }

void add_matmul_ops(OpTable& table);
void add_stacked_matmul_op(OpTable& table);
void add_narrow_matmul_ops(OpTable& table);  // add_matmul, columns_matmul, columns_weight_grad
void add_conversion_ops(OpTable& table);     // transpose, cast
void add_quantize_ops(OpTable& table);       // quantize and its kin, alone and behind other ops
void add_embedding_ops(OpTable& table);
void add_norm_ops(OpTable& table);  // rms_norm, layer_norm, head_norm, their gradients and fused forms
void add_rope_ops(OpTable& table);
void add_attention_ops(OpTable& table);
void add_elementwise_ops(OpTable& table);  // add, swiglu, gelu, column_sum and fused forms
void add_loss_ops(OpTable& table);         // lm_loss, lm_loss_train, loss_stats
void add_token_rows_ops(OpTable& table);   // between tokens and rows, losses of rows
void add_optimizer_ops(OpTable& table);    // sum_squares, clip_scale, and updates

}  // namespace quern::cuda
