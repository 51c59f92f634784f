// Fault: the gradient of the scaled embedding lacks the factor, which shows only where an option is not 1.
#include "plain.h"
#include "quern/numeric.h"

namespace {

using namespace quern;

struct Options {
  double power = 1;
};

OptionTable<Options> options() {
  OptionTable<Options> t;
  t.add("power", &Options::power, "factor on the embedding").above(0).at_most(100);
  return t;
}

HfModel hf_model() { return {.model_type = "plain", .architecture = "PlainForCausalLM", .options = options().specs()}; }

class PowerKernel final : public Kernel {
 public:
  explicit PowerKernel(const OpInstance& op)
      : dtype_(op.inputs[0].dtype), factor_(static_cast<float>(op.attributes.real("power"))) {}
  void launch(std::span<const View> in, std::span<const View> out, const Exec&) const override {
    for (std::int64_t i = 0; i < in[0].count(); ++i)
      if (dtype_ == DType::f32)
        out[0].as<float>()[i] = factor_ * in[0].as<float>()[i];
      else
        out[0].as<std::uint16_t>()[i] = float_to_bf16(factor_ * bf16_to_float(in[0].as<std::uint16_t>()[i]));
  }

 private:
  DType dtype_;
  float factor_;
};

class WrongWhenScaled final : public PlainModel {
 public:
  explicit WrongWhenScaled(const Options& options) : o_(options) {}
  void embed(ProgramBuilder& b) const override {
    b.output(b.op("test_power", {b.embedding(b.tokens(), "embedding.weight")}, "scaled", {{"power", o_.power}})[0]);
  }
  std::string hf_config() const override {
    OptionValues fields;
    fields.set("power", o_.power);
    return write_hf_config(hf_model(), fields);
  }

 private:
  Options o_;
};

}  // namespace

QUERN_PLUGIN("model", "wrong_when_scaled", manifest) {
  manifest.version = "1.0";
  manifest.licence = "Apache-2.0";
  manifest.ops.push_back(op_like_its_input("test_power"));
  manifest.kernels.push_back(
      {"cpu", "test_power", [](const OpInstance& op) { return std::make_unique<PowerKernel>(op); }});
  manifest.add<Model>("wrong_when_scaled", "gradients that do not know an option", options().specs(),
                      [](const OptionValues& given) {
                        return std::make_unique<WrongWhenScaled>(options().bind(model_options(given, hf_model())));
                      });
}
