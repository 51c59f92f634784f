// Attention and its gradient by simple kernels and through cuDNN, against the CPU device.
#include <algorithm>
#include <cmath>

#include <cudnn.h>

#include "attention/attention.h"
#include "attention/attention_timing.h"
#include "quern/error.h"
#include "runtime/check.h"
#include "runtime/cuda_device.h"
#include "runtime/hopper_kernels.h"
#include "runtime/timing.h"
#include "tests/attention_pair.h"

using namespace quern;
using namespace quern::cuda;
using testkit::PoisonedTensor;
using Case = AttentionCase;

TEST_CASE("attention and its gradient by simple kernels: fp32, odd sizes, full and document masks") {
  DevicePair pair = open_pair_by("own");
  for (const Case& c :
       {Case{1, 1, 1, 1, 2}, Case{2, 5, 3, 1, 6}, Case{1, 70, 4, 2, 34}, Case{2, 65, 7, 1, 64}, Case{1, 40, 2, 2, 128},
        Case{1, 33, 1, 1, 256}, Case{2, 40, 4, 2, 16, "full"}, Case{2, 65, 4, 2, 64, "causal", {0, 3, 4, 65, 100}},
        Case{2, 50, 2, 1, 32, "full", {0, 20, 50, 99}}, Case{2, 8, 2, 1, 16, "causal", {0, 8}}}) {
    for (DType dtype : {DType::f32, DType::bf16}) compare(pair, c, dtype);
  }
}

TEST_CASE("attention in windows and with soft caps, by simple kernels") {
  DevicePair pair = open_pair_by("own");
  for (std::int64_t window : {0, 1, 5, 64}) {
    for (double cap : {0.0, 1.5}) {
      Case plain{2, 65, 4, 2, 64}, odd{1, 70, 3, 1, 34}, documents{2, 40, 2, 1, 16, "causal", {0, 3, 4, 40, 60}};
      for (Case* c : {&plain, &odd, &documents}) {
        c->window = window, c->cap = cap;
        if (window > 0 || cap > 0)
          for (DType dtype : {DType::f32, DType::bf16}) compare(pair, *c, dtype);
      }
    }
  }
}

TEST_CASE("attention and its gradient through cuDNN") {
  if (!has_libraries()) return;
  DevicePair pair = open_pair_by("cudnn");
  for (const Case& c : {Case{2, 64, 2, 2, 64}, Case{3, 128, 7, 1, 64}, Case{1, 200, 4, 2, 128}, Case{2, 77, 4, 4, 32},
                        Case{2, 256, 14, 2, 64}, Case{1, 128, 2, 1, 80}, Case{2, 128, 4, 2, 64, "full"}})
    compare(pair, c, DType::bf16);
}

TEST_CASE("attention is timed on so many operands that none are left in the cache") {
  constexpr std::size_t kCache = 50u << 20;
  for (const AttentionShape& s :
       {AttentionShape{.batch = 1, .sequence = 64, .heads = 2, .kv_heads = 1, .head_dim = 64},
        AttentionShape{.batch = 8, .sequence = 1024, .heads = 14, .kv_heads = 2, .head_dim = 64},
        AttentionShape{.batch = 64, .sequence = 1024, .heads = 28, .kv_heads = 4, .head_dim = 128}}) {
    for (AttentionPass pass :
         {AttentionPass::forward, AttentionPass::forward_without_logsumexp, AttentionPass::gradient}) {
      const std::int64_t passes = pass == AttentionPass::gradient ? 2 : 1;
      const auto least = static_cast<std::size_t>(2 * passes * s.tokens() * (s.packed() + s.width()));
      const std::size_t bytes = attention_set_bytes(s, pass), sets = sets_beyond(kCache, bytes);
      CHECK(bytes >= least);
      CHECK(bytes <= least + static_cast<std::size_t>(4 * s.tokens() * s.heads) + 5 * 256);
      CHECK((sets == 1 ? bytes : (sets - 1) * bytes) >= kCache);
      CHECK(sets * bytes <= 2 * kCache + bytes);
    }
  }
}

