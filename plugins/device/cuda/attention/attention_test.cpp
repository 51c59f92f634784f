// Attention and its gradient against the CPU device. Each device's gradient reads its own logsumexp, whose layout is
// the device's business.
#include <algorithm>
#include <cmath>
#include <cstring>

#include <cudnn.h>

#include "attention/attention.h"
#include "attention/attention_timing.h"
#include "quern/error.h"
#include "runtime/check.h"
#include "runtime/cuda_device.h"
#include "runtime/hopper_kernels.h"
#include "runtime/timing.h"
#include "tests/device_pair.h"

using namespace quern;
using namespace quern::cuda;
using testkit::PoisonedTensor;

namespace {

struct Case {
  std::int64_t batch, sequence, heads, kv_heads, head_dim;
  const char* mask = "causal";
  std::vector<std::int32_t> documents = {};  ///< starts, padded here to N + 1
  std::int64_t chunk = 0;                    ///< sequences at once, at most; 0: as the device likes
  double sharpness = 1;                      ///< times the usual scale
  std::int64_t window = 0;                   ///< 0: none
  double cap = 0;                            ///< 0: none
  std::int64_t tokens() const { return batch * sequence; }
  Extents packed() const { return {tokens(), (heads + 2 * kv_heads) * head_dim}; }
  Extents width() const { return {tokens(), heads * head_dim}; }
  std::string label() const {
    return to_string(Extents{batch, sequence, heads, kv_heads, head_dim}) + " " + mask +
           (documents.empty() ? "" : ", documents") + (window > 0 ? ", window " + std::to_string(window) : "") +
           (cap > 0 ? ", capped" : "");
  }
};

struct Results {
  PoisonedTensor y, logsumexp, dqkv;
};

class Buffer {
 public:
  Buffer(Device& device, std::size_t bytes) : device_(device), memory(device.allocate(MemoryKind::device, bytes)) {}
  ~Buffer() { device_.release(MemoryKind::device, memory); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

 private:
  Device& device_;

 public:
  void* const memory;
};

enum class How { eager, captured };

Results attend(Device& device, const Case& c, DType dtype, How how = How::eager) {
  Stream stream = device.stream(StreamKind::compute);
  std::vector<std::unique_ptr<Buffer>> buffers;
  auto view = [&](const PoisonedTensor& tensor) {
    View view = tensor.view();
    buffers.push_back(std::make_unique<Buffer>(device, view.bytes()));
    device.copy(buffers.back()->memory, view.data, view.bytes(), stream);
    device.synchronize(stream);
    view.data = buffers.back()->memory;
    return view;
  };
  auto workspace = [&](std::size_t bytes) {
    buffers.push_back(std::make_unique<Buffer>(device, bytes));
    device.fill(buffers.back()->memory, 0xFF, bytes, stream);
    return buffers.back()->memory;
  };
  Results r{{dtype, c.width()}, {DType::f32, {c.tokens(), c.heads}}, {dtype, c.packed()}};
  View qkv = view(normal(dtype, c.packed(), 1)), dy = view(normal(dtype, c.width(), 2));
  View y = view(r.y), logsumexp = view(r.logsumexp), dqkv = view(r.dqkv), documents;
  if (!c.documents.empty()) {
    std::vector<std::int32_t> starts = c.documents;
    starts.resize(static_cast<std::size_t>(c.tokens()) + 1, static_cast<std::int32_t>(c.tokens()));
    documents = view(integer_list(starts));
  }
  Attributes attributes{{"heads", c.heads},
                        {"kv_heads", c.kv_heads},
                        {"head_dim", c.head_dim},
                        {"mask", std::string(c.mask)},
                        {"scale", c.sharpness / std::sqrt(static_cast<double>(c.head_dim))}};
  if (c.chunk > 0) attributes.set("chunk", c.chunk);
  if (c.window > 0) attributes.set("window", c.window);
  if (c.cap > 0) attributes.set("cap", c.cap);
  auto run = [&](const char* kind, const std::vector<View>& inputs, const std::vector<View>& outputs) {
    OpInstance op{kind, {}, {}, attributes, {c.batch, c.sequence}};
    for (const View& in : inputs) op.inputs.push_back({in.dtype, in.extents, static_cast<bool>(in), false});
    for (const View& out : outputs) op.outputs.push_back({out.dtype, out.extents, true, false});
    OpSupport support = device.query(op);
    REQUIRE(support.refusal == "");
    std::unique_ptr<Kernel> kernel = device.prepare(op);
    const Exec exec{stream, workspace(support.workspace_bytes)};
    if (how == How::eager)
      kernel->launch(inputs, outputs, exec);
    else
      device.capture(stream, [&] { kernel->launch(inputs, outputs, exec); })->launch(stream);
    device.synchronize(stream);
  };
  run("attention", {qkv, documents}, {y, logsumexp});
  run("attention_grad", {dy, qkv, y, logsumexp, documents}, {dqkv});
  for (auto [tensor, from] : {std::pair{&r.y, y}, {&r.logsumexp, logsumexp}, {&r.dqkv, dqkv}})
    device.copy(tensor->view().data, from.data, from.bytes(), stream);
  device.synchronize(stream);
  return r;
}

/// (B, heads, S) as (N, heads).
std::vector<float> by_token(const PoisonedTensor& logsumexp, const Case& c) {
  std::vector<float> from = logsumexp.floats(), to(from.size());
  for (std::int64_t token = 0; token < c.tokens(); ++token)
    for (std::int64_t head = 0; head < c.heads; ++head)
      to[static_cast<std::size_t>(token * c.heads + head)] =
          from[static_cast<std::size_t>((token / c.sequence * c.heads + head) * c.sequence + token % c.sequence)];
  return to;
}

bool same_bits(const PoisonedTensor& a, const PoisonedTensor& b) {
  return std::memcmp(a.view().data, b.view().data, a.view().bytes()) == 0;
}

/// `products`: multiplications of tensor cores, for what an emulator can afford; 0 where there are none.
void compare(DevicePair& pair, const Case& c, DType dtype, std::int64_t products = 0) {
  CAPTURE(c.label());
  CAPTURE(name_of(dtype));
  if (!pair.open || !affordable(element_count(c.packed()), products)) return;
  Results want = attend(*pair.cpu, c, dtype), got = attend(*pair.gpu, c, dtype), again = attend(*pair.gpu, c, dtype);
  Results captured = attend(*pair.gpu, c, dtype, How::captured);
  // The tensor cores take probabilities and score gradients as bf16, 2^-9 of each; gradients sum hundreds of these.
  const bool low = dtype == DType::bf16;
  CHECK(testkit::mismatch(got.y.floats(), want.y.floats(), low ? 0x1p-6 : 1e-5, low ? 0.02 : 1e-5) == "");
  CHECK(testkit::mismatch(by_token(got.logsumexp, c), want.logsumexp.floats(), 1e-4, low ? 2e-3 : 1e-5) == "");
  // dq and dk are sums times the scale.
  const double absolute = (low ? 0.05 : 5e-5) * std::max(1.0, c.sharpness);
  CHECK(testkit::mismatch(got.dqkv.floats(), want.dqkv.floats(), low ? 0x1p-5 : 1e-4, absolute) == "");
  CHECK(testkit::relative_error(got.dqkv.floats(), want.dqkv.floats()) < (low ? 0.01 : 1e-5));
  CHECK_MESSAGE(same_bits(got.y, again.y), "a second run gives another y");
  CHECK_MESSAGE(same_bits(got.dqkv, again.dqkv), "a second run gives another dqkv");
  CHECK_MESSAGE(same_bits(got.y, captured.y), "a captured run gives another y");
  CHECK_MESSAGE(same_bits(got.logsumexp, captured.logsumexp), "a captured run gives another logsumexp");
  CHECK_MESSAGE(same_bits(got.dqkv, captured.dqkv), "a captured run gives another dqkv");
}

/// The GPU with that choice of option `attention`.
DevicePair open_pair_by(const char* attention) {
  DevicePair pair = open_pair();
  CudaOptions options;
  options.attention = attention;
  options.matmul_cache = false;
  auto gpu = std::make_unique<CudaDevice>(options);
  if (pair.open) gpu->open(0);
  pair.gpu = std::move(gpu);
  return pair;
}

}  // namespace

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
  std::vector<std::unique_ptr<Buffer>> buffers;
  auto copied = [&](const void* from, std::size_t bytes) {
    buffers.push_back(std::make_unique<Buffer>(device, bytes));
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
    buffers.push_back(std::make_unique<Buffer>(device, bytes + 2 * kGuard));
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
  CHECK_FALSE(wgmma_takes(s, kForward, h100));  // cuDNN is faster
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
  Results want = attend(*pair.gpu, plain, DType::bf16), got = attend(*pair.gpu, documents, DType::bf16);
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
  Results all = attend(*pair.gpu, many, DType::bf16), first = attend(*pair.gpu, one, DType::bf16);
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
