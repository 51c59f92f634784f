// e4m3: activations and weights in e4m3, gradients in e4m3 or e5m2; ops other than matmuls stay bf16.
#include "quern/plugin.h"
#include "shared/eight_bit/recipe.h"

namespace {

struct E4m3Options : quern::eight_bit::RecipeOptions {
  std::string gradient_format = "e4m3";
};

quern::OptionTable<E4m3Options> e4m3_options() {
  quern::OptionTable<E4m3Options> table;
  table.add("gradient_format", &E4m3Options::gradient_format, "format of gradients as operands")
      .one_of({"e4m3", "e5m2"});
  quern::eight_bit::add_float8_options(table);
  return table;
}

}  // namespace

QUERN_PLUGIN("precision", "e4m3", manifest) {
  manifest.version = "0.1.0";
  manifest.licence = "Apache-2.0";
  manifest.add<quern::PrecisionBackend>(
      "e4m3", "8-bit matmuls: activations and weights e4m3, gradients e4m3 or e5m2; the rest bf16",
      e4m3_options().specs(), [](const quern::OptionValues& values) {
        E4m3Options options = e4m3_options().bind(values);
        quern::eight_bit::Formats formats;
        formats.gradient = options.gradient_format;
        return std::make_unique<quern::eight_bit::Recipe>(formats, options);
      });
}
