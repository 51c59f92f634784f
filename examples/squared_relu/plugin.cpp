#include "quern/plugin.h"

#include "ops.h"
#include "squared_relu.h"

QUERN_PLUGIN("model", "squared_relu", manifest) {
  namespace here = squared_relu;
  manifest.version = "0.1.0";
  manifest.licence = "Apache-2.0";
  here::add_ops(manifest);
  manifest.add<quern::Model>(
      "squared_relu", "Llama with squared ReLU for SwiGLU, an op of this plugin", here::hf_model().options,
      [](const quern::OptionValues& given) {
        return std::make_unique<here::SquaredRelu>(here::options().bind(quern::model_options(given, here::hf_model())));
      });
}
