#include "shared/eight_bit/recipe.h"

#include <algorithm>
#include <utility>

#include "quern/block_scales.h"
#include "quern/error.h"
#include "quern/quantized_format.h"
#include "quern/step_state.h"

namespace quern::eight_bit {

namespace {

bool lists(const std::vector<std::string>& list, const char* name) {
  return std::find(list.begin(), list.end(), name) != list.end();
}

const char* name_of(Product product) {
  switch (product) {
    case Product::output: return "output";
    case Product::input_gradient: return "input_gradient";
    case Product::weight_gradient: return "weight_gradient";
    case Product::loss: return "loss";
  }
  return "";
}

void check_products(const char* option, const std::vector<std::string>& list) {
  const std::vector<std::string> known = {"output", "input_gradient", "weight_gradient"};
  for (const std::string& name : list)
    if (std::find(known.begin(), known.end(), name) == known.end())
      throw Error(ErrorCode::config, {.where = std::string("option ") + option + " of the precision backend",
                                      .what = "unknown matmul",
                                      .found = name,
                                      .expected = "output, input_gradient or weight_gradient",
                                      .next = "correct the name"});
}

}  // namespace

Recipe::Recipe(const Formats& formats, RecipeOptions options) : formats_(formats), options_(std::move(options)) {
  check_products("products", options_.products);
  check_products("fast_accumulation", options_.fast_accumulation);
  check_products("head_fast_accumulation", options_.head_fast_accumulation);
  auto scaling = [](const std::string& name) {
    if (name == "block") return Scaling::block;
    if (name == "square") return Scaling::square;
    return name == "row" ? Scaling::row : name == "current" ? Scaling::current : Scaling::delayed;
  };
  activation_ = scaling(options_.activation_scaling);
  gradient_ = scaling(options_.gradient_scaling);
  traits_ = {
      .activation = DType::bf16, .working = DType::bf16, .matmul = quantized_format_named(formats.activation)->dtype};
}

void Recipe::lower(const ProductSite& site, Lowering& lowering) const {
  if (site.product == Product::loss) return lower_loss(site, lowering);
  if (!lists(options_.products, name_of(site.product))) return lower_to_matmul(site, lowering);
  switch (site.product) {
    case Product::output: return lower_output(site, lowering);
    case Product::input_gradient: return lower_input_gradient(site, lowering);
    default: return lower_weight_gradient(site, lowering);
  }
}

Attributes Recipe::format_of_gradient() const {
  Attributes format = format_of(formats_.gradient);
  if (options_.gradient_rounding == "stochastic") format.set("stochastic", std::int64_t{1});
  return format;
}

// Evaluation leaves no trace in the histories, so there a delayed scale is a current one.
Recipe::Codes Recipe::quantized(ValueId x, Attributes attributes, Scaling scaling, Lowering& lowering) const {
  std::string name = lowering.program()[x].name + "." + attributes.word("format");
  if (scaling == Scaling::row) {
    std::vector<ValueId> made = lowering.emit("quantize_rows", {x}, std::move(attributes), name);
    return {made[0], made[1]};
  }
  if (of_blocks(scaling)) {
    const char* kind = scaling == Scaling::square ? "quantize_squares" : "quantize_blocks";
    std::vector<ValueId> made = lowering.emit(kind, {x}, std::move(attributes), name);
    return {made[0], made[1], made[2], made[3]};
  }
  if (scaling == Scaling::current || !lowering.training()) {
    std::vector<ValueId> made = lowering.emit("quantize", {x}, std::move(attributes), name);
    return {made[0], made[1], made[2], made[1]};
  }
  attributes.set("history", options_.history);
  attributes.set("margin", options_.margin);
  ValueId state = lowering.state({.name = name + ".state",
                                  .dtype = DType::f32,
                                  .extents = {kScaleStateWords + options_.history},
                                  .advance = "advance_scale",
                                  .attributes = attributes});
  std::vector<ValueId> made = lowering.emit("quantize_delayed", {x, state}, std::move(attributes), name);
  return {made[0], made[1], made[2], made[1]};
}

// Transposed, with a scale for each channel, which does not vary along the tokens that are summed over.
Recipe::Codes Recipe::by_columns(ValueId x, Attributes format, Lowering& lowering) const {
  std::string name = lowering.program()[x].name + "." + format.word("format") + ".channels";
  std::vector<ValueId> made = lowering.emit("quantize_columns", {x}, std::move(format), name);
  return {kNoValue, kNoValue, made[0], made[1]};
}

// The weight for y = x W^T or, transposed, for dx = dy W: the same quantized values, with one scale for all or square
// blocks of scales; but with one scale a row, over which the other form contracts, separate ones.
Recipe::Codes Recipe::weight(const ProductSite& site, Scaling scaling, Lowering& lowering) const {
  Attributes attributes = format_of(formats_.weight);
  auto copy = [&](const char* kind) { return lowering.working_copy(site.parameter, kind, attributes); };
  if (scaling == Scaling::row) {
    const bool rows = site.product == Product::output;
    std::vector<ValueId> made = copy(rows ? "quantize_rows" : "quantize_columns");
    return rows ? Codes{made[0], made[1]} : Codes{kNoValue, kNoValue, made[0], made[1]};
  }
  if (of_blocks(scaling)) attributes.set("square", std::int64_t{1});
  std::vector<ValueId> made = copy(of_blocks(scaling) ? "quantize_blocks" : "quantize");
  return {made[0], made[1], made[2], of_blocks(scaling) ? made[3] : made[1]};
}

void Recipe::lower_output(const ProductSite& site, Lowering& lowering) const {
  Codes x = quantized(site.x, format_of(formats_.activation), activation_, lowering);
  Codes w = weight(site, activation_, lowering);
  produce(site.product, activation_, x.rows, w.rows, site.bias, x.scale, w.scale, lowering);
}

void Recipe::lower_input_gradient(const ProductSite& site, Lowering& lowering) const {
  Codes dy = quantized(site.dy, format_of_gradient(), gradient_, lowering);
  Codes w = weight(site, gradient_, lowering);
  if (options_.transposed_weights == "made" && gradient_ != Scaling::row)
    w.transposed = lowering.emit("transpose", {w.rows}, {}, std::string(site.parameter) + ".transposed")[0];
  produce(site.product, gradient_, dy.rows, w.transposed, kNoValue, dy.scale, w.transposed_scale, lowering);
}

void Recipe::lower_weight_gradient(const ProductSite& site, Lowering& lowering) const {
  // Operands of one kind of scale go together; else, those with scales for parts are quantized anew, with one.
  const Scaling both = activation_ == gradient_ ? activation_ : Scaling::current;
  auto operand = [&](ValueId value, Attributes format, Scaling own) {
    if (both == Scaling::row) return by_columns(value, std::move(format), lowering);
    return quantized(value, std::move(format), of_blocks(both) ? both : one_scale(own), lowering);
  };
  Codes dy = operand(site.dy, format_of_gradient(), gradient_);
  Codes x = operand(site.x, format_of(formats_.kept_activation), activation_);
  produce(site.product, both, dy.transposed, x.transposed, kNoValue, dy.transposed_scale, x.transposed_scale, lowering);
}

void Recipe::lower_loss(const ProductSite& site, Lowering& lowering) const {
  if (options_.head == "bf16") return;
  // e5m2 operands cannot be multiplied with each other, and the gradients may be e5m2.
  Codes x = quantized(site.x, format_of(formats_.kept_activation), one_scale(activation_), lowering);
  Codes w = weight(site, Scaling::current, lowering);
  Attributes attributes = site.op->attributes;
  if (lowering.training()) attributes.set("gradient_format", options_.head_gradient_format);
  for (const char* product : {"output", "input_gradient", "weight_gradient"})
    attributes.set(std::string("fast_") + product, std::int64_t{lists(options_.head_fast_accumulation, product)});
  std::vector<ValueId> inputs = site.op->inputs;
  inputs.resize(3);
  inputs[1] = kNoValue;
  for (ValueId id : {x.rows, x.scale, lowering.training() ? x.transposed : kNoValue, w.rows, w.scale,
                     lowering.training() ? w.transposed : kNoValue})
    inputs.push_back(id);
  lowering.produce(site.op->kind, std::move(inputs), std::move(attributes));
}

void Recipe::produce(Product product, Scaling scaling, ValueId a, ValueId b, ValueId bias, ValueId scale_a,
                     ValueId scale_b, Lowering& lowering) const {
  Attributes attributes{{"transpose_a", std::int64_t{0}},
                        {"transpose_b", std::int64_t{1}},
                        {"fast_accumulation", std::int64_t{lists(options_.fast_accumulation, name_of(product))}}};
  if (of_blocks(scaling)) attributes.set("scale_rows_b", product == Product::weight_gradient ? 1 : kScaleBlock);
  if (scaling == Scaling::square) attributes.set("square_scales", std::int64_t{1});
  lowering.produce("matmul", {a, b, bias, scale_a, scale_b}, std::move(attributes));
}

}  // namespace quern::eight_bit
