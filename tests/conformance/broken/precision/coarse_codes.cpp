// Fault: activations become integers up to `largest`, with scales for these, and the op states another format.
#include <cmath>

#include "quern/numeric.h"
#include "quern/options.h"
#include "quern/plugin.h"
#include "quern/quantized_format.h"

namespace {

using namespace quern;

struct Options {
  std::string format = "i8";
  std::int64_t largest = 127;
};

OptionTable<Options> options() {
  OptionTable<Options> t;
  t.add("format", &Options::format, "what the op states");
  t.add("largest", &Options::largest, "of the activations' integers").at_least(1).at_most(127);
  return t;
}

/// coarse_rows(x (N, C)) -> q (N, C) i8, scale (N)
class CoarseRows final : public Kernel {
 public:
  explicit CoarseRows(float largest) : format_{{}, DType::i8, largest} {}
  void launch(std::span<const View> in, std::span<const View> out, const Exec&) const override {
    const std::int64_t rows = in[0].rows(), columns = in[0].columns();
    auto value = [&](std::int64_t i) {
      return in[0].dtype == DType::f32 ? in[0].as<float>()[i] : bf16_to_float(in[0].as<std::uint16_t>()[i]);
    };
    for (std::int64_t row = 0; row < rows; ++row) {
      float amax = 0;
      for (std::int64_t i = row * columns; i < (row + 1) * columns; ++i)
        amax = std::fmax(std::isnan(value(i)) ? INFINITY : amax, std::fabs(value(i)));
      const float scale = format_scale(amax, format_);
      out[1].as<float>()[row] = scale;
      for (std::int64_t i = row * columns; i < (row + 1) * columns; ++i)
        out[0].as<std::int8_t>()[i] =
            std::isnan(scale) ? std::int8_t{0} : static_cast<std::int8_t>(std::nearbyint(value(i) / scale));
    }
  }

 private:
  QuantizedFormat format_;
};

class CoarseCodes final : public PrecisionBackend {
 public:
  explicit CoarseCodes(Options options) : options_(std::move(options)) {}
  const PrecisionTraits& traits() const override { return traits_; }
  void lower(const ProductSite& site, Lowering& lowering) const override {
    if (site.product != Product::output) return lower_to_matmul(site, lowering);
    const Attributes format{{"format", options_.format}};
    Attributes of_rows = format;
    of_rows.set("largest", options_.largest);
    auto x = lowering.emit("coarse_rows", {site.x}, of_rows, lowering.program()[site.x].name + ".coarse");
    auto weight = lowering.working_copy(site.parameter, "quantize_rows", format);
    lowering.produce("matmul", {x[0], weight[0], site.bias, x[1], weight[1]},
                     {{"transpose_a", std::int64_t{0}}, {"transpose_b", std::int64_t{1}}});
  }

 private:
  Options options_;
  PrecisionTraits traits_{.activation = DType::bf16, .working = DType::bf16, .matmul = DType::i8};
};

}  // namespace

QUERN_PLUGIN("precision", "coarse_codes", manifest) {
  manifest.version = "1.0";
  manifest.licence = "Apache-2.0";
  manifest.ops.push_back({.kind = "coarse_rows",
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
  manifest.kernels.push_back({"cpu", "coarse_rows", [](const OpInstance& op) {
                                return std::make_unique<CoarseRows>(
                                    static_cast<float>(op.attributes.integer("largest")));
                              }});
  manifest.add<PrecisionBackend>(
      "coarse_codes", "integers of another format than stated", options().specs(),
      [](const OptionValues& values) { return std::make_unique<CoarseCodes>(options().bind(values)); });
}
