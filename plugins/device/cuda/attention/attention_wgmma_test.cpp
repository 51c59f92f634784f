// Attention by own kernels on Hopper's tensor cores.
#include <algorithm>
#include <cstring>

#include "attention/attention.h"
#include "quern/error.h"
#include "runtime/check.h"
#include "runtime/cuda_device.h"
#include "runtime/hopper_kernels.h"
#include "tests/attention_pair.h"

using namespace quern;
using namespace quern::cuda;
using testkit::PoisonedTensor;
using Case = AttentionCase;

TEST_CASE("attention's gradient on Hopper's tensor cores: parts of tiles, groups of heads, sharp scores") {
  if (!has_libraries()) return;
  DevicePair pair = open_pair();
  if (!runs_hopper_kernels(pair)) return;
  for (const Case& c :
       {Case{1, 1, 2, 1, 64}, Case{3, 37, 8, 2, 128}, Case{1, 64, 1, 1, 128}, Case{3, 65, 2, 2, 64},
        Case{1, 129, 4, 2, 128}, Case{1, 200, 7, 1, 128}, Case{1, 1000, 8, 1, 64}, Case{1, 1024, 7, 1, 64},
        Case{1, 1024, 8, 1, 128}, Case{1, 50, 7, 1, 64, "full"}, Case{3, 200, 7, 1, 64, "full"},
        Case{2, 129, 4, 4, 128, "full"}, Case{1, 300, 4, 2, 64, "causal", {}, 0, 20},
        Case{1, 300, 4, 2, 128, "full", {}, 0, 20}, Case{2, 300, 4, 2, 64, "causal", {}, 0, 1, 64},
        Case{1, 520, 2, 1, 128, "causal", {}, 0, 1, 100}})
    compare(pair, c, DType::bf16);
}

TEST_CASE("attention within documents and windows on Hopper's tensor cores") {
  DevicePair pair = open_pair();
  if (!runs_hopper_kernels(pair)) return;
  for (const Case& c :
       {Case{2, 1, 2, 1, 64, "causal", {0, 1}}, Case{2, 77, 1, 1, 64, "causal", {}, 0, 1, 20},
        Case{1, 300, 1, 1, 128, "causal", {}, 0, 1, 64}, Case{2, 128, 7, 1, 64, "causal", {0, 1, 5, 64, 127, 128, 200}},
        Case{3, 256, 4, 2, 64, "causal", {0, 100, 256, 300, 512, 700}}, Case{2, 77, 2, 2, 64, "causal", {0, 77, 78}},
        Case{1, 200, 4, 2, 128, "causal", {0, 63, 64, 190}}, Case{2, 129, 4, 2, 64, "full", {0, 30, 129, 250}},
        Case{1, 333, 2, 1, 128, "full", {0, 30, 128, 129, 250}}, Case{1, 1024, 2, 2, 64, "causal", {0, 3, 515, 900}},
        // Rows of a block that attend to tiles many stages apart.
        Case{1, 640, 1, 1, 64, "causal", {0, 64}}, Case{1, 320, 1, 1, 128, "causal", {0, 64}},
        Case{1, 1200, 2, 1, 64, "causal", {0, 576}}, Case{1, 900, 4, 1, 128, "causal", {0, 448, 450}},
        Case{1, 1000, 2, 1, 64, "full", {0, 960}}, Case{1, 600, 2, 1, 128, "causal", {0, 599}},
        Case{1, 500, 2, 1, 64, "causal", {0, 250}, 0, 20}, Case{2, 130, 2, 1, 64, "causal", {0, 130}, 0, 1, 1},
        Case{1, 300, 4, 2, 64, "causal", {0}, 0, 1, 64}, Case{1, 520, 2, 1, 128, "causal", {0}, 0, 1, 100},
        Case{2, 300, 2, 1, 64, "causal", {0, 10, 290, 300, 350}, 0, 1, 50},
        // Rows cut a document; each token is one; the last token of a row is one.
        Case{2, 200, 2, 1, 64, "causal", {0, 150, 200}}, Case{1, 5, 2, 1, 64, "causal", {0, 1, 2, 3, 4}},
        Case{1, 129, 1, 1, 64, "causal", {0, 128}}, Case{2, 70, 2, 1, 128, "causal", {0, 69, 70, 75}},
        Case{1, 300, 2, 1, 128, "causal", {0, 20, 290}, 0, 1, 100}})
    compare(pair, c, DType::bf16, c.tokens() * c.width()[1] * c.sequence);
}

