#include "quern/plugin.h"

#include "llama.h"

QUERN_PLUGIN("model", "llama", manifest) {
  using namespace quern::llama;
  manifest.version = "0.1.0";
  manifest.licence = "Apache-2.0";
  manifest.add<quern::Model>(
      "llama", "Llama 2, 3, 3.1, 3.2", llama_options().specs(), [](const quern::OptionValues& given) {
        return std::make_unique<Llama>(llama_options().bind(quern::model_options(given, llama_config())));
      });
}
