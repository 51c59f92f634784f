// Weights of the layers in 8, 4 or 2 bits, as matmuls read them: bf16 matmuls of dequantized weights, or int8 matmuls
// with activations in int8 by rows, rounded to nearest or stochastically. Gradients pass the rounding unchanged
// (straight through); their matmuls are bf16 or int8 too. With ternary weights and int8 activations it is BitNet b1.58
// (Ma et al., "The Era of 1-bit LLMs", 2024), with a scale for each row; int8 weights without masters
// (optimizer.master = "none") are as in quantized-training (https://github.com/gau-nernst/quantized-training).
#include <optional>

#include "quern/error.h"
#include "quern/options.h"
#include "quern/plugin.h"
#include "quern/weight_format.h"

namespace {

using namespace quern;

struct LowBitOptions {
  std::string weights = "int8";
  std::string activations = "bf16";
  std::string gradients = "bf16";
};

OptionTable<LowBitOptions> option_table() {
  OptionTable<LowBitOptions> table;
  table
      .add("weights", &LowBitOptions::weights,
           "format of the layers' weights: int8 and ternary (2 bits) with a scale for each row, int4 for each 32 "
           "elements "
           "of a row")
      .one_of({"int8", "int4", "ternary"});
  table
      .add("activations", &LowBitOptions::activations,
           "what they are multiplied with: bf16, which dequantizes the weights for each matmul, or int8 with a scale "
           "for each token, rounded to nearest or stochastically, by the value and its place (not with int4, whose "
           "scales vary along a row)")
      .one_of({"bf16", "int8", "int8_stochastic"});
  table
      .add("gradients", &LowBitOptions::gradients,
           "matmuls of gradients: bf16, or int8 with a scale for each row along k, for which weights are dequantized "
           "and quantized once more, by columns; gradients round to nearest or stochastically")
      .one_of({"bf16", "int8", "int8_stochastic"});
  return table;
}

class LowBit final : public PrecisionBackend {
 public:
  explicit LowBit(const LowBitOptions& options)
      : format_(*weight_format_named(options.weights)),
        activations_(quantization_of(options.activations)),
        gradients_(quantization_of(options.gradients)) {
    if (activations_ && format_.group != 0)
      throw Error(ErrorCode::config,
                  {.where = "precision.low_bit.activations",
                   .what = "int8 matmuls need one scale for a row of weights, and " + options.weights +
                           " has one for each " + std::to_string(format_.group) + " elements",
                   .found = options.activations,
                   .expected = "bf16",
                   .next = "set it to bf16, or weights to int8 or ternary"});
    if (activations_ || gradients_) traits_.matmul = DType::i8;
  }

  const PrecisionTraits& traits() const override { return traits_; }

  void lower(const ProductSite& site, Lowering& lowering) const override {
    if (site.product != Product::loss && !fits(site, lowering)) return lower_to_matmul(site, lowering);
    switch (site.product) {
      case Product::output: return activations_ ? lower_int8_output(site, lowering) : lower_output(site, lowering);
      case Product::input_gradient: {
        const ValueId weight = dequantized(site, "input_gradient", lowering);
        if (!gradients_) return lowering.produce("matmul", {site.dy, weight}, layout(0, 0));
        const Quantized dy = by_rows(site.dy, *gradients_, lowering);
        const Quantized w = by_columns(weight, std::string(site.parameter), nearest(), lowering);
        return lowering.produce("matmul", {dy.q, w.q, kNoValue, dy.scale, w.scale}, layout(0, 1));
      }
      case Product::weight_gradient: {
        if (gradients_) {
          const Program& program = lowering.program();
          const Quantized dy = by_columns(site.dy, program[site.dy].name, *gradients_, lowering);
          const Quantized x = by_columns(site.x, program[site.x].name, activations_.value_or(nearest()), lowering);
          return lowering.produce("matmul", {dy.q, x.q, kNoValue, dy.scale, x.scale}, layout(0, 1));
        }
        if (!activations_) return lower_to_matmul(site, lowering);
        const auto [q, scale] = by_rows(site.x, *activations_, lowering);
        const ValueId read = lowering.emit("dequantize_weights", {q, scale},
                                           {{"format", std::string("int8")}, {"dtype", std::string("bf16")}},
                                           lowering.program()[site.x].name + ".read")[0];
        return lowering.produce("matmul", {site.dy, read}, layout(1, 0));
      }
      case Product::loss: return;  // the LM head stays in bf16
    }
  }