namespace {

/// Results of a pass of quern's Hopper kernels on blocks of `multiprocessors`, in bits: y and logsumexp, or dqkv. The
/// operands are the sequences from `skip` on of a batch that is `skip` longer; with documents each row has the same.
std::vector<std::uint8_t> hopper_results(Device& device, const AttentionShape& s, bool gradient, std::int64_t skip,
                                         int multiprocessors) {
  constexpr std::size_t kGuard = 4096;
  const HopperKernels& kernels = hopper_kernels();
  const Stream stream = device.stream(StreamKind::compute);
  std::vector<std::unique_ptr<DeviceBuffer>> buffers;
  auto copied = [&](const void* from, std::size_t bytes) {
    buffers.push_back(std::make_unique<DeviceBuffer>(device, bytes));
    device.copy(buffers.back()->memory, from, bytes, stream);
    device.synchronize(stream);
    return buffers.back()->memory;
  };
  auto operand = [&](DType dtype, std::int64_t columns, std::uint64_t seed) {
    const PoisonedTensor tensor = normal(dtype, {(s.batch + skip) * s.sequence, columns}, seed);
    const std::size_t row = static_cast<std::size_t>(columns) * size_of(dtype);
    return copied(static_cast<const char*>(tensor.view().data) + row * static_cast<std::size_t>(skip * s.sequence),
                  row * static_cast<std::size_t>(s.tokens()));
  };
  std::vector<std::pair<void*, std::size_t>> guarded;  // memory between guards, and its bytes
  auto guard = [&](std::size_t bytes) {
    buffers.push_back(std::make_unique<DeviceBuffer>(device, bytes + 2 * kGuard));
    device.fill(buffers.back()->memory, 0xCD, bytes + 2 * kGuard, stream);
    guarded.emplace_back(buffers.back()->memory, bytes);
    return static_cast<char*>(buffers.back()->memory) + kGuard;
  };
  const auto tokens = static_cast<std::size_t>(s.tokens());
  AttentionOperands operands;
  operands.qkv = operand(DType::bf16, s.packed(), 1);
  if (s.documents) {
    std::vector<std::int32_t> starts;
    for (std::int64_t row = 0; row < s.batch; ++row)
      for (std::int64_t start : {std::int64_t{0}, s.sequence / 3, s.sequence / 3 + 1, s.sequence * 2 / 3})
        if (const auto at = static_cast<std::int32_t>(row * s.sequence + start); starts.empty() || at > starts.back())
          starts.push_back(at);
    starts.resize(tokens + 1, static_cast<std::int32_t>(tokens));
    operands.documents = static_cast<const std::int32_t*>(copied(starts.data(), starts.size() * sizeof(std::int32_t)));
  }
  if (gradient) {
    operands.y = operand(DType::bf16, s.width(), 2);
    operands.logsumexp = static_cast<float*>(operand(DType::f32, s.heads, 3));
    operands.dy = operand(DType::bf16, s.width(), 4);
    operands.dqkv = guard(tokens * static_cast<std::size_t>(s.packed()) * 2);
    operands.workspace = guard(kernels.attention_grad_workspace(s));
    kernels.load_attention_grad(s);
    kernels.attention_grad(s, operands, multiprocessors, static_cast<cudaStream_t>(stream.handle));
  } else {
    operands.y = guard(tokens * static_cast<std::size_t>(s.width()) * 2);
    operands.logsumexp = reinterpret_cast<float*>(guard(tokens * static_cast<std::size_t>(s.heads) * sizeof(float)));
    operands.workspace = guard(kernels.attention_workspace(s));
    kernels.load_attention(s);
    kernels.attention(s, operands, multiprocessors, static_cast<cudaStream_t>(stream.handle));
  }
  std::vector<std::uint8_t> results;
  for (const auto& [memory, bytes] : guarded) {
    std::vector<std::uint8_t> got(bytes + 2 * kGuard);
    device.copy(got.data(), memory, got.size(), stream);
    device.synchronize(stream);
    auto untouched = [](auto from, auto to) { return std::all_of(from, to, [](std::uint8_t b) { return b == 0xCD; }); };
    CHECK_MESSAGE(untouched(got.begin(), got.begin() + kGuard), "written before a result or the workspace");
    CHECK_MESSAGE(untouched(got.end() - kGuard, got.end()), "written behind a result or the workspace");
    const bool is_workspace = memory == guarded.back().first;
    if (!is_workspace) results.insert(results.end(), got.begin() + kGuard, got.end() - kGuard);
  }
  return results;
}

}  // namespace

