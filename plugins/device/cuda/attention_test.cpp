// Attention and its gradient against the CPU device. Each device's gradient reads its own logsumexp, whose layout is
// the device's business.
#include <cmath>
#include <cstring>

#include "cuda_device.h"
#include "op_comparison.h"
#include "quern/error.h"

using namespace quern;
using namespace quern::cuda;
using testkit::PoisonedTensor;

namespace {

struct Case {
  std::int64_t batch, sequence, heads, kv_heads, head_dim;
  const char* mask = "causal";
  std::vector<std::int32_t> documents = {};  ///< starts, padded here to N + 1
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

Results attend(Device& device, const Case& c, DType dtype) {
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
  auto run = [&](const char* kind, const std::vector<View>& inputs, const std::vector<View>& outputs) {
    OpInstance op{kind, {}, {}, attributes, {c.batch, c.sequence}};
    for (const View& in : inputs) op.inputs.push_back({in.dtype, in.extents, static_cast<bool>(in), false});
    for (const View& out : outputs) op.outputs.push_back({out.dtype, out.extents, true, false});
    OpSupport support = device.query(op);
    REQUIRE(support.refusal == "");
    device.prepare(op)->launch(inputs, outputs, {stream, workspace(support.workspace_bytes)});
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
  Results want = attend(*pair.cpu, c, dtype), got = attend(*pair.gpu, c, dtype), again = attend(*pair.gpu, c, dtype);
  // The tensor cores take probabilities and score gradients as bf16, 2^-9 of each; gradients sum hundreds of these.
  const bool low = dtype == DType::bf16;
  CHECK(testkit::mismatch(got.y.floats(), want.y.floats(), low ? 0x1p-6 : 1e-5, low ? 0.02 : 1e-5) == "");
  CHECK(testkit::mismatch(by_token(got.logsumexp, c), want.logsumexp.floats(), 1e-4, low ? 2e-3 : 1e-5) == "");
  CHECK(testkit::mismatch(got.dqkv.floats(), want.dqkv.floats(), low ? 0x1p-5 : 1e-4, low ? 0.05 : 5e-5) == "");
  CHECK(testkit::relative_error(got.dqkv.floats(), want.dqkv.floats()) < (low ? 0.01 : 1e-5));
  CHECK_MESSAGE(same_bits(got.y, again.y), "a second run gives another y");
  CHECK_MESSAGE(same_bits(got.dqkv, again.dqkv), "a second run gives another dqkv");
}

}  // namespace

TEST_CASE("attention and its gradient by own kernels: fp32, odd sizes, full and document masks") {
  QUERN_GPU_OR_SKIP(pair);
  for (const Case& c :
       {Case{1, 1, 1, 1, 2}, Case{2, 5, 3, 1, 6}, Case{1, 70, 4, 2, 34}, Case{2, 65, 7, 1, 64}, Case{1, 40, 2, 2, 128},
        Case{1, 33, 1, 1, 256}, Case{2, 40, 4, 2, 16, "full"}, Case{2, 64, 4, 2, 64, "causal", {0, 3, 4, 64, 100}},
        Case{2, 50, 2, 1, 32, "full", {0, 20, 50, 99}}, Case{2, 8, 2, 1, 16, "causal", {0, 8}}}) {
    for (DType dtype : {DType::f32, DType::bf16})
      if (dtype == DType::f32 || c.sequence < 64 || !c.documents.empty() || c.head_dim % 8 != 0)
        compare(*pair, c, dtype);
  }
}

TEST_CASE("attention and its gradient through cuDNN") {
  QUERN_GPU_OR_SKIP(pair);
  for (const Case& c : {Case{2, 64, 2, 2, 64}, Case{3, 128, 7, 1, 64}, Case{1, 200, 4, 2, 128}, Case{2, 77, 4, 4, 32},
                        Case{2, 256, 14, 2, 64}, Case{1, 128, 2, 1, 80}, Case{2, 128, 4, 2, 64, "full"}})
    compare(*pair, c, DType::bf16);
}

TEST_CASE("attention in chunks of the batch gives the bits of one chunk") {
  QUERN_GPU_OR_SKIP(pair);
  // 70 sequences of 16 heads need more than a gigabyte of scratch at once; each alone does not.
  Case many{70, 512, 16, 16, 64}, one{1, 512, 16, 16, 64};
  Results all = attend(*pair->gpu, many, DType::bf16), first = attend(*pair->gpu, one, DType::bf16);
  CHECK(std::memcmp(all.y.view().data, first.y.view().data, first.y.view().bytes()) == 0);
  CHECK(std::memcmp(all.dqkv.view().data, first.dqkv.view().data, first.dqkv.view().bytes()) == 0);
}
