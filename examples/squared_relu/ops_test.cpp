// The kernels, called as a device calls them, with outputs poisoned first; the gradient against finite differences.
#include "ops.h"

#include <doctest/doctest.h>

#include "quern/testkit/compare.h"
#include "quern/testkit/model_conformance.h"
#include "squared_relu.h"

using namespace quern;
using testkit::PoisonedTensor;

namespace {

std::vector<float> run(const std::string& kind, const std::vector<PoisonedTensor>& inputs) {
  Manifest manifest;
  squared_relu::add_ops(manifest);
  OpInstance op{.kind = kind};
  std::vector<View> in;
  for (const PoisonedTensor& input : inputs) {
    in.push_back(input.view());
    op.inputs.push_back({input.view().dtype, input.view().extents, true});
  }
  PoisonedTensor out(in[0].dtype, in[0].extents);
  op.outputs = {op.inputs[0]};
  for (const CustomKernel& kernel : manifest.kernels)
    if (kernel.op == kind) kernel.factory(op)->launch(in, std::vector<View>{out.view()}, {});
  return out.floats();
}

}  // namespace

TEST_CASE("squared_relu squares positive values") {
  PoisonedTensor x(DType::f32, {5}, std::vector<float>{-2, -0.0f, 0.5f, 1, 3});
  CHECK(testkit::mismatch(run("squared_relu", {x}), std::vector<float>{0, 0, 0.25f, 1, 9}, 0) == "");
}

TEST_CASE("its gradient is its slope") {
  const Extents size = {3, 17};
  const std::vector<float> x = testkit::random_normal(51, 1), dy = testkit::random_normal(51, 2);
  std::vector<float> want;
  for (std::size_t i = 0; i < x.size(); ++i) {
    auto y = [](double v) { return v > 0 ? v * v : 0.0; };
    want.push_back(static_cast<float>(dy[i] * (y(x[i] + 1e-4) - y(x[i] - 1e-4)) / 2e-4));
  }
  // The differences are off by up to 1e-4 where an x is that near to 0.
  CHECK(testkit::mismatch(run("squared_relu_grad", {{DType::f32, size, dy}, {DType::f32, size, x}}), want, 1e-5,
                          1e-4) == "");
}

TEST_CASE("the model's programs and parameters agree") {
  squared_relu::Options o;
  o.vocab_size = 11, o.hidden_size = 12, o.intermediate_size = 20, o.num_hidden_layers = 2, o.num_attention_heads = 3;
  Manifest manifest;
  squared_relu::add_ops(manifest);
  for (const std::string& fault : testkit::model_faults(squared_relu::SquaredRelu(o), DType::bf16, manifest.ops))
    FAIL_CHECK(fault);
}
