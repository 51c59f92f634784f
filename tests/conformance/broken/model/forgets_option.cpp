// Fault: hf_config() does not have the option that scales the embedding.
#include "plain.h"

namespace {

using namespace quern;

struct Options {
  double scale = 1;
};

OptionTable<Options> options() {
  OptionTable<Options> t;
  t.add("scale", &Options::scale, "factor on the embedding").at_least(0);
  return t;
}

HfModel hf_model() { return {.model_type = "plain", .architecture = "PlainForCausalLM", .options = options().specs()}; }

class ForgetsOption final : public PlainModel {
 public:
  explicit ForgetsOption(const Options& options) : scale_(options.scale) {}
  void embed(ProgramBuilder& b) const override {
    b.output(b.scale(b.embedding(b.tokens(), "embedding.weight"), scale_, "scaled"));
  }

 private:
  double scale_;
};

}  // namespace

QUERN_PLUGIN("model", "forgets_option", manifest) {
  manifest.version = "1.0";
  manifest.licence = "Apache-2.0";
  manifest.add<Model>("forgets_option", "a config.json that lacks an option", hf_model().options,
                      [](const OptionValues& given) {
                        return std::make_unique<ForgetsOption>(options().bind(model_options(given, hf_model())));
                      });
}