TEST_CASE("attention on Hopper has a sequence's bits in any batch, on any number of multiprocessors") {
  DevicePair pair = open_pair();
  if (!runs_hopper_kernels(pair)) return;
  auto compare_bits = [&](AttentionShape s, bool gradient) {
    CAPTURE(gradient);
    CAPTURE(s.head_dim);
    CAPTURE(s.causal);
    CAPTURE(s.documents);
    CAPTURE(s.window);
    CAPTURE(s.sequence);
    s.scale = 0.1f;
    if (!affordable(s.tokens() * s.head_dim, 2 * s.tokens() * s.packed() * s.sequence)) return;
    const std::vector<std::uint8_t> all = hopper_results(*pair.gpu, s, gradient, 0, 132);
    CHECK_MESSAGE(hopper_results(*pair.gpu, s, gradient, 0, 5) == all, "on 5 multiprocessors");
    const std::size_t first = gradient ? 0 : static_cast<std::size_t>(s.tokens() * s.width()) * 2;  // bytes of y
    const auto batch = static_cast<std::size_t>(s.batch);
    s.batch = 1;
    const std::vector<std::uint8_t> last = hopper_results(*pair.gpu, s, gradient, 2, 132);
    auto equal = [&](std::size_t of_last, std::size_t of_all, std::size_t bytes) {
      return std::equal(last.begin() + static_cast<std::ptrdiff_t>(of_last),
                        last.begin() + static_cast<std::ptrdiff_t>(of_last + bytes),
                        all.begin() + static_cast<std::ptrdiff_t>(of_all));
    };
    const std::size_t y = first / batch, rest = last.size() - y;  // of the last sequence: y, and the bytes behind it
    CHECK_MESSAGE(equal(0, first - y, y), "y alone");
    CHECK_MESSAGE(equal(y, all.size() - rest, rest), "alone");
  };
  for (std::int64_t head_dim : {64, 128})
    for (std::int64_t sequence : {1, 63, 200, 1024}) {
      AttentionShape s{.batch = 3, .sequence = sequence, .heads = 4, .kv_heads = 2, .head_dim = head_dim};
      for (bool causal : {true, false}) {
        s.causal = causal;
        compare_bits(s, true);
      }
      s.causal = true;
      for (bool documents : {true, false}) {
        s.documents = documents;
        s.window = documents ? 0 : 50;
        for (bool gradient : {true, false}) compare_bits(s, gradient);
      }
    }
}

TEST_CASE("plans know which attention runs on Hopper's tensor cores, and that it needs little scratch") {
  CudaTraits h100;
  AttentionShape s{.batch = 32, .sequence = 1024, .heads = 14, .kv_heads = 2, .head_dim = 64};
  constexpr AttentionPass kForward = AttentionPass::forward, kGradient = AttentionPass::gradient;
  CHECK_FALSE(wgmma_takes(s, kGradient, h100));  // a build without code for sm_90a
  h100.wgmma = true;
  CHECK(wgmma_takes(s, kGradient, h100));
  CHECK_FALSE(wgmma_takes(s, kForward, h100));  // whole sequences are cuDNN's
  for (auto change : std::initializer_list<void (*)(AttentionShape&)>{[](AttentionShape& s) { s.documents = true; },
                                                                      [](AttentionShape& s) { s.window = 100; }}) {
    AttentionShape ranges = s;
    change(ranges);
    CHECK(wgmma_takes(ranges, kForward, h100));
    CHECK(wgmma_takes(ranges, kGradient, h100));
    if (has_hopper_kernels()) CHECK(hopper_kernels().attention_workspace(ranges) < std::size_t{1} << 20);
  }
  if (has_hopper_kernels()) CHECK(hopper_kernels().attention_grad_workspace(s) < std::size_t{4} << 20);
  for (auto change : std::initializer_list<void (*)(AttentionShape&)>{
           [](AttentionShape& s) { s.head_dim = 96; }, [](AttentionShape& s) { s.dtype = DType::f32; },
           [](AttentionShape& s) { s.cap = 50; }, [](AttentionShape& s) { s.scale = 0; },
           [](AttentionShape& s) { s.sequence = std::int64_t{1} << 22; }}) {
    AttentionShape other = s;
    change(other);
    CHECK_FALSE(wgmma_takes(other, kGradient, h100));
    other.documents = true;
    CHECK_FALSE(wgmma_takes(other, kForward, h100));
  }
}

TEST_CASE("the op runs on Hopper's tensor cores where it can, and otherwise by its option, as its scratch shows") {
  if (!has_hopper_kernels()) {
    MESSAGE("skipped: no code for sm_90a");
    return;
  }
  const AttentionShape s{.batch = 2, .sequence = 128, .heads = 4, .kv_heads = 2, .head_dim = 64};
  auto scratch = [&](const char* attention, std::int64_t chunk, bool documents) {
    CudaOptions options;
    options.assume = "H100";
    options.attention = attention;
    const Operand stream{DType::bf16, {s.tokens(), s.width()}, true, false},
        packed{DType::bf16, {s.tokens(), s.packed()}, true, false};
    Operand starts;
    if (documents) starts = {DType::i32, {s.tokens() + 1}, true, false};
    OpInstance op{"attention_grad",
                  {stream, packed, stream, {DType::f32, {s.tokens(), s.heads}, true, false}, starts},
                  {packed},
                  {{"heads", s.heads},
                   {"kv_heads", s.kv_heads},
                   {"head_dim", s.head_dim},
                   {"mask", std::string("causal")},
                   {"scale", 0.125}},
                  {s.batch, s.sequence}};
    if (chunk > 0) op.attributes.set("chunk", chunk);
    const OpSupport support = CudaDevice(options).query(op);
    CHECK(support.refusal == "");
    return support.workspace_bytes;
  };
  const std::size_t hopper = hopper_kernels().attention_grad_workspace(s);
  CHECK(scratch("auto", 0, false) == hopper);
  CHECK(scratch("auto", 1, false) != hopper);
  CHECK(scratch("auto", 0, true) > hopper);  // ranges as well
  CHECK(scratch("auto", 0, true) < hopper + (1 << 14));
  CHECK(scratch("cudnn", 0, false) != hopper);
  CHECK(scratch("own", 0, false) == own_attention_grad_workspace(s));
}
