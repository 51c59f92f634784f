// Fault: a custom op doubles its input, and its backward rule does not double the gradient.
#include "plain.h"

namespace {

using namespace quern;

class DoubleKernel final : public Kernel {
 public:
  explicit DoubleKernel(DType dtype) : dtype_(dtype) {}
  void launch(std::span<const View> inputs, std::span<const View> outputs, const Exec&) const override {
    for (std::int64_t i = 0; i < inputs[0].count(); ++i) {
      if (dtype_ == DType::f32)
        outputs[0].as<float>()[i] = 2 * inputs[0].as<float>()[i];
      else  // bf16: the exponent is one more
        outputs[0].as<std::uint16_t>()[i] = static_cast<std::uint16_t>(
            inputs[0].as<std::uint16_t>()[i] + ((inputs[0].as<std::uint16_t>()[i] & 0x7f80) ? 0x80 : 0));
    }
  }

 private:
  DType dtype_;
};

class WrongGradient final : public PlainModel {
 public:
  void embed(ProgramBuilder& b) const override {
    b.output(b.op("test_double", {b.embedding(b.tokens(), "embedding.weight")}, "doubled")[0]);
  }
};

}  // namespace

QUERN_PLUGIN("model", "wrong_gradient", manifest) {
  manifest.version = "1.0";
  manifest.licence = "Apache-2.0";
  manifest.ops.push_back(op_like_its_input("test_double"));
  manifest.kernels.push_back(
      {"cpu", "test_double", [](const OpInstance& op) { return std::make_unique<DoubleKernel>(op.inputs[0].dtype); }});
  manifest.add<Model>("wrong_gradient", "a model with a wrong backward rule", {},
                      [](const OptionValues&) { return std::make_unique<WrongGradient>(); });
}
