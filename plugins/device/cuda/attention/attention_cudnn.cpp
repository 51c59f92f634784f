// Attention through cuDNN's graph API. Queries, keys and values are read in the packed rows, by strides,
// and the gradients are written there. Windows are cuDNN's own, documents, with windows or without, a bias of zeros and
// large negative numbers, made before each run: docs/decisions/0008-document-attention.md says why.

#include <algorithm>
#include <limits>
#include <sstream>

#include <cudnn_frontend.h>

#include "attention/attention.h"
#include "attention/attention_mask.h"
#include "attention/attention_timing.h"
#include "quern/error.h"
#include "runtime/check.h"
#include "runtime/timed_choices.h"

namespace quern::cuda {

namespace {

namespace fe = cudnn_frontend;
using Tensor = std::shared_ptr<fe::graph::Tensor_attributes>;

enum Uid : std::int64_t { kQuery = 1, kKey, kValue, kOut, kStats, kOutGrad, kQueryGrad, kKeyGrad, kValueGrad, kMask };

/// A chunk of the batch needs no more than this, unless one sequence does: as much as other large ops take.
constexpr std::int64_t kChunkWorkspace = std::int64_t{2} << 30;
constexpr std::int64_t kWorkspaceSlack = std::int64_t{32} << 20;
constexpr std::int64_t kShortestSequence = 64;
constexpr std::int64_t kLongestMasked = 16384;  ///< its mask takes half of a chunk's workspace
constexpr std::int64_t kSmallestPart = 16;      ///< of the largest chunk: the smallest that is tried
constexpr std::int64_t kMostPlans = 8;          ///< of cuDNN's list, that are tried
/// Tells choices timed on operands outside the L2 cache from others in the cache file.
constexpr const char* kSearchMark = ", cold";

constexpr std::int64_t round_up(std::int64_t x, std::int64_t to) { return (x + to - 1) / to * to; }

/// Upper bound for one sequence. The deterministic gradient stores the score gradients in bf16, by whole tiles, and
/// then makes dq of them; with grouped queries the key and value gradients of all heads are stored before they are
/// summed.
std::int64_t gradient_workspace(const AttentionShape& s) {
  const std::int64_t tiles = round_up(s.sequence, 128);
  return s.heads * (tiles * tiles * 2 + 3 * tiles * round_up(s.head_dim, 64) * 4 + tiles * 16);
}

/// The mask of one sequence.
std::int64_t mask_bytes(const AttentionShape& s) { return s.documents ? s.sequence * s.sequence * 2 : 0; }

/// Scratch that grows with the batch, for one sequence.
std::int64_t sequence_workspace(const AttentionShape& s, AttentionPass pass) {
  return mask_bytes(s) + (pass == AttentionPass::gradient ? gradient_workspace(s) : 0);
}

/// Sequences at once: as many as the workspace allows, in chunks of about one size.
std::int64_t chunk_size(const AttentionShape& s, AttentionPass pass) {
  std::int64_t most = s.chunk > 0 ? s.chunk : s.batch;
  const std::int64_t one = sequence_workspace(s, pass);
  if (s.chunk == 0 && one > 0) most = std::max<std::int64_t>(kChunkWorkspace / one, 1);
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

/// What a choice is known by; the sequences that may run at once are part of it, since the workspace's bound may
/// change, and whether the op says so, since only chunks that it leaves open are varied.
std::string describe(const AttentionShape& s, AttentionPass pass) {
  std::string text = pass == AttentionPass::gradient ? "attention_grad " : "attention ";
  text += std::to_string(s.batch) + "x" + std::to_string(s.sequence) + " " + std::to_string(s.heads) + "/" +
          std::to_string(s.kv_heads) + "x" + std::to_string(s.head_dim) + (s.causal ? " causal" : " full");
  if (s.documents) text += " documents";
  if (s.window > 0) text += " window " + std::to_string(s.window);
  if (pass == AttentionPass::forward_without_logsumexp) text += " without-logsumexp";
  text += " by up to " + std::to_string(chunk_size(s, pass));
  return s.chunk > 0 ? text + " chunk " + std::to_string(s.chunk) : text;
}

/// One head's rows are `row` elements apart.
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

fe::graph::Tensor_attributes describe_mask(std::int64_t batch, const AttentionShape& s) {
  return fe::graph::Tensor_attributes()
      .set_uid(kMask)
      .set_dim({batch, 1, s.sequence, s.sequence})
      .set_stride({s.sequence * s.sequence, s.sequence * s.sequence, s.sequence, 1});
}

/// What queries attend to, for `options` of either pass.
template <class Options>
void set_masks(Options& options, fe::graph::Graph& graph, std::int64_t batch, const AttentionShape& s) {
  if (s.causal) options.set_diagonal_alignment(fe::DiagonalAlignment_t::TOP_LEFT).set_diagonal_band_right_bound(0);
  if (s.documents)
    options.set_bias(graph.tensor(describe_mask(batch, s)));
  else if (s.window > 0)
    options.set_diagonal_band_left_bound(s.window);
}

void place(const Tensor& output, const fe::graph::Tensor_attributes& as) {
  output->set_output(true).set_uid(as.get_uid()).set_dim(as.get_dim()).set_stride(as.get_stride());
}

void build_forward(fe::graph::Graph& graph, const AttentionShape& s, std::int64_t batch, bool stats) {
  Tensor q = graph.tensor(describe(kQuery, batch, s.heads, s, s.packed()));
  Tensor k = graph.tensor(describe(kKey, batch, s.kv_heads, s, s.packed()));
  Tensor v = graph.tensor(describe(kValue, batch, s.kv_heads, s, s.packed()));
  auto options = fe::graph::SDPA_attributes().set_name("attention").set_generate_stats(stats).set_attn_scale(s.scale);
  set_masks(options, graph, batch, s);
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
  set_masks(options, graph, batch, s);
  auto [dq, dk, dv] = graph.sdpa_backward(q, k, v, out, dout, stats, options);
  place(dq, describe(kQueryGrad, batch, s.heads, s, s.packed()));
  place(dk, describe(kKeyGrad, batch, s.kv_heads, s, s.packed()));
  place(dv, describe(kValueGrad, batch, s.kv_heads, s, s.packed()));
}

}  // namespace

std::string cudnn_refusal(const AttentionShape& s, AttentionPass pass, const CudaTraits& gpu, std::size_t version) {
  constexpr std::size_t kBlackwellGradient = 91800;
  const std::int64_t largest_head = gpu.compute_capability == 90 ? 256 : 128;
  const bool masks = !s.documents || (s.sequence % 8 == 0 && s.sequence <= kLongestMasked);  // 16-byte rows
  // cuDNN 9.19 gives NaN there: see the test of it.
  if (pass == AttentionPass::gradient && gpu.compute_capability == 90 && !s.causal && s.sequence % 128 == 64)
    return "gives NaN in gradients without a causal mask in sequences of 64 more than a multiple of 128 (" +
           std::to_string(s.sequence) + ") on Hopper";
  if (s.cap > 0) return "gets no soft caps of scores";
  if (s.dtype != DType::bf16 || !masks || s.head_dim % 8 != 0 || s.head_dim > largest_head ||
      s.sequence < kShortestSequence)
    return "does not take " + std::string(name_of(s.dtype)) + " heads of " + std::to_string(s.head_dim) +
           " in sequences of " + std::to_string(s.sequence) +
           (s.documents    ? " with documents"
            : s.window > 0 ? " with windows"
                           : "");
  if (pass == AttentionPass::gradient && gpu.compute_capability / 10 == 10 && version < kBlackwellGradient)
    return "needs version 9.18 for a repeatable gradient on Blackwell (compute capability " +
           std::to_string(gpu.compute_capability / 10) + "." + std::to_string(gpu.compute_capability % 10) +
           "), found " + std::to_string(version / 10000) + "." + std::to_string(version / 100 % 100);
  return {};
}

bool cudnn_takes(const AttentionShape& s, AttentionPass pass, const CudaTraits& gpu) {
  return gpu.attention != AttentionChoice::own && cudnn_refusal(s, pass, gpu, cudnnGetVersion()).empty();
}

std::size_t cudnn_attention_workspace(const AttentionShape& s, AttentionPass pass) {
  return static_cast<std::size_t>(chunk_size(s, pass) * sequence_workspace(s, pass) + kWorkspaceSlack);
}

/// The op for a batch, and the plans of cuDNN's for it that have been built.
struct CudnnAttention::Graph {
  Graph(const AttentionShape& shape, AttentionPass pass, std::int64_t batch, cudnnHandle_t handle) : handle_(handle) {
    graph.set_io_data_type(fe::DataType_t::BFLOAT16)
        .set_intermediate_data_type(fe::DataType_t::FLOAT)
        .set_compute_data_type(fe::DataType_t::FLOAT);
    if (pass == AttentionPass::gradient)
      build_gradient(graph, shape, batch);
    else
      build_forward(graph, shape, batch, pass == AttentionPass::forward);
    mask_ = static_cast<std::size_t>(batch * mask_bytes(shape));
    fe::error_t status = list_plans();
    if (status.is_bad()) refusal = status.get_message();
  }
  std::int64_t plans() const { return refusal.empty() ? graph.get_execution_plan_count() : 0; }
  /// Runs by the plan at `place` from here on; false where there is none that gives the same bits every time and needs
  /// no more than `room` bytes.
  bool use(std::int64_t place, std::size_t room) {
    std::int64_t bytes = 0;
    if (place >= plans()) return false;
    fe::error_t status = graph.build_plan_at_index(handle_, place);
    if (status.is_bad() || graph.get_plan_name_at_index(place, name).is_bad() ||
        graph.get_workspace_size_plan_at_index(place, bytes).is_bad()) {
      if (refusal_of_plan.empty()) refusal_of_plan = status.get_message();
      return false;
    }
    const std::size_t needed = static_cast<std::size_t>(bytes) + mask_;
    least = least == 0 ? needed : std::min(least, needed);
    plan = place;
    return needed <= room;
  }