TEST_CASE("the sets of operands that attention is timed on share no byte") {
  if (!affordable(25 << 20)) {  // twice the cache
    MESSAGE("skipped: left to a GPU");
    return;
  }
  const AttentionShape s{.batch = 3, .sequence = 65, .heads = 6, .kv_heads = 2, .head_dim = 40};
  CudaContext context;
  if (cudaStreamCreateWithFlags(&context.setup, cudaStreamNonBlocking) != cudaSuccess) {
    cudaGetLastError();
    MESSAGE("skipped: no GPU can be used");
    return;
  }
  constexpr std::size_t kWorkspace = 1000;
  for (AttentionPass pass : {AttentionPass::forward, AttentionPass::gradient}) {
    const AttentionScratch scratch(s, pass, kWorkspace, context);
    REQUIRE(scratch.sets() > 1);
    using Range = std::pair<std::uintptr_t, std::uintptr_t>;
    std::vector<Range> ranges;
    auto add = [&](const void* begin, std::int64_t bytes) {
      const auto at = reinterpret_cast<std::uintptr_t>(begin);
      ranges.emplace_back(at, at + static_cast<std::uintptr_t>(bytes));
    };
    add(scratch.operands(0).workspace, kWorkspace);
    for (std::size_t set = 0; set < scratch.sets(); ++set) {
      const AttentionOperands o = scratch.operands(set);
      CHECK(o.workspace == scratch.operands(0).workspace);
      add(o.qkv, 2 * s.tokens() * s.packed());
      add(o.y, 2 * s.tokens() * s.width());
      add(o.logsumexp, 4 * s.tokens() * s.heads);
      if (pass != AttentionPass::gradient) continue;
      add(o.dy, 2 * s.tokens() * s.width());
      add(o.dqkv, 2 * s.tokens() * s.packed());
    }
    std::sort(ranges.begin(), ranges.end());
    CHECK(std::adjacent_find(ranges.begin(), ranges.end(),
                             [](const Range& a, const Range& b) { return a.second > b.first; }) == ranges.end());
    QUERN_CUDA(cudaStreamSynchronize(context.setup));
  }
  cudaStreamDestroy(context.setup);
}

TEST_CASE("attention set to cuDNN is refused where cuDNN does not take it, with the reason") {
  CudaOptions options;
  options.assume = "H100";
  options.attention = "cudnn";
  const CudaDevice device(options);
  OpInstance op{"attention",
                {{DType::bf16, {128, 192}, true, false}, {}},
                {{DType::bf16, {128, 64}, true, false}, {DType::f32, {128, 1}, true, false}},
                {{"heads", std::int64_t{1}},
                 {"kv_heads", std::int64_t{1}},
                 {"head_dim", std::int64_t{64}},
                 {"mask", std::string("causal")},
                 {"scale", 0.125}},
                {1, 128}};
  CHECK(device.query(op).refusal == "");
  op.geometry = {4, 32};
  CHECK(
      device.query(op).refusal ==
      "attention: device.cuda.attention is \"cudnn\", which does not take bf16 heads of 64 in sequences of 32; set it "
      "to \"auto\"");
}

