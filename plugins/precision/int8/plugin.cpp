// int8: matmuls of int8 values with a scale for each row along k, and exact accumulators; ops other than such
// matmuls, and the LM head, stay bf16. The recipe of quantized-training
// (https://github.com/gau-nernst/quantized-training).
#include "quern/plugin.h"
#include "shared/eight_bit/recipe.h"

QUERN_PLUGIN("precision", "int8", manifest) {
  manifest.version = "0.1.0";
  manifest.licence = "Apache-2.0";
  manifest.add<quern::PrecisionBackend>(
      "int8", "int8 matmuls with row scales and exact accumulators; the LM head and the rest bf16",
      quern::eight_bit::integer_options().specs(), [](const quern::OptionValues& values) {
        return std::make_unique<quern::eight_bit::Recipe>(quern::eight_bit::Formats::all("i8"),
                                                          quern::eight_bit::integer_options().bind(values));
      });
}