  fe::graph::Graph graph;
  std::int64_t plan = 0;
  std::string name;
  std::string refusal, refusal_of_plan;  ///< of the op; of the first plan that cannot be built
  std::size_t least = 0;                 ///< bytes that a plan needs, of those that were built; 0: none was

 private:
  fe::error_t list_plans() {
    if (fe::error_t status = graph.validate(); status.is_bad()) return status;
    if (fe::error_t status = graph.build_operation_graph(handle_); status.is_bad()) return status;
    fe::error_t status = graph.create_execution_plans({fe::HeurMode_t::A});
    if (status.is_good()) graph.deselect_numeric_notes({fe::NumericalNote_t::NONDETERMINISTIC});
    return status;
  }
  cudnnHandle_t handle_;
  std::size_t mask_ = 0;
};

std::string CudnnAttention::Way::text() const {
  return std::to_string(chunk) + " " + std::to_string(place) + " " + name;
}

std::optional<CudnnAttention::Way> CudnnAttention::parse(const std::string& text) {
  Way way;
  std::istringstream stream(text);
  if (stream >> way.chunk >> way.place && std::getline(stream >> std::ws, way.name) && way.chunk > 0 && way.place >= 0)
    return way;
  return {};
}

bool CudnnAttention::build(std::int64_t chunk) {
  if (chunk < 1 || chunk > std::max<std::int64_t>(shape_.batch, 1)) return false;
  chunk_ = chunk;
  auto graph_of = [&](std::int64_t batch) {
    return batch > 0 ? std::make_unique<Graph>(shape_, pass_, batch, handle_) : nullptr;
  };
  whole_ = graph_of(chunk);
  tail_ = graph_of(shape_.batch % chunk);
  return whole_->refusal.empty() && (!tail_ || tail_->refusal.empty());
}

bool CudnnAttention::use(std::int64_t place) {
  return whole_->use(place, room_) && (!tail_ || tail_->use(place, room_));
}

std::string CudnnAttention::why_none() const {
  const std::string version = "cuDNN " + std::to_string(cudnnGetVersion());
  if (!whole_->refusal.empty()) return version + " refuses it: " + whole_->refusal;
  if (whole_->least > room_)
    return version + " needs " + std::to_string(whole_->least) + " bytes of workspace for one sequence, the plan has " +
           std::to_string(room_);
  return version + " has no repeatable way" +
         (whole_->refusal_of_plan.empty() ? std::string() : ": " + whole_->refusal_of_plan);
}

// The gradient's chunks need not be as large as they may be: smaller ones leave score gradients in the L2 cache. Where
// cuDNN needs more memory than is planned, so that nothing fits, chunks are halved down to one sequence.
std::optional<TimedChoices::Found> CudnnAttention::choose(CudaContext& context) {
  const std::int64_t largest = chunk_size(shape_, pass_);
  const bool vary = pass_ == AttentionPass::gradient && shape_.chunk == 0;
  const AttentionScratch scratch(shape_, pass_, room_, context);
  std::size_t next = 0;
  auto run_once = [&] { run(scratch.operands(next++ % scratch.sets()), context.setup); };
  std::optional<Way> best;
  std::unique_ptr<Graph> whole, tail;
  float best_ms = std::numeric_limits<float>::infinity();
  for (std::int64_t chunk = largest; chunk > 0; chunk /= 2) {
    if (best && (!vary || chunk < largest / kSmallestPart)) break;
    if (!build(chunk)) continue;
    bool faster = false;
    for (std::int64_t place = 0; place < std::min(whole_->plans(), kMostPlans); ++place) {
      if (!use(place)) continue;
      const Way way{chunk, place, whole_->name};
      if (scratch.sets() == 0) return TimedChoices::Found{way.text(), false};
      run_once();  // loads the kernels
      const float ms = best_of_rounds(context.setup, run_once);
      if (ms >= best_ms) continue;
      best = way;
      best_ms = ms;
      faster = true;
    }
    if (faster) whole = std::move(whole_), tail = std::move(tail_);
  }
  if (!best) return {};
  chunk_ = best->chunk;
  whole_ = std::move(whole);
  tail_ = std::move(tail);
  use(best->place);
  return TimedChoices::Found{best->text(), scratch.cold()};
}

CudnnAttention::CudnnAttention(const AttentionShape& shape, AttentionPass pass, std::size_t room, CudaContext& context)
    : shape_(shape), pass_(pass), room_(room), handle_(context.dnn) {
  auto usable = [this](const std::string& text) {
    const std::optional<Way> way = parse(text);
    return way && build(way->chunk) && use(way->place) && whole_->name == way->name;
  };
  const std::optional<std::string> choice =
      context.choices->known_or_timed(describe(shape, pass), kSearchMark, usable, [&] { return choose(context); });
  if (!choice) refusal_ = why_none();
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
    char* workspace = static_cast<char*>(operands.workspace);
    if (s.documents) {
      const std::int64_t rows = std::min(chunk_, s.batch - begin);
      write_attention_mask(workspace, s, operands.documents, begin, rows, stream);
      pointers[kMask] = workspace;
      workspace += rows * mask_bytes(s);
    }
    require(s, graph.graph.execute_plan_at_index(handle_, pointers, workspace, graph.plan));
  }
}

}  // namespace quern::cuda
