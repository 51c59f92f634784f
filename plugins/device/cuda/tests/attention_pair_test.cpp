#include "tests/attention_pair.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>

#include "runtime/cuda_device.h"

namespace quern::cuda {

using testkit::PoisonedTensor;

AttentionResults attend(Device& device, const AttentionCase& c, DType dtype, How how) {
  Stream stream = device.stream(StreamKind::compute);
  std::vector<std::unique_ptr<DeviceBuffer>> buffers;
  auto view = [&](const PoisonedTensor& tensor) {
    View view = tensor.view();
    buffers.push_back(std::make_unique<DeviceBuffer>(device, view.bytes()));
    device.copy(buffers.back()->memory, view.data, view.bytes(), stream);
    device.synchronize(stream);
    view.data = buffers.back()->memory;
    return view;
  };
  auto workspace = [&](std::size_t bytes) {
    buffers.push_back(std::make_unique<DeviceBuffer>(device, bytes));
    device.fill(buffers.back()->memory, 0xFF, bytes, stream);
    return buffers.back()->memory;
  };
  AttentionResults r{{dtype, c.width()}, {DType::f32, {c.tokens(), c.heads}}, {dtype, c.packed()}};
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

namespace {

/// (B, heads, S) as (N, heads).
std::vector<float> by_token(const PoisonedTensor& logsumexp, const AttentionCase& c) {
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

}  // namespace

void compare(DevicePair& pair, const AttentionCase& c, DType dtype, std::int64_t products) {
  CAPTURE(c.label());
  CAPTURE(name_of(dtype));
  if (!pair.open || !affordable(element_count(c.packed()), products)) return;
  AttentionResults want = attend(*pair.cpu, c, dtype), got = attend(*pair.gpu, c, dtype),
                   again = attend(*pair.gpu, c, dtype);
  AttentionResults captured = attend(*pair.gpu, c, dtype, How::captured);
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

}  // namespace quern::cuda
