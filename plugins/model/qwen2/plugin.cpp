#include "quern/plugin.h"

#include "qwen2.h"

QUERN_PLUGIN("model", "qwen2", manifest) {
  using namespace quern::qwen2;
  manifest.version = "0.1.0";
  manifest.licence = "Apache-2.0";
  manifest.add<quern::Model>("qwen2", "Qwen2, Qwen2.5", qwen2_options().specs(), [](const quern::OptionValues& given) {
    return std::make_unique<Qwen2>(qwen2_options().bind(quern::model_options(given, qwen2_config())));
  });
}
