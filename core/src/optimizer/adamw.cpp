#include "optimizer/adamw.h"

#include <algorithm>

#include "optimizer/optimizers.h"
#include "quern/error.h"

namespace quern {

namespace {

constexpr const char* kMoments[] = {"moment1", "moment2"};
constexpr const char* kScales[] = {"scales1", "scales2"};

OptionTable<AdamWOptions> adamw_options() {
  OptionTable<AdamWOptions> t;
  add_adamw_rule(t);
  t.add("moments", &AdamWOptions::moments,
        "format of both moments; all but fp32 round stochastically, and int8 and e4m3 have a scale for each block of a "
        "row (vectors stay in fp32)")
      .one_of({"fp32", "bf16", "int8", "e4m3"});
  t.add("moment1", &AdamWOptions::moment1, "format of the first moment; empty: as moments")
      .one_of({"", "fp32", "bf16", "int8", "e4m3"});
  t.add("moment2", &AdamWOptions::moment2, "the same for the second moment, whose root is what 8 bits hold")
      .one_of({"", "fp32", "bf16", "int8", "e4m3"});
  t.add("block", &AdamWOptions::block, "elements that share a scale: 128 or 256").at_least(128).at_most(256);
  return t;
}

DType moment_dtype(const std::string& format) {
  if (format == "int8") return DType::i8;
  if (const auto dtype = dtype_named(format)) return *dtype;
  fail_internal("adamw", "moments of unknown format " + format);
}

}  // namespace

AdamW::AdamW(const AdamWOptions& options)
    : options_(options),
      dtypes_{moment_dtype(options.moment1.empty() ? options.moments : options.moment1),
              moment_dtype(options.moment2.empty() ? options.moments : options.moment2)} {
  if (options.block != 128 && options.block != 256)
    throw Error(ErrorCode::config, {.where = "optimizer.adamw.block",
                                    .what = "no such block of moments",
                                    .found = std::to_string(options.block),
                                    .expected = "128 or 256"});
}

bool AdamW::in_8bit(const ParameterSpec& parameter) const {
  return parameter.extents.size() == 2 && (size_of(dtypes_[0]) == 1 || size_of(dtypes_[1]) == 1);
}

std::vector<OptimizerState> AdamW::states(const ParameterSpec& parameter) const {
  const bool coded = in_8bit(parameter);
  std::vector<OptimizerState> states;
  for (int i : {0, 1}) {
    const DType dtype = size_of(dtypes_[i]) == 1 && !coded ? DType::f32 : dtypes_[i];
    states.push_back(OptimizerState::elements(parameter, kMoments[i], dtype));
  }
  for (int i : {0, 1})
    if (coded && size_of(dtypes_[i]) == 1)
      states.push_back(OptimizerState::blocks(parameter, kScales[i], DType::f32, options_.block));
  return states;
}

void AdamW::update(UpdateBuilder& b, const ParameterSpec& parameter) const {
  Attributes attributes{{"beta1", options_.beta1},
                        {"beta2", options_.beta2},
                        {"eps", options_.eps},
                        {"weight_decay", parameter.decay ? options_.weight_decay : 0.0}};
  if (parameter.rate != 1) attributes.set("rate", parameter.rate);
  std::vector<ValueId> inputs{b.update(), b.step(), b.gradient(), b.master(), b.state("moment1"), b.state("moment2")};
  if (!in_8bit(parameter)) return void(b.op("adamw", std::move(inputs), "", std::move(attributes)));
  attributes.set("block", options_.block);
  for (int i : {0, 1}) inputs.push_back(size_of(dtypes_[i]) == 1 ? b.state(kScales[i]) : kNoValue);
  b.op("adamw_8bit", std::move(inputs), "", std::move(attributes));
}

void add_adamw(Manifest& manifest) {
  manifest.add<Optimizer>(
      "adamw", "AdamW, with moments in fp32, bf16, int8 or e4m3", adamw_options().specs(),
      [](const OptionValues& values) { return std::make_unique<AdamW>(adamw_options().bind(values)); });
}

}  // namespace quern
