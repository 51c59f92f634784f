// Attention through cuDNN's graph API. Queries, keys and values are read where they lie in the packed rows, by strides,
// and the gradients are written there.

#include <algorithm>

#include <cudnn_frontend.h>

#include "attention.h"
#include "check.h"
#include "quern/error.h"

namespace quern::cuda {

namespace {

namespace fe = cudnn_frontend;
using Tensor = std::shared_ptr<fe::graph::Tensor_attributes>;

enum Uid : std::int64_t { kQuery = 1, kKey, kValue, kOut, kStats, kOutGrad, kQueryGrad, kKeyGrad, kValueGrad };

/// A chunk of the batch needs no more than this, unless one sequence does: as much as other large ops take.
constexpr std::int64_t kChunkWorkspace = std::int64_t{1} << 30;
constexpr std::int64_t kWorkspaceSlack = std::int64_t{32} << 20;
constexpr std::int64_t kShortestSequence = 64;

constexpr std::int64_t round_up(std::int64_t x, std::int64_t to) { return (x + to - 1) / to * to; }

/// Upper bound for one sequence. The deterministic gradient stores the score gradients in bf16, by whole tiles, and
/// then makes dq of them; with grouped queries the key and value gradients of all heads are stored before they are
/// summed.
std::int64_t gradient_workspace(const AttentionShape& s) {
  const std::int64_t tiles = round_up(s.sequence, 128);
  return s.heads * (tiles * tiles * 2 + 3 * tiles * round_up(s.head_dim, 64) * 4 + tiles * 16);
}

/// Sequences at once: as many as the workspace allows, in chunks of about one size.
std::int64_t chunk_size(const AttentionShape& s, AttentionPass pass) {
  std::int64_t most = s.chunk > 0 ? s.chunk : s.batch;
  if (s.chunk == 0 && pass == AttentionPass::gradient)
    most = std::max<std::int64_t>(kChunkWorkspace / gradient_workspace(s), 1);
  most = std::clamp<std::int64_t>(most, 1, std::max<std::int64_t>(s.batch, 1));
  const std::int64_t chunks = (s.batch + most - 1) / most;
  return chunks > 0 ? (s.batch + chunks - 1) / chunks : 1;
}

[[noreturn]] void fail(const AttentionShape& s, const std::string& what) {
  throw Error(ErrorCode::resources, {.where = "device cuda, attention of " + std::to_string(s.heads) + " heads of " +
                                              std::to_string(s.head_dim) + ", sequence " + std::to_string(s.sequence),
                                     .what = "cuDNN " + std::to_string(cudnnGetVersion()) + " cannot run it",
                                     .found = what,
                                     .expected = {},
                                     .next = "set device.cuda.attention = \"own\""});
}

void require(const AttentionShape& shape, fe::error_t status) {
  if (status.is_bad()) fail(shape, status.get_message());
}

/// One head's rows lie `row` elements apart.
fe::graph::Tensor_attributes describe(Uid uid, std::int64_t batch, std::int64_t heads, const AttentionShape& s,
                                      std::int64_t row) {
  return fe::graph::Tensor_attributes()
      .set_uid(uid)
      .set_dim({batch, heads, s.sequence, s.head_dim})
      .set_stride({s.sequence * row, s.head_dim, row, 1});
}

fe::graph::Tensor_attributes describe_stats(std::int64_t batch, const AttentionShape& s) {
  return fe::graph::Tensor_attributes()
      .set_uid(kStats)
      .set_dim({batch, s.heads, s.sequence, 1})
      .set_stride({s.heads * s.sequence, s.sequence, 1, 1})
      .set_data_type(fe::DataType_t::FLOAT);
}

void place(const Tensor& output, const fe::graph::Tensor_attributes& as) {
  output->set_output(true).set_uid(as.get_uid()).set_dim(as.get_dim()).set_stride(as.get_stride());
}

void build_forward(fe::graph::Graph& graph, const AttentionShape& s, std::int64_t batch, bool stats) {
  Tensor q = graph.tensor(describe(kQuery, batch, s.heads, s, s.packed()));
  Tensor k = graph.tensor(describe(kKey, batch, s.kv_heads, s, s.packed()));
  Tensor v = graph.tensor(describe(kValue, batch, s.kv_heads, s, s.packed()));
  auto options = fe::graph::SDPA_attributes().set_name("attention").set_generate_stats(stats).set_attn_scale(s.scale);
  if (s.causal) options.set_diagonal_alignment(fe::DiagonalAlignment_t::TOP_LEFT).set_diagonal_band_right_bound(0);
  auto [out, logsumexp] = graph.sdpa(q, k, v, options);
  place(out, describe(kOut, batch, s.heads, s, s.width()));
  if (!stats) return;
  place(logsumexp, describe_stats(batch, s));
  logsumexp->set_data_type(fe::DataType_t::FLOAT);
}

void build_gradient(fe::graph::Graph& graph, const AttentionShape& s, std::int64_t batch) {
  Tensor q = graph.tensor(describe(kQuery, batch, s.heads, s, s.packed()));
  Tensor k = graph.tensor(describe(kKey, batch, s.kv_heads, s, s.packed()));
  Tensor v = graph.tensor(describe(kValue, batch, s.kv_heads, s, s.packed()));
  Tensor out = graph.tensor(describe(kOut, batch, s.heads, s, s.width()));
  Tensor dout = graph.tensor(describe(kOutGrad, batch, s.heads, s, s.width()));
  Tensor stats = graph.tensor(describe_stats(batch, s));
  auto options = fe::graph::SDPA_backward_attributes()
                     .set_name("attention_grad")
                     .set_attn_scale(s.scale)
                     .set_deterministic_algorithm(true);
  if (s.causal) options.set_diagonal_alignment(fe::DiagonalAlignment_t::TOP_LEFT).set_diagonal_band_right_bound(0);
  auto [dq, dk, dv] = graph.sdpa_backward(q, k, v, out, dout, stats, options);
  place(dq, describe(kQueryGrad, batch, s.heads, s, s.packed()));
  place(dk, describe(kKeyGrad, batch, s.kv_heads, s, s.packed()));
  place(dv, describe(kValueGrad, batch, s.kv_heads, s, s.packed()));
}

}  // namespace

bool cudnn_takes(const AttentionShape& s, const CudaTraits& gpu) {
  const std::int64_t largest_head = gpu.compute_capability == 90 ? 256 : 128;
  return gpu.use_cudnn && s.dtype == DType::bf16 && !s.documents && s.head_dim % 8 == 0 && s.head_dim <= largest_head &&
         s.sequence >= kShortestSequence;
}

std::size_t cudnn_attention_workspace(const AttentionShape& s, AttentionPass pass) {
  if (pass != AttentionPass::gradient) return static_cast<std::size_t>(kWorkspaceSlack);
  return static_cast<std::size_t>(chunk_size(s, pass) * gradient_workspace(s) + kWorkspaceSlack);
}

struct CudnnAttention::Graph {
  Graph(const AttentionShape& shape, AttentionPass pass, std::int64_t batch, cudnnHandle_t handle) {
    graph.set_io_data_type(fe::DataType_t::BFLOAT16)
        .set_intermediate_data_type(fe::DataType_t::FLOAT)
        .set_compute_data_type(fe::DataType_t::FLOAT);
    if (pass == AttentionPass::gradient)
      build_gradient(graph, shape, batch);
    else
      build_forward(graph, shape, batch, pass == AttentionPass::forward);
    require(shape, graph.build(handle, {fe::HeurMode_t::A}));
    std::int64_t bytes = 0;
    require(shape, graph.get_workspace_size(bytes));
    workspace = static_cast<std::size_t>(bytes);
  }
  fe::graph::Graph graph;
  std::size_t workspace = 0;
};

CudnnAttention::CudnnAttention(const AttentionShape& shape, AttentionPass pass, cudnnContext* handle)
    : shape_(shape), pass_(pass), handle_(handle) {
  const std::size_t room = cudnn_attention_workspace(shape, pass);
  for (chunk_ = chunk_size(shape, pass);; --chunk_) {  // the bound on the workspace has held so far
    whole_ = std::make_unique<Graph>(shape, pass, chunk_, handle);
    if (whole_->workspace <= room) break;
    if (chunk_ == 1)
      fail(shape, "a workspace of " + std::to_string(whole_->workspace) + " bytes for one sequence, planned " +
                      std::to_string(room));
  }
  if (shape.batch % chunk_ != 0) tail_ = std::make_unique<Graph>(shape, pass, shape.batch % chunk_, handle);
}

CudnnAttention::~CudnnAttention() = default;

void CudnnAttention::run(const AttentionOperands& operands, cudaStream_t stream) const {
  cudaStream_t current = nullptr;
  QUERN_CUDNN(cudnnGetStream(handle_, &current));
  if (current != stream) QUERN_CUDNN(cudnnSetStream(handle_, stream));
  const AttentionShape& s = shape_;
  constexpr std::int64_t kBytes = 2;
  for (std::int64_t begin = 0; begin < s.batch; begin += chunk_) {
    const Graph& graph = begin + chunk_ <= s.batch ? *whole_ : *tail_;
    const std::int64_t token = begin * s.sequence;
    auto at = [&](const void* data, std::int64_t width, std::int64_t column) -> void* {
      return const_cast<char*>(static_cast<const char*>(data)) + (token * width + column) * kBytes;
    };
    const std::int64_t key = s.heads * s.head_dim, value = key + s.kv_heads * s.head_dim;
    std::unordered_map<std::int64_t, void*> pointers = {{kQuery, at(operands.qkv, s.packed(), 0)},
                                                        {kKey, at(operands.qkv, s.packed(), key)},
                                                        {kValue, at(operands.qkv, s.packed(), value)},
                                                        {kOut, at(operands.y, s.width(), 0)}};
    if (pass_ != AttentionPass::forward_without_logsumexp)
      pointers[kStats] = operands.logsumexp + begin * s.heads * s.sequence;
    if (pass_ == AttentionPass::gradient) {
      pointers[kOutGrad] = at(operands.dy, s.width(), 0);
      pointers[kQueryGrad] = at(operands.dqkv, s.packed(), 0);
      pointers[kKeyGrad] = at(operands.dqkv, s.packed(), key);
      pointers[kValueGrad] = at(operands.dqkv, s.packed(), value);
    }
    require(s, graph.graph.execute(handle_, pointers, operands.workspace));
  }
}

}  // namespace quern::cuda
