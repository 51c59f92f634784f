// Attention and its gradient against the CPU device. Each device's gradient reads its own logsumexp, whose layout is
// the device's business.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "attention.h"
#include "cuda_device.h"
#include "device_pair.h"
#include "quern/error.h"

using namespace quern;
using namespace quern::cuda;
using testkit::PoisonedTensor;

namespace {

struct Case {
  std::int64_t batch, sequence, heads, kv_heads, head_dim;
  const char* mask = "causal";
  std::vector<std::int32_t> documents = {};  ///< starts, padded here to N + 1
  std::int64_t chunk = 0;                    ///< sequences at once, at most; 0: as the device likes
  std::int64_t tokens() const { return batch * sequence; }
  Extents packed() const { return {tokens(), (heads + 2 * kv_heads) * head_dim}; }
  Extents width() const { return {tokens(), heads * head_dim}; }
  std::string label() const {
    return to_string(Extents{batch, sequence, heads, kv_heads, head_dim}) + " " + mask +
           (documents.empty() ? "" : ", documents");
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
                        {"scale", 1 / std::sqrt(static_cast<double>(c.head_dim))}};
  if (c.chunk > 0) attributes.set("chunk", c.chunk);
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

void compare(DevicePair& pair, const Case& c, DType dtype) {
  CAPTURE(c.label());
  CAPTURE(name_of(dtype));
  if (!pair.open) return;
  Results want = attend(*pair.cpu, c, dtype), got = attend(*pair.gpu, c, dtype), again = attend(*pair.gpu, c, dtype);
  Results captured = attend(*pair.gpu, c, dtype, How::captured);
  // The tensor cores take probabilities and score gradients as bf16, 2^-9 of each; gradients sum hundreds of these.
  const bool low = dtype == DType::bf16;
  CHECK(testkit::mismatch(got.y.floats(), want.y.floats(), low ? 0x1p-6 : 1e-5, low ? 0.02 : 1e-5) == "");
  CHECK(testkit::mismatch(by_token(got.logsumexp, c), want.logsumexp.floats(), 1e-4, low ? 2e-3 : 1e-5) == "");
  CHECK(testkit::mismatch(got.dqkv.floats(), want.dqkv.floats(), low ? 0x1p-5 : 1e-4, low ? 0.05 : 5e-5) == "");
  CHECK(testkit::relative_error(got.dqkv.floats(), want.dqkv.floats()) < (low ? 0.01 : 1e-5));
  CHECK_MESSAGE(same_bits(got.y, again.y), "a second run gives another y");
  CHECK_MESSAGE(same_bits(got.dqkv, again.dqkv), "a second run gives another dqkv");
  CHECK_MESSAGE(same_bits(got.y, captured.y), "a captured run gives another y");
  CHECK_MESSAGE(same_bits(got.logsumexp, captured.logsumexp), "a captured run gives another logsumexp");
  CHECK_MESSAGE(same_bits(got.dqkv, captured.dqkv), "a captured run gives another dqkv");
}

}  // namespace

TEST_CASE("attention and its gradient by own kernels: fp32, odd sizes, full and document masks") {
  DevicePair pair = open_pair();
  for (const Case& c :
       {Case{1, 1, 1, 1, 2}, Case{2, 5, 3, 1, 6}, Case{1, 70, 4, 2, 34}, Case{2, 65, 7, 1, 64}, Case{1, 40, 2, 2, 128},
        Case{1, 33, 1, 1, 256}, Case{2, 40, 4, 2, 16, "full"}, Case{2, 65, 4, 2, 64, "causal", {0, 3, 4, 65, 100}},
        Case{2, 50, 2, 1, 32, "full", {0, 20, 50, 99}}, Case{2, 8, 2, 1, 16, "causal", {0, 8}}}) {
    for (DType dtype : {DType::f32, DType::bf16})
      if (dtype == DType::f32 || c.sequence < 64 || !c.documents.empty() || c.head_dim % 8 != 0)
        compare(pair, c, dtype);
  }
}

TEST_CASE("attention and its gradient through cuDNN") {
  DevicePair pair = open_pair();
  for (const Case& c : {Case{2, 64, 2, 2, 64}, Case{3, 128, 7, 1, 64}, Case{1, 200, 4, 2, 128}, Case{2, 77, 4, 4, 32},
                        Case{2, 256, 14, 2, 64}, Case{1, 128, 2, 1, 80}, Case{2, 128, 4, 2, 64, "full"}})
    compare(pair, c, DType::bf16);
}

TEST_CASE("attention within documents through cuDNN: short and long ones") {
  DevicePair pair = open_pair();
  for (const Case& c :
       {Case{2, 128, 7, 1, 64, "causal", {0, 1, 5, 64, 127, 128, 200}},
        Case{3, 256, 14, 2, 64, "causal", {0, 100, 256, 300, 512, 700}},
        Case{1, 200, 4, 2, 128, "causal", {0, 63, 64, 190}}, Case{2, 128, 4, 2, 64, "full", {0, 30, 128, 250}},
        Case{2, 1024, 2, 2, 64, "causal", {0, 3, 515, 1024, 1900}}, Case{2, 128, 4, 2, 64, "causal", {0, 128}}})
    compare(pair, c, DType::bf16);
}

TEST_CASE("documents that fill their rows change attention by no more than rounding") {
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
  CHECK(cudnn_takes(s, h100));
  const std::size_t mask = std::size_t{32} * 1024 * 1024 * 2;
  CHECK(cudnn_attention_workspace(s, AttentionPass::forward) >= mask);
  CHECK(cudnn_attention_workspace(s, AttentionPass::forward) < 2 * mask);
  s.sequence = 1023;
  CHECK_FALSE(cudnn_takes(s, h100));
  s.sequence = 32768;
  CHECK_FALSE(cudnn_takes(s, h100));
  s.documents = false;
  CHECK(cudnn_takes(s, h100));
}

TEST_CASE("attention in chunks of the batch agrees with one sequence alone") {
  DevicePair pair = open_pair();
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
