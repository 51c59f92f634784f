// int8: matmuls of int8 values with a scale for each row along k, and exact accumulators; ops other than such
// matmuls, and the LM head, stay bf16. The recipe of quantized-training
// (https://github.com/gau-nernst/quantized-training).
#include "quern/plugin.h"
#include "shared/eight_bit/recipe.h"

namespace {

using quern::DType;
using quern::eight_bit::RecipeOptions;

struct Int8Options : RecipeOptions {
  Int8Options() {
    activation_scaling = gradient_scaling = "row";
    fast_accumulation = head_fast_accumulation = {};
    head = "bf16";
  }
};

quern::OptionTable<Int8Options> int8_options() {
  quern::OptionTable<Int8Options> table;
  quern::eight_bit::add_products_option(table);
  table
      .add("gradient_rounding", &RecipeOptions::gradient_rounding,
           "rounding of gradients; stochastic has no bias, and its random bits depend on the value and its index, so "
           "runs repeat bit for bit")
      .one_of({"nearest", "stochastic"});
  return table;
}

}  // namespace

QUERN_PLUGIN("precision", "int8", manifest) {
  manifest.version = "0.1.0";
  manifest.licence = "Apache-2.0";
  manifest.add<quern::PrecisionBackend>(
      "int8", "int8 matmuls with row scales and exact accumulators; the LM head and the rest bf16",
      int8_options().specs(), [](const quern::OptionValues& values) {
        const quern::eight_bit::Formats formats{
            .activation = DType::i8, .kept_activation = DType::i8, .weight = DType::i8, .gradient = DType::i8};
        return std::make_unique<quern::eight_bit::Recipe>(formats, int8_options().bind(values));
      });
}
