#include "quern/plugin.h"

#include "ops.h"
#include "patch_classifier.h"

QUERN_PLUGIN("model", "patch_classifier", manifest) {
  namespace here = patch_classifier;
  manifest.version = "0.1.0";
  manifest.licence = "Apache-2.0";
  here::add_ops(manifest);
  manifest.add<quern::Model>("patch_classifier", "a vision transformer over patches, one label an image",
                             here::hf_model().options, [](const quern::OptionValues& given) {
                               return std::make_unique<here::PatchClassifier>(
                                   here::options().bind(quern::model_options(given, here::hf_model())));
                             });
}
