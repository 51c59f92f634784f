// attention and attention_grad: which way they run is a rule on the instance and the GPU, known to plans. Forward and
// gradient share the layout of logsumexp and may run differently.

#include <cudnn.h>

#include <algorithm>
#include <memory>
#include <string>

#include "attention/attention.h"
#include "quern/error.h"
#include "runtime/hopper_kernels.h"
#include "runtime/operand_check.h"

namespace quern::cuda {

namespace {

/// `packed` and `documents` are the indices of these inputs.
struct Inputs {
  std::size_t packed, documents;
};
constexpr Inputs kForward{0, 1}, kGradient{1, 4};

AttentionShape shape_of(const OpInstance& op, const Inputs& inputs) {
  AttentionShape shape;
  shape.batch = op.geometry.batch;
  shape.sequence = op.geometry.sequence;
  shape.heads = op.attributes.integer("heads");
  shape.kv_heads = op.attributes.integer("kv_heads");
  shape.head_dim = op.attributes.integer("head_dim");
  shape.causal = op.attributes.word("mask") == "causal";
  shape.scale = static_cast<float>(op.attributes.real("scale"));
  shape.cap = static_cast<float>(op.attributes.real_or("cap", 0));
  shape.window = op.attributes.integer_or("window", 0);
  if (shape.window >= shape.sequence) shape.window = 0;
  shape.documents = op.inputs.size() > inputs.documents && op.inputs[inputs.documents].present;
  shape.chunk = op.attributes.integer_or("chunk", 0);
  shape.dtype = op.inputs[inputs.packed].dtype;
  return shape;
}

enum class Way : std::uint8_t { cudnn, wgmma, own };

Way way_of(const AttentionShape& s, AttentionPass pass, const CudaTraits& gpu) {
  const bool open = gpu.attention == AttentionChoice::automatic && s.chunk == 0;  // chunks are cuDNN's
  if (open && wgmma_takes(s, pass, gpu)) return Way::wgmma;
  return cudnn_takes(s, pass, gpu) ? Way::cudnn : Way::own;
}

/// Why CUDA cores run a pass, for people; empty where tensor cores do.
std::string why_slow(const AttentionShape& s, AttentionPass pass, const CudaTraits& gpu) {
  if (way_of(s, pass, gpu) != Way::own) return {};
  const std::string on = "attention on CUDA cores, not tensor cores, as ";
  if (gpu.attention == AttentionChoice::own) return on + "device.cuda.attention is \"own\"";
  const std::string capability =
      std::to_string(gpu.compute_capability / 10) + "." + std::to_string(gpu.compute_capability % 10);
  return on + "cuDNN " + cudnn_refusal(s, pass, gpu, cudnnGetVersion()) + " (compute capability " + capability + ")";
}

std::string refuse_shape(const OpInstance& op, AttentionPass pass, const AttentionShape& s, const CudaTraits& gpu) {
  const std::string& mask = op.attributes.word("mask");
  if (mask != "causal" && mask != "full") return op.kind + ": unknown mask \"" + mask + "\", known: causal, full";
  if (s.chunk < 0) return op.kind + ": a chunk must have at least one sequence";
  if (s.heads < 1 || s.kv_heads < 1 || s.head_dim < 1 || s.heads % s.kv_heads != 0)
    return op.kind + ": heads must be a multiple of kv_heads, all positive";
  if (s.head_dim > kOwnLargestHead)
    return op.kind + ": head_dim " + std::to_string(s.head_dim) + " is above " + std::to_string(kOwnLargestHead) +
           ", the largest on this device";
  if (gpu.attention == AttentionChoice::cudnn)
    if (const std::string reason = cudnn_refusal(s, pass, gpu, cudnnGetVersion()); !reason.empty())
      return op.kind + ": device.cuda.attention is \"cudnn\", which " + reason + "; set it to \"auto\"";
  return {};
}

/// Checks what both ops share and the documents; `others` checks the rest.
template <class Others>
OpSupport check(const OpInstance& op, AttentionPass pass, const Inputs& inputs, std::size_t outputs,
                std::size_t workspace, const AttentionShape& s, const CudaTraits& gpu, Others others) {
  if (std::string text = refuse_shape(op, pass, s, gpu); !text.empty()) return {text, 0};
  OpInstance without = op;  // the documents, an optional input, are checked apart
  without.inputs.resize(inputs.documents);
  OperandCheck check(without, inputs.documents, outputs, inputs.packed);
  check.input(inputs.packed, "qkv", {s.tokens(), s.packed()});
  others(check);
  if (s.documents) {
    const Operand& documents = op.inputs[inputs.documents];
    check.that(documents.dtype == DType::i32 && documents.count() == s.tokens() + 1,
               "operand documents: must be i32, one offset more than there are tokens");
  }
  OpSupport support = check.support(workspace);
  support.slow = why_slow(s, pass, gpu);
  return support;
}

std::size_t workspace_of(const AttentionShape& s, AttentionPass pass, const CudaTraits& gpu) {
  const bool gradient = pass == AttentionPass::gradient;
  const std::size_t own = gradient ? own_attention_grad_workspace(s) : 0;
  switch (way_of(s, pass, gpu)) {
    case Way::cudnn: return std::max(cudnn_attention_workspace(s, pass), own);
    case Way::wgmma:
      return gradient ? hopper_kernels().attention_grad_workspace(s) : hopper_kernels().attention_workspace(s);
    case Way::own: break;
  }
  return own;
}

OpSupport query_forward(const OpInstance& op, const CudaTraits& gpu) {
  if (op.inputs.empty() || op.outputs.size() != 2)
    return {"attention: takes qkv and documents, gives y and logsumexp", 0};
  AttentionShape s = shape_of(op, kForward);
  constexpr AttentionPass kPass = AttentionPass::forward;
  return check(op, kPass, kForward, 2, workspace_of(s, kPass, gpu), s, gpu, [&](OperandCheck& check) {
    check.output(0, "y", {s.tokens(), s.width()}).output(1, "logsumexp", {s.tokens(), s.heads}, DType::f32);
  });
}

OpSupport query_gradient(const OpInstance& op, const CudaTraits& gpu) {
  if (op.inputs.size() < 4 || op.outputs.size() != 1)
    return {"attention_grad: takes dy, qkv, y, logsumexp and documents, gives dqkv", 0};
  AttentionShape s = shape_of(op, kGradient);
  return check(op, AttentionPass::gradient, kGradient, 1, workspace_of(s, AttentionPass::gradient, gpu), s, gpu,
               [&](OperandCheck& check) {
                 check.input(0, "dy", {s.tokens(), s.width()})
                     .input(2, "y", {s.tokens(), s.width()})
                     .input(3, "logsumexp", {s.tokens(), s.heads}, DType::f32)
                     .output(0, "dqkv", {s.tokens(), s.packed()});
               });
}

AttentionOperands forward_operands(const AttentionShape& s, std::span<const View> inputs, std::span<const View> outputs,
                                   const Exec& exec) {
  return {.qkv = inputs[0].data,
          .y = outputs[0].data,
          .logsumexp = outputs[1].as<float>(),
          .documents = s.documents ? inputs[kForward.documents].as<const std::int32_t>() : nullptr,
          .workspace = exec.workspace};
}

AttentionOperands gradient_operands(const AttentionShape& s, std::span<const View> inputs,
                                    std::span<const View> outputs, const Exec& exec) {
  return {.qkv = inputs[1].data,
          .y = inputs[2].data,
          .logsumexp = inputs[3].as<float>(),
          .documents = s.documents ? inputs[kGradient.documents].as<const std::int32_t>() : nullptr,
          .dy = inputs[0].data,
          .dqkv = outputs[0].data,
          .workspace = exec.workspace};
}

using OperandsOf = AttentionOperands (*)(const AttentionShape&, std::span<const View>, std::span<const View>,
                                         const Exec&);

/// `run` takes operands and a stream.
template <class Run>
Launch launch_of(const AttentionShape& s, OperandsOf operands_of, Run run) {
  return [s, operands_of, run](std::span<const View> inputs, std::span<const View> outputs, const Exec& exec) {
    run(operands_of(s, inputs, outputs, exec), stream_of(exec));
  };
}

/// Through cuDNN or, where it turns out that it cannot run here, by own kernels, with a note: what another GPU's
/// library needs is known only there.
Launch cudnn_launch(const OpInstance& op, const AttentionShape& s, AttentionPass pass, OperandsOf operands_of,
                    void (*own)(const AttentionShape&, const AttentionOperands&, cudaStream_t), CudaContext& context) {
  auto attention = std::make_shared<CudnnAttention>(s, pass, cudnn_attention_workspace(s, pass), context);
  const std::string& refusal = attention->refusal();
  if (refusal.empty())
    return launch_of(s, operands_of, [attention](const AttentionOperands& operands, cudaStream_t stream) {
      attention->run(operands, stream);
    });
  if (context.traits.attention == AttentionChoice::cudnn)
    throw Error(ErrorCode::resources, {.where = "device cuda",
                                       .what = op.kind + ": device.cuda.attention is \"cudnn\", which cannot run it",
                                       .found = refusal,
                                       .expected = {},
                                       .next = "set it to \"auto\""});
  context.note(op.kind + " runs by CUDA cores, many times slower than by tensor cores: " + refusal);
  return launch_of(s, operands_of,
                   [s, own](const AttentionOperands& operands, cudaStream_t stream) { own(s, operands, stream); });
}

/// By the way that is the rule for it; `own` and `hopper` are the pass's kernels.
Launch prepare_way(const OpInstance& op, const AttentionShape& s, AttentionPass pass, OperandsOf operands_of,
                   void (*own)(const AttentionShape&, const AttentionOperands&, cudaStream_t),
                   void (*HopperKernels::*load)(const AttentionShape&),
                   void (*HopperKernels::*hopper)(const AttentionShape&, const AttentionOperands&, int, cudaStream_t),
                   CudaContext& context) {
  switch (way_of(s, pass, context.traits)) {
    case Way::cudnn: return cudnn_launch(op, s, pass, operands_of, own, context);
    case Way::own:
      return launch_of(s, operands_of,
                       [s, own](const AttentionOperands& operands, cudaStream_t stream) { own(s, operands, stream); });
    case Way::wgmma: break;
  }
  (hopper_kernels().*load)(s);
  const auto run = hopper_kernels().*hopper;
  const int multiprocessors = context.multiprocessors;
  return launch_of(s, operands_of, [=](const AttentionOperands& operands, cudaStream_t stream) {
    run(s, operands, multiprocessors, stream);
  });
}

Launch prepare_forward(const OpInstance& op, CudaContext& context) {
  const AttentionPass pass = op.outputs[1].present ? AttentionPass::forward : AttentionPass::forward_without_logsumexp;
  return prepare_way(op, shape_of(op, kForward), pass, forward_operands, own_attention, &HopperKernels::load_attention,
                     &HopperKernels::attention, context);
}

Launch prepare_gradient(const OpInstance& op, CudaContext& context) {
  return prepare_way(op, shape_of(op, kGradient), AttentionPass::gradient, gradient_operands, own_attention_grad,
                     &HopperKernels::load_attention_grad, &HopperKernels::attention_grad, context);
}

}  // namespace

bool wgmma_takes(const AttentionShape& s, AttentionPass pass, const CudaTraits& gpu) {
  constexpr std::int64_t kMost = std::int64_t{1} << 30, kRows = 128;  // rows of all heads, of whole blocks, are 32-bit
  const bool gradient = pass == AttentionPass::gradient, ranges = s.documents || s.window > 0;
  return gpu.wgmma && (gradient || ranges) && s.dtype == DType::bf16 && (s.head_dim == 64 || s.head_dim == 128) &&
         s.cap == 0 && s.scale > 0 && s.batch * s.heads * (s.sequence + kRows) < kMost;
}

bool runs_by_wgmma(const OpInstance& op, const CudaTraits& gpu) {
  const bool gradient = op.kind == "attention_grad";
  return way_of(shape_of(op, gradient ? kGradient : kForward),
                gradient ? AttentionPass::gradient : AttentionPass::forward, gpu) == Way::wgmma;
}

void add_attention_ops(OpTable& table) {
  table["attention"] = {prepare_forward, query_forward};
  table["attention_grad"] = {prepare_gradient, query_gradient};
}

}  // namespace quern::cuda
