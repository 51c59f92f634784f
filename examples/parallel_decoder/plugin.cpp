// The one symbol that quern looks for, and what it says: which implementations this file has, and their options.
#include "quern/plugin.h"

#include "parallel_decoder.h"

QUERN_PLUGIN("model", "parallel_decoder", manifest) {
  namespace here = parallel_decoder;
  manifest.version = "0.1.0";
  manifest.licence = "Apache-2.0";
  manifest.add<quern::Model>("parallel_decoder", "decoder with attention and feed-forward side by side",
                             here::options().specs(), [](const quern::OptionValues& given) {
                               return std::make_unique<here::ParallelDecoder>(
                                   here::options().bind(quern::model_options(given, here::hf_model())));
                             });
}
