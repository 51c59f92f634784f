#pragma once
// Attention over packed qkv rows: (N, (heads + 2 kv_heads) head_dim), queries, keys, values. Three ways to run it:
// cuDNN's fused kernels, own kernels on Hopper's tensor cores, and simple own kernels that take every shape. On
// this device logsumexp is (batch, heads, sequence), as cuDNN writes it, in the buffer of the op's (N, heads).

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "quern/device.h"
#include "runtime/kernels.h"
#include "runtime/timed_choices.h"

namespace quern::cuda {

struct AttentionShape {
  std::int64_t batch = 0, sequence = 0, heads = 0, kv_heads = 0, head_dim = 0;
  bool causal = true;
  bool documents = false;   ///< attention stays within documents
  std::int64_t window = 0;  ///< keys that a query sees; 0: all before it, as in a window of the whole sequence
  float scale = 1, cap = 0;
  std::int64_t chunk = 0;  ///< sequences that cuDNN takes at once, at most; 0: left open, as is who runs it
  DType dtype = DType::bf16;

  std::int64_t tokens() const { return batch * sequence; }
  std::int64_t packed() const { return (heads + 2 * kv_heads) * head_dim; }
  std::int64_t width() const { return heads * head_dim; }
};

enum class AttentionPass : std::uint8_t { forward, forward_without_logsumexp, gradient };

/// One launch; views by name. `logsumexp` and `documents` may be null.
struct AttentionOperands {
  const void* qkv = nullptr;
  void* y = nullptr;
  float* logsumexp = nullptr;
  const std::int32_t* documents = nullptr;  ///< (N + 1) starts, ascending, padded with N
  const void* dy = nullptr;                 ///< gradient only, as the next
  void* dqkv = nullptr;
  void* workspace = nullptr;
};

// ---- own kernels: any head_dim up to 256, fp32 or bf16, documents, windows, soft caps; sums in fp32 in a fixed order
// ----

inline constexpr std::int64_t kOwnLargestHead = 256;
std::size_t own_attention_grad_workspace(const AttentionShape& shape);
void own_attention(const AttentionShape& shape, const AttentionOperands& operands, cudaStream_t stream);
void own_attention_grad(const AttentionShape& shape, const AttentionOperands& operands, cudaStream_t stream);

// ---- own kernels on Hopper's tensor cores: sums in fp32 in an order that depends on one sequence alone ----

/// Whether a pass can run there: bf16, head_dim 64 or 128, no caps, a scale above 0; known without the hardware. The
/// forward pass only within documents and windows: whole sequences are cuDNN's.
bool wgmma_takes(const AttentionShape& shape, AttentionPass pass, const CudaTraits& gpu);
std::size_t wgmma_attention_workspace(const AttentionShape& shape);
std::size_t wgmma_attention_grad_workspace(const AttentionShape& shape);
/// Load the kernels: at prepare.
void load_wgmma_attention(const AttentionShape& shape);
void load_wgmma_attention_grad(const AttentionShape& shape);
void wgmma_attention(const AttentionShape& shape, const AttentionOperands& operands, int multiprocessors,
                     cudaStream_t stream);
void wgmma_attention_grad(const AttentionShape& shape, const AttentionOperands& operands, int multiprocessors,
                          cudaStream_t stream);

/// Whether an op, `attention` or `attention_grad`, runs by them.
bool runs_by_wgmma(const OpInstance& op, const CudaTraits& gpu);

// ---- cuDNN ----

/// Why cuDNN cannot run a pass; empty where it can, known without the hardware. Documents: sequences of a multiple of
/// 8, up to 16384. `version` is cuDNN's: 91900.
std::string cudnn_refusal(const AttentionShape& shape, AttentionPass pass, const CudaTraits& gpu, std::size_t version);
/// Of the library that is loaded, where the option does not exclude it.
bool cudnn_takes(const AttentionShape& shape, AttentionPass pass, const CudaTraits& gpu);
/// Scratch for a pass. The deterministic gradient's grows with the batch, which is run in chunks to bound it.
std::size_t cudnn_attention_workspace(const AttentionShape& shape, AttentionPass pass);

/// Built graphs of one pass: of a chunk of the batch, and of the rest. How large chunks are and which of cuDNN's
/// plans runs is found by timing unless the choice is known.
class CudnnAttention {
 public:
  /// `room`: bytes of workspace that runs will have.
  CudnnAttention(const AttentionShape& shape, AttentionPass pass, std::size_t room, CudaContext& context);
  ~CudnnAttention();
  /// Why it cannot run on this GPU with this library; empty where it can.
  const std::string& refusal() const { return refusal_; }
  void run(const AttentionOperands& operands, cudaStream_t stream) const;

 private:
  struct Graph;
  /// Sequences at once, and the plan's place in cuDNN's list; its name guards against another list.
  struct Way {
    std::int64_t chunk = 0, place = 0;
    std::string name;
    std::string text() const;
  };
  static std::optional<Way> parse(const std::string& text);
  /// Makes the graphs of that many sequences at once; false where cuDNN refuses them.
  bool build(std::int64_t chunk);
  /// Has them run by the plan at `place`; false where there is none, or it needs more memory than there will be.
  bool use(std::int64_t place);
  std::string why_none() const;
  /// Builds and times every way on scratch memory, and leaves the fastest built; without such memory the first. Lasting
  /// where it was timed on operands that no run finds in the L2 cache.
  std::optional<TimedChoices::Found> choose(CudaContext& context);

  AttentionShape shape_;
  AttentionPass pass_;
  std::size_t room_;
  std::string refusal_;
  cudnnContext* handle_;
  std::int64_t chunk_ = 0;
  std::unique_ptr<Graph> whole_, tail_;
};

}  // namespace quern::cuda
