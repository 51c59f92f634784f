// int4: as int8, with integers from -7 to 7. They are one in a byte and int8 matmuls multiply them, so it has the
// accuracy of int4 matmuls and the memory and speed of int8. The recipe of quantized-training's INT4 mixed precision
// (https://github.com/gau-nernst/quantized-training).
#include "quern/plugin.h"
#include "shared/eight_bit/recipe.h"

namespace {

/// Of 15 values, rounding to nearest loses most of a gradient.
struct Int4Options : quern::eight_bit::IntegerOptions {
  Int4Options() { gradient_rounding = "stochastic"; }
};

}  // namespace

QUERN_PLUGIN("precision", "int4", manifest) {
  manifest.version = "0.1.0";
  manifest.licence = "Apache-2.0";
  manifest.add<quern::PrecisionBackend>(
      "int4", "matmuls of 4-bit integers with row scales, by int8 matmuls; the LM head and the rest bf16",
      quern::eight_bit::integer_options<Int4Options>().specs(), [](const quern::OptionValues& values) {
        return std::make_unique<quern::eight_bit::Recipe>(
            quern::eight_bit::Formats::all("i4"), quern::eight_bit::integer_options<Int4Options>().bind(values));
      });
}
