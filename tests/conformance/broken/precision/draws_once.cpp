// Fault: int8 activations are rounded up or down by chance, with one draw for all elements of a row (`draws` = "row"),
// or always up ("none").
#include <cmath>

#include "quern/numeric.h"
#include "quern/options.h"
#include "quern/plugin.h"
#include "quern/random.h"

namespace {

using namespace quern;

struct Options {
  std::string draws = "element";
};

OptionTable<Options> options() {
  OptionTable<Options> t;
  t.add("draws", &Options::draws, "what has a draw of its own").one_of({"element", "row", "none"});
  return t;
}

/// drawn_rows(x (N, C)) -> q (N, C) i8, scale (N)
class DrawnRows final : public Kernel {
 public:
  explicit DrawnRows(std::string draws) : draws_(std::move(draws)) {}
  void launch(std::span<const View> in, std::span<const View> out, const Exec&) const override {
    const std::int64_t rows = in[0].rows(), columns = in[0].columns();
    auto value = [&](std::int64_t i) {
      return in[0].dtype == DType::f32 ? in[0].as<float>()[i] : bf16_to_float(in[0].as<std::uint16_t>()[i]);
    };
    for (std::int64_t row = 0; row < rows; ++row) {
      float amax = 0;
      for (std::int64_t i = row * columns; i < (row + 1) * columns; ++i)
        amax = std::fmax(std::isnan(value(i)) ? INFINITY : amax, std::fabs(value(i)));
      const float scale = format_scale(amax, DType::i8);
      out[1].as<float>()[row] = scale;
      for (std::int64_t i = row * columns; i < (row + 1) * columns; ++i) {
        const std::int64_t place = draws_ == "element" ? i : row;
        const std::uint32_t draw =
            draws_ == "none" ? 0 : random_word({3, RandomPurpose::sample, 0}, 0, static_cast<std::uint64_t>(place));
        const float exact = std::isnan(scale) ? 0.0f : value(i) / scale;
        out[0].as<std::int8_t>()[i] =
            static_cast<std::int8_t>(std::fmax(-127.0f, std::fmin(127.0f, to_integer_stochastic(exact, draw))));
      }
    }
  }

 private:
  std::string draws_;
};

class DrawsOnce final : public PrecisionBackend {
 public:
  explicit DrawsOnce(Options options) : options_(std::move(options)) {}
  const PrecisionTraits& traits() const override { return traits_; }
  void lower(const ProductSite& site, Lowering& lowering) const override {
    if (site.product != Product::output) return lower_to_matmul(site, lowering);
    const Attributes format{{"format", std::string("i8")}};
    auto x =
        lowering.emit("drawn_rows", {site.x}, {{"draws", options_.draws}}, lowering.program()[site.x].name + ".i8");
    auto weight = lowering.working_copy(site.parameter, "quantize_rows", format);
    lowering.produce("matmul", {x[0], weight[0], site.bias, x[1], weight[1]},
                     {{"transpose_a", std::int64_t{0}}, {"transpose_b", std::int64_t{1}}});
  }

 private:
  Options options_;
  PrecisionTraits traits_{.activation = DType::bf16, .working = DType::bf16, .matmul = DType::i8};
};

}  // namespace

QUERN_PLUGIN("precision", "draws_once", manifest) {
  manifest.version = "1.0";
  manifest.licence = "Apache-2.0";
  manifest.ops.push_back({.kind = "drawn_rows",
                          .inputs = {"x"},
                          .outputs = {"q", "scale"},
                          .infer =
                              [](InferContext& c) {
                                c.outputs[0].shape = c.inputs[0]->shape;
                                c.outputs[0].dtype = DType::i8;
                                c.outputs[1].shape = {c.inputs[0]->shape[0]};
                                c.outputs[1].dtype = DType::f32;
                              },
                          .quantized =
                              [](const Attributes&) {
                                return std::vector<OpSpec::QuantizedOutput>{{0, 1, "rows"}};
                              }});
  manifest.kernels.push_back({"cpu", "drawn_rows", [](const OpInstance& op) {
                                return std::make_unique<DrawnRows>(op.attributes.word("draws"));
                              }});
  manifest.add<PrecisionBackend>(
      "draws_once", "int8 activations rounded by chance", options().specs(),
      [](const OptionValues& values) { return std::make_unique<DrawsOnce>(options().bind(values)); });
}
