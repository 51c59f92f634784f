#include "quern/plugin.h"

#include "images.h"

QUERN_PLUGIN("data", "images", manifest) {
  using namespace quern;
  manifest.version = "0.1.0";
  manifest.licence = "Apache-2.0";
  manifest.add<Dataset>(
      "images", "folders of PNG and JPEG images, one for each class", images::options().specs(),
      [](const OptionValues& values) { return std::make_unique<images::Images>(images::options().bind(values)); });
}