 private:
  static Attributes nearest() { return {{"format", std::string("i8")}}; }
  /// The attributes of values in int8.
  static std::optional<Attributes> quantization_of(const std::string& option) {
    if (option == "bf16") return std::nullopt;
    Attributes attributes = nearest();
    if (option == "int8_stochastic") attributes.set("stochastic", std::int64_t{1});
    return attributes;
  }
  static Attributes layout(std::int64_t transpose_a, std::int64_t transpose_b) {
    return {{"transpose_a", transpose_a}, {"transpose_b", transpose_b}};
  }

  /// Other weights stay in bf16.
  bool fits(const ProductSite& site, const Lowering& lowering) const {
    const ValueId row = site.product == Product::weight_gradient ? site.x : site.weight;
    const Shape& shape = lowering.program()[row].shape;
    return shape.empty() || format_.takes(shape.back().fixed);
  }

  /// Values and scales.
  struct Quantized {
    ValueId q, scale;
  };

  Quantized weight(const ProductSite& site, Lowering& lowering) const {
    const std::vector<ValueId> made =
        lowering.working_copy(site.parameter, "quantize_weights", {{"format", std::string(format_.name)}});
    return {made[0], made[1]};
  }

  static Quantized by_rows(ValueId x, const Attributes& attributes, Lowering& lowering) {
    const std::vector<ValueId> made =
        lowering.emit("quantize_rows", {x}, attributes, lowering.program()[x].name + ".i8");
    return {made[0], made[1]};
  }

  /// Transposed.
  static Quantized by_columns(ValueId x, const std::string& name, const Attributes& attributes, Lowering& lowering) {
    const std::vector<ValueId> made = lowering.emit("quantize_columns", {x}, attributes, name + ".i8.channels");
    return {made[0], made[1]};
  }

  /// In bf16, for one matmul.
  ValueId dequantized(const ProductSite& site, const char* use, Lowering& lowering) const {
    const auto [q, scale] = weight(site, lowering);
    return lowering.emit(
        "dequantize_weights", {q, scale},
        {{"format", std::string(format_.name)}, {"dtype", std::string("bf16")}, {"use", std::string(use)}},
        std::string(site.parameter) + "." + use)[0];
  }

  void lower_output(const ProductSite& site, Lowering& lowering) const {
    lowering.produce("matmul", {site.x, dequantized(site, "output", lowering), site.bias}, layout(0, 1));
  }

  void lower_int8_output(const ProductSite& site, Lowering& lowering) const {
    const Quantized x = by_rows(site.x, *activations_, lowering), w = weight(site, lowering);
    ValueId integers = w.q;
    if (format_.bits < 8)
      integers = lowering.emit("dequantize_weights", {w.q},
                               {{"format", std::string(format_.name)}, {"dtype", std::string("i8")}},
                               std::string(site.parameter) + ".integers")[0];
    lowering.produce("matmul", {x.q, integers, site.bias, x.scale, w.scale}, layout(0, 1));
  }

  const WeightFormat& format_;
  const std::optional<Attributes> activations_, gradients_;  ///< of int8 matmuls
  PrecisionTraits traits_{.activation = DType::bf16, .working = DType::bf16, .matmul = DType::bf16};
};

}  // namespace

QUERN_PLUGIN("precision", "low_bit", manifest) {
  manifest.version = "0.1.0";
  manifest.licence = "Apache-2.0";
  manifest.add<PrecisionBackend>(
      "low_bit",
      "weights of the layers in 8, 4 or 2 bits, matmuls in bf16 or int8; BitNet b1.58 is one of its settings",
      option_table().specs(),
      [](const OptionValues& values) { return std::make_unique<LowBit>(option_table().bind(values)); });
}