TEST_CASE("the sequences for which cuDNN's gradient gives NaN on Hopper are refused, and the op runs another way") {
  CudaTraits gpu;
  gpu.attention = AttentionChoice::automatic;
  AttentionShape s{.batch = 2, .sequence = 192, .heads = 4, .kv_heads = 2, .head_dim = 80, .causal = false};
  CHECK(cudnn_refusal(s, AttentionPass::gradient, gpu, 91900).find("gives NaN") == 0);
  CHECK(cudnn_refusal(s, AttentionPass::forward, gpu, 91900) == "");
  gpu.compute_capability = 89;
  CHECK(cudnn_refusal(s, AttentionPass::gradient, gpu, 91900) == "");
  gpu.compute_capability = 90;
  s.causal = true;
  CHECK(cudnn_refusal(s, AttentionPass::gradient, gpu, 91900) == "");
  if (!has_libraries()) return;
  DevicePair pair = open_pair();
  for (const int sequence : {72, 96, 120, 128, 136, 160, 184, 192, 200, 232, 320, 1088})
    for (const Case& c :
         {Case{2, sequence, 4, 2, 80, "full"}, Case{2, sequence, 2, 1, 64, "full", {0, 30, sequence, 2 * sequence - 3}},
          Case{1, sequence, 2, 1, 192, "full"}, Case{2, sequence, 2, 2, 128, "full", {0, sequence, sequence + 9}}})
      compare(pair, c, DType::bf16);
}

TEST_CASE("cuDNN with less workspace than it needs takes smaller chunks, and with none at all says so") {
  if (!has_libraries()) return;
  const DevicePair pair = open_pair();
  if (!pair.open) return;
  CudaContext context;
  context.traits = facts_of_unit(0).cuda;
  TimedChoices first("this GPU", ""), second("this GPU", "");  // each with nothing known
  context.choices = &first;
  QUERN_CUDNN(cudnnCreate(&context.dnn));
  QUERN_CUDA(cudaStreamCreateWithFlags(&context.setup, cudaStreamNonBlocking));
  const AttentionShape s{.batch = 8, .sequence = 512, .heads = 4, .kv_heads = 2, .head_dim = 64};
  constexpr auto kPass = AttentionPass::gradient;
  const std::size_t planned = cudnn_attention_workspace(s, kPass);
  CHECK(CudnnAttention(s, kPass, planned, context).refusal() == "");
  context.choices = &second;
  const CudnnAttention starved(s, kPass, 0, context);
  CHECK(starved.refusal().find("bytes of workspace for one sequence, the plan has 0") != std::string::npos);
  const std::string words = starved.refusal().substr(starved.refusal().find("needs ") + 6);
  const std::size_t one = std::stoull(words);  // as it says
  CHECK(one > 0);
  CHECK(one < planned);
  const CudnnAttention chunked(s, kPass, one, context);
  CHECK(chunked.refusal() == "");
  cudaStreamDestroy(context.setup);
  cudnnDestroy(context.dnn);
}

TEST_CASE("a repeatable gradient by cuDNN on Blackwell is planned from version 9.18 on") {
  CudaTraits gpu;
  const AttentionShape s{.batch = 4, .sequence = 1024, .heads = 14, .kv_heads = 2, .head_dim = 64};
  auto refusal = [&](int capability, AttentionPass pass, std::size_t version) {
    gpu.compute_capability = capability;
    return cudnn_refusal(s, pass, gpu, version);
  };
  for (int blackwell : {100, 103}) {
    CHECK(refusal(blackwell, AttentionPass::gradient, 91800) == "");
    CHECK(refusal(blackwell, AttentionPass::forward, 91002) == "");
    CHECK(refusal(blackwell, AttentionPass::gradient, 91002).find("needs version 9.18") == 0);
    CHECK(refusal(blackwell, AttentionPass::gradient, 91002).find("found 9.10") != std::string::npos);
  }
  for (int other : {80, 89, 90, 120}) CHECK(refusal(other, AttentionPass::gradient, 91002) == "");
}

TEST_CASE("attention within documents through cuDNN: short and long ones") {
  if (!has_libraries()) return;
  DevicePair pair = open_pair_by("cudnn");
  for (const Case& c :
       {Case{2, 128, 7, 1, 64, "causal", {0, 1, 5, 64, 127, 128, 200}},
        Case{3, 256, 14, 2, 64, "causal", {0, 100, 256, 300, 512, 700}},
        Case{1, 200, 4, 2, 128, "causal", {0, 63, 64, 190}}, Case{2, 128, 4, 2, 64, "full", {0, 30, 128, 250}},
        Case{2, 1024, 2, 2, 64, "causal", {0, 3, 515, 1024, 1900}}, Case{2, 128, 4, 2, 64, "causal", {0, 128}}})
    compare(pair, c, DType::bf16);
}

