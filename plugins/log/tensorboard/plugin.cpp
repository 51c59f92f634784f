#include "quern/plugin.h"
#include "tensorboard_sink.h"

QUERN_PLUGIN("log", "tensorboard", manifest) {
  manifest.version = "0.1.0";
  manifest.licence = "Apache-2.0";
  manifest.add<quern::LogSink>(
      "tensorboard", "TensorBoard event files in the run's directory", {},
      [](const quern::OptionValues&) { return std::make_unique<quern::tensorboard::TensorboardSink>(); });
}
