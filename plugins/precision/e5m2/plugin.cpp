// e5m2 wherever the hardware multiplies it: tensor cores take no matmul of two e5m2 operands, so weights, and the
// activations that meet a gradient, are e4m3.
#include "quern/plugin.h"
#include "shared/eight_bit/recipe.h"

namespace {

quern::OptionTable<quern::eight_bit::RecipeOptions> e5m2_options() {
  quern::OptionTable<quern::eight_bit::RecipeOptions> table;
  quern::eight_bit::add_float8_options(table);
  return table;
}

}  // namespace

QUERN_PLUGIN("precision", "e5m2", manifest) {
  manifest.version = "0.1.0";
  manifest.licence = "Apache-2.0";
  manifest.add<quern::PrecisionBackend>(
      "e5m2", "8-bit matmuls: activations and gradients e5m2, weights e4m3; the rest bf16", e5m2_options().specs(),
      [](const quern::OptionValues& values) {
        quern::eight_bit::Formats formats{
            .activation = "e5m2", .kept_activation = "e4m3", .weight = "e4m3", .gradient = "e5m2"};
        return std::make_unique<quern::eight_bit::Recipe>(formats, e5m2_options().bind(values));
      });
}
