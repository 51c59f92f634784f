#include "optimizer/adamw.h"

#include <doctest/doctest.h>

#include "optimizer/optimizers.h"
#include "optimizer/update_traits.h"

using namespace quern;

namespace {

const ParameterSpec kMatrix = matrix("w", ParameterGroup::block, "w{layer}", 3, 5);

}  // namespace

TEST_CASE("matrices decay, norms and biases do not") {
  const OpSet ops = builtin_ops();
  AdamW adamw({.beta1 = 0.8, .beta2 = 0.99, .eps = 1e-6, .weight_decay = 0.2});
  auto check_decay = [&](const ParameterSpec& spec, double decay) {
    const UpdateTraits traits = update_traits(adamw, spec, ops);
    REQUIRE(traits.ops.size() == 1);
    CHECK(traits.ops[0].kind == "adamw");
    CHECK(traits.ops[0].attributes == Attributes{{"beta1", 0.8},
                                                 {"beta2", 0.99},
                                                 {"eps", 1e-6},
                                                 {"weight_decay", decay},
                                                 {"objects", std::vector<double>{0}},
                                                 {"offsets", std::vector<double>{0}}});
    CHECK(traits.locality == UpdateLocality::element);
  };
  check_decay(kMatrix, 0.2);
  check_decay(vector("n", ParameterGroup::block, "n{layer}", 5, Init::Kind::ones), 0);
  check_decay(packed("b", ParameterGroup::block, {{"b{layer}", 5, {Init::Kind::zeros, 0}}}, 1), 0);
}

TEST_CASE("the moments are in the order and dtype of the op's inputs") {
  for (const char* name : {"fp32", "bf16"}) {
    std::vector<OptimizerState> states = AdamW({.moments = name}).states(kMatrix);
    REQUIRE(states.size() == 2);
    CHECK(states[0].name == "moment1");
    CHECK(states[1].name == "moment2");
    for (const OptimizerState& state : states) CHECK(state.dtype == *dtype_named(name));
  }
}

TEST_CASE("the factory's options have sound defaults and refuse what would diverge") {
  std::vector<Factory> factories = optimizer_factories();
  REQUIRE(!factories.empty());
  CHECK(factories[0].kind == "optimizer");
  CHECK(factories[0].id == "adamw");
  for (const OptionSpec& spec : factories[0].options) {
    CAPTURE(spec.key);
    OptionValue value = spec.default_value;
    CHECK(!check_option(spec, value));
    OptionValue one = spec.type == OptionType::text ? OptionValue(std::string("fp16")) : OptionValue(-1e-9);
    CHECK(check_option(spec, one));
    OptionValue beta = 1.0;
    if (spec.key.starts_with("beta")) CHECK(check_option(spec, beta));
  }
  OptionValues values;
  values.set("moments", std::string("bf16"));
  std::unique_ptr<Optimizer> made(static_cast<Optimizer*>(factories[0].create(values)));
  CHECK(made->states(kMatrix)[0].dtype == DType::bf16);
  CHECK(update_traits(*made, kMatrix, builtin_ops()).ops[0].attributes.real("weight_decay") == 0.1);
}
