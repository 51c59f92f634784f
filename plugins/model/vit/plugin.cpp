#include "quern/plugin.h"

#include "vit.h"

QUERN_PLUGIN("model", "vit", manifest) {
  using namespace quern;
  manifest.version = "0.1.0";
  manifest.licence = "Apache-2.0";
  manifest.add<Model>("vit", "vision transformers (ViT), with timm's names", vit::hf_model().options,
                      [](const OptionValues& given) {
                        return std::make_unique<vit::Vit>(vit::options().bind(model_options(given, vit::hf_model())));
                      });
}
