#include "attention/attention_timing.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "products/library/matmul_scratch.h"
#include "runtime/check.h"
#include "runtime/timing.h"

namespace quern::cuda {

namespace {

/// Bytes of each operand in a set; 0 for those that the pass does not use.
struct OperandBytes {
  std::size_t qkv, y, logsumexp, dy, dqkv;
  OperandBytes(const AttentionShape& shape, AttentionPass pass)
      : qkv(rounded(shape.tokens() * shape.packed(), 2)),
        y(rounded(shape.tokens() * shape.width(), 2)),
        logsumexp(pass == AttentionPass::forward_without_logsumexp ? 0 : rounded(shape.tokens() * shape.heads, 4)),
        dy(pass == AttentionPass::gradient ? y : 0),
        dqkv(pass == AttentionPass::gradient ? qkv : 0) {}
  std::size_t all() const { return qkv + y + logsumexp + dy + dqkv; }

 private:
  static std::size_t rounded(std::int64_t count, std::size_t size) {
    return (static_cast<std::size_t>(count) * size + 255) / 256 * 256;
  }
};

}  // namespace

std::size_t attention_set_bytes(const AttentionShape& shape, AttentionPass pass) {
  return OperandBytes(shape, pass).all();
}

AttentionScratch::AttentionScratch(const AttentionShape& shape, AttentionPass pass, std::size_t workspace,
                                   CudaContext& context)
    : shape_(shape), pass_(pass) {
  const OperandBytes bytes(shape, pass);
  const std::size_t wanted = sets_beyond(context.traits.l2_bytes, bytes.all());
  for (sets_ = wanted; sets_ > 0; sets_ /= 2) {
    if (cudaMalloc(&memory_, sets_ * bytes.all() + workspace) == cudaSuccess) break;
    cudaGetLastError();
    memory_ = nullptr;
  }
  if (sets_ == 0) return;
  cold_ = sets_ == wanted;
  char* next = static_cast<char*>(memory_);
  auto take = [&](std::size_t size) { return std::exchange(next, next + sets_ * size); };
  char *qkv = take(bytes.qkv), *y = take(bytes.y), *logsumexp = take(bytes.logsumexp), *dy = take(bytes.dy),
       *dqkv = take(bytes.dqkv);
  fill_random(qkv, sets_ * bytes.qkv, DType::bf16, 1, context.setup);
  fill_random(y, sets_ * bytes.y, DType::bf16, 2, context.setup);
  fill_random(dy, sets_ * bytes.dy, DType::bf16, 3, context.setup);
  QUERN_CUDA(cudaMemsetAsync(logsumexp, 0, sets_ * bytes.logsumexp, context.setup));
  operands_ = {
      .qkv = qkv, .y = y, .logsumexp = reinterpret_cast<float*>(logsumexp), .dy = dy, .dqkv = dqkv, .workspace = next};
}

AttentionScratch::~AttentionScratch() { cudaFree(memory_); }

AttentionOperands AttentionScratch::operands(std::size_t set) const {
  const OperandBytes bytes(shape_, pass_);
  AttentionOperands operands = operands_;
  operands.qkv = static_cast<const char*>(operands_.qkv) + set * bytes.qkv;
  operands.y = static_cast<char*>(operands_.y) + set * bytes.y;
  operands.logsumexp = operands_.logsumexp + set * bytes.logsumexp / sizeof(float);
  operands.dy = static_cast<const char*>(operands_.dy) + set * bytes.dy;
  operands.dqkv = static_cast<char*>(operands_.dqkv) + set * bytes.dqkv;
  return operands;
}

float best_of_rounds(cudaStream_t stream, const std::function<void()>& body) {
  constexpr int kRounds = 3, kRuns = 3;
  const EventTimer timer(stream);
  float best = std::numeric_limits<float>::infinity();
  for (int round = 0; round < kRounds; ++round) {
    timer.start();
    for (int run = 0; run < kRuns; ++run) body();
    timer.stop();
    best = std::min(best, timer.milliseconds() / kRuns);
  }
  return best;
}

}  // namespace quern::cuda
