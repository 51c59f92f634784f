#include "optimizer/adamw.h"

#include <doctest/doctest.h>

using namespace quern;

TEST_CASE("matrices decay, norms and biases do not") {
  AdamW adamw({.beta1 = 0.8, .beta2 = 0.99, .eps = 1e-6, .weight_decay = 0.2});
  auto attributes = [](double decay) {
    return Attributes{{"beta1", 0.8}, {"beta2", 0.99}, {"eps", 1e-6}, {"weight_decay", decay}};
  };
  UpdateOp op = adamw.update(matrix("w", ParameterGroup::block, "w{layer}", 3, 5));
  CHECK(op.kind == "adamw");
  CHECK(op.attributes == attributes(0.2));
  CHECK(op.locality == UpdateLocality::element);
  CHECK(adamw.update(vector("n", ParameterGroup::block, "n{layer}", 5, Init::Kind::ones)).attributes == attributes(0));
  CHECK(adamw.update(packed("b", ParameterGroup::block, {{"b{layer}", 5, {Init::Kind::zeros, 0}}}, 1)).attributes ==
        attributes(0));
}

TEST_CASE("the moments are in the order and dtype of the op's inputs") {
  for (const char* name : {"fp32", "bf16"}) {
    std::vector<OptimizerState> states = AdamW({.moments = name}).states();
    REQUIRE(states.size() == 2);
    CHECK(states[0].name == "moment1");
    CHECK(states[1].name == "moment2");
    for (const OptimizerState& state : states) CHECK(state.dtype == *dtype_named(name));
  }
}

TEST_CASE("the factory's options have sound defaults and refuse what would diverge") {
  std::vector<Factory> factories = optimizer_factories();
  REQUIRE(factories.size() == 1);
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
  CHECK(made->states()[0].dtype == DType::bf16);
  CHECK(made->update(matrix("w", ParameterGroup::head, "w", 2, 2)).attributes.real("weight_decay") == 0.1);
}
