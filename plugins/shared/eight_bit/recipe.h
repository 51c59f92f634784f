#pragma once
// What the 8-bit backends share: how a linear's matmuls are lowered to quantized operands, under a choice of formats
// and scales. The backends e4m3, e5m2 and int8 differ in formats, options and defaults only. Matmuls whose operands
// are both quantized have the form that tensor cores take, y = a b^T with the inner dimension contiguous in both, so
// input gradients read a transposed weight and weight gradients the transposed operands.

#include <string>
#include <vector>

#include "quern/options.h"
#include "quern/precision.h"

namespace quern::eight_bit {

/// Formats of the operands, of quern/quantized_format.h.
struct Formats {
  std::string activation = "e4m3";
  std::string kept_activation = "e4m3";  ///< of the weight gradient's operand
  std::string weight = "e4m3";
  std::string gradient = "e4m3";
  static Formats all(const std::string& format) { return {format, format, format, format}; }
};

struct RecipeOptions {
  std::string activation_scaling = "delayed";
  std::string gradient_scaling = "delayed";
  std::string gradient_rounding = "nearest";  ///< stochastic: integers with row scales only
  std::int64_t history = 4;
  std::int64_t margin = 0;
  std::vector<std::string> products = {"output", "input_gradient", "weight_gradient"};
  std::vector<std::string> fast_accumulation = {"output", "input_gradient", "weight_gradient"};
  std::string head = "quantized";
  std::string head_gradient_format = "e5m2";
  std::vector<std::string> head_fast_accumulation = {"output"};
  std::string transposed_weights = "auto";
};

/// Adds the option `products` to a table of a struct derived from RecipeOptions.
template <class T>
void add_products_option(OptionTable<T>& table) {
  table.add("products", &RecipeOptions::products,
            "matmuls with quantized operands: output, input_gradient, weight_gradient; others read bf16");
}

/// Options of integers, with a scale for each row along k.
struct IntegerOptions : RecipeOptions {
  IntegerOptions() {
    activation_scaling = gradient_scaling = "row";
    fast_accumulation = head_fast_accumulation = {};
    head = "bf16";
  }
};

template <class T = IntegerOptions>
OptionTable<T> integer_options() {
  OptionTable<T> table;
  add_products_option(table);
  table
      .add("gradient_rounding", &RecipeOptions::gradient_rounding,
           "rounding of gradients; stochastic has no bias, and its random bits depend on the value and its index, so "
           "runs repeat bit for bit")
      .one_of({"nearest", "stochastic"});
  return table;
}

/// Adds the options of the floating-point formats.
template <class T>
void add_float8_options(OptionTable<T>& table) {
  const std::vector<std::string> scalings = {"delayed", "current", "row", "block", "square"};
  table
      .add("activation_scaling", &RecipeOptions::activation_scaling,
           "scale of activations: delayed (one a tensor, from the amax of past steps), current (one a tensor, from its "
           "own amax: one more pass), row (one a token, or a channel for weight gradients), block (1 x 128 along the "
           "contracted dimension, 128 x 128 tiles of weights) or square (128 x 128 tiles)")
      .one_of(scalings);
  table.add("gradient_scaling", &RecipeOptions::gradient_scaling, "scale of gradients, likewise").one_of(scalings);
  table.add("history", &RecipeOptions::history, "steps whose amax a delayed scale covers").at_least(1).at_most(1024);
  table.add("margin", &RecipeOptions::margin, "powers of two by which a delayed scale exceeds the scale of its history")
      .at_least(0)
      .at_most(8);
  add_products_option(table);
  table.add("fast_accumulation", &RecipeOptions::fast_accumulation,
            "quantized matmuls of transformer blocks whose accumulators may have fewer bits, if the hardware offers "
            "it, likewise");
  table.add("head", &RecipeOptions::head, "the LM head's matmuls: quantized, with one scale a tensor, or bf16")
      .one_of({"quantized", "bf16"});
  table
      .add("head_gradient_format", &RecipeOptions::head_gradient_format,
           "format of the logits' gradients in a quantized head; their scale is fixed, since they are bounded")
      .one_of({"e4m3", "e5m2"});
  table.add("head_fast_accumulation", &RecipeOptions::head_fast_accumulation,
            "the same for a quantized head; not advised for its gradients, which add thousands of small terms to one "
            "large one");
  table
      .add("transposed_weights", &RecipeOptions::transposed_weights,
           "transposed quantized weights: kept in memory (one byte a parameter), or made in each backward pass unless "
           "matmuls can read the weight untransposed; auto: kept if they fit, and with a budget the faster")
      .one_of({"auto", "kept", "made"});
}

class Recipe final : public PrecisionBackend {
 public:
  /// Throws a config error when a list has an unknown name.
  Recipe(const Formats& formats, RecipeOptions options);

  const PrecisionTraits& traits() const override { return traits_; }
  void lower(const ProductSite& site, Lowering& lowering) const override;

 private:
  enum class Scaling { delayed, current, row, block, square };
  static bool of_blocks(Scaling scaling) { return scaling == Scaling::block || scaling == Scaling::square; }
  /// The mode, or where it has scales for parts of a tensor, the one for the whole that is nearest.
  static Scaling one_scale(Scaling scaling) { return scaling == Scaling::delayed ? scaling : Scaling::current; }
  struct Codes {
    ValueId rows = kNoValue, scale = kNoValue;
    ValueId transposed = kNoValue, transposed_scale = kNoValue;
  };
  /// The attributes of a quantization.
  static Attributes format_of(const std::string& format) { return {{"format", format}}; }
  Attributes format_of_gradient() const;
  Codes quantized(ValueId x, Attributes format, Scaling scaling, Lowering& lowering) const;
  Codes by_columns(ValueId x, Attributes format, Lowering& lowering) const;
  Codes weight(const ProductSite& site, Scaling scaling, Lowering& lowering) const;
  void lower_output(const ProductSite& site, Lowering& lowering) const;
  void lower_input_gradient(const ProductSite& site, Lowering& lowering) const;
  void lower_weight_gradient(const ProductSite& site, Lowering& lowering) const;
  void lower_loss(const ProductSite& site, Lowering& lowering) const;
  /// y = a b^T + bias; `scaling` is what both scales are of.
  void produce(Product product, Scaling scaling, ValueId a, ValueId b, ValueId bias, ValueId scale_a, ValueId scale_b,
               Lowering& lowering) const;

  Formats formats_;
  RecipeOptions options_;
  Scaling activation_, gradient_;
  PrecisionTraits traits_;
};

}  // namespace quern::eight_bit