TEST_CASE("attention in windows through cuDNN: alone by its bound, with documents by a mask") {
  if (!has_libraries()) return;
  DevicePair pair = open_pair_by("cudnn");
  for (const std::int64_t window : {1, 50, 64, 200})
    for (Case c : {Case{2, 256, 4, 2, 64}, Case{1, 300, 2, 1, 128}, Case{1, 320, 2, 1, 256}, Case{2, 136, 4, 2, 80},
                   Case{2, 256, 4, 2, 64, "causal", {0, 100, 256, 300}}}) {
      if (window >= c.sequence) continue;
      c.window = window;
      compare(pair, c, DType::bf16);
    }
}

TEST_CASE("documents that fill their rows change attention by no more than rounding") {
  if (!has_libraries()) return;
  DevicePair pair = open_pair();
  if (!pair.open) return;
  Case plain{3, 128, 4, 2, 64}, documents{3, 128, 4, 2, 64, "causal", {0, 128, 256}};
  AttentionResults want = attend(*pair.gpu, plain, DType::bf16), got = attend(*pair.gpu, documents, DType::bf16);
  CHECK(testkit::relative_error(got.y.floats(), want.y.floats()) < 0.005);
  CHECK(testkit::relative_error(got.dqkv.floats(), want.dqkv.floats()) < 0.01);
}

TEST_CASE("plans say how much memory attention within documents takes, and which way it runs") {
  CudaTraits h100;
  AttentionShape s{.batch = 32, .sequence = 1024, .heads = 14, .kv_heads = 2, .head_dim = 64, .documents = true};
  CHECK(cudnn_takes(s, AttentionPass::forward, h100));
  const std::size_t mask = std::size_t{32} * 1024 * 1024 * 2;
  CHECK(cudnn_attention_workspace(s, AttentionPass::forward) >= mask);
  CHECK(cudnn_attention_workspace(s, AttentionPass::forward) < 2 * mask);
  s.sequence = 1023;
  CHECK_FALSE(cudnn_takes(s, AttentionPass::forward, h100));
  s.sequence = 32768;
  CHECK_FALSE(cudnn_takes(s, AttentionPass::forward, h100));
  s.documents = false;
  CHECK(cudnn_takes(s, AttentionPass::forward, h100));
}

TEST_CASE("attention in chunks of the batch agrees with one sequence alone") {
  if (!has_libraries()) return;
  DevicePair pair = open_pair_by("cudnn");
  if (!pair.open) return;
  // A chunk of 13 and one of 12. The library may choose other tiles for another batch, so bits may differ by the order
  // of sums.
  Case many{.batch = 25, .sequence = 1024, .heads = 16, .kv_heads = 1, .head_dim = 64, .chunk = 13};
  Case one{1, 1024, 16, 1, 64};
  AttentionResults all = attend(*pair.gpu, many, DType::bf16), first = attend(*pair.gpu, one, DType::bf16);
  auto beginning = [](const PoisonedTensor& tensor, std::size_t count) {
    std::vector<float> values = tensor.floats();
    values.resize(count);
    return values;
  };
  std::vector<float> y = first.y.floats(), dqkv = first.dqkv.floats();
  CHECK(testkit::relative_error(beginning(all.y, y.size()), y) < 0.005);
  CHECK(testkit::relative_error(beginning(all.dqkv, dqkv.size()), dqkv) < 0.01);
  std::vector<float> every = all.dqkv.floats();
  CHECK(std::none_of(every.begin(), every.end(), [](float value) { return std::isnan(value); }));
}
