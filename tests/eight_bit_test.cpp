// Training with 8-bit matmuls on the CPU device: the promises of the other precisions hold, and gradients stay close.
#include <cmath>

#include <doctest/doctest.h>

#include "end_to_end.h"
#include "quern/testkit/forwarding_device.h"

using namespace quern;
using namespace quern::testing;

namespace {

const Overrides kShort{"train.steps=6", "checkpoint.export=false", "checkpoint.every=0"};

const std::vector<Overrides> kRecipes = {
    {"precision.id=e4m3"},
    {"precision.id=e4m3", "precision.e4m3.activation_scaling=current", "precision.e4m3.gradient_scaling=current"},
    {"precision.id=e4m3", "precision.e4m3.activation_scaling=row", "precision.e4m3.gradient_scaling=row"},
    {"precision.id=e4m3", "precision.e4m3.activation_scaling=block", "precision.e4m3.gradient_scaling=block"},
    {"precision.id=e4m3", "precision.e4m3.activation_scaling=block", "precision.e4m3.gradient_scaling=row"},
    {"precision.id=e4m3", "precision.e4m3.gradient_format=e5m2", "precision.e4m3.head=bf16"},
    {"precision.id=e4m3", "precision.e4m3.products=[\"output\"]", "precision.e4m3.transposed_weights=made"},
    {"precision.id=e5m2"},
    {"precision.id=int8"},
    {"precision.id=int8", "precision.int8.products=[\"output\", \"input_gradient\"]"},
    {"precision.id=e4m3", "precision.e4m3.activation_scaling=square", "precision.e4m3.gradient_scaling=square"},
    {"precision.id=e4m3", "precision.e4m3.activation_scaling=row", "precision.e4m3.gradient_scaling=square"},
    {"precision.id=int4"},
};

Losses losses(const TinyFiles& files, const std::string& name, const Overrides& overrides) {
  return train_here(files, with(with(kShort, overrides), {files.run(name)})).losses;
}

/// A device whose 8-bit matmuls take K-major operands only.
class ContractedLast final : public testkit::ForwardingDevice {
 public:
  using ForwardingDevice::ForwardingDevice;
  OpSupport query(const OpInstance& op) const override {
    if (op.kind == "matmul" && size_of(op.inputs[0].dtype) == 1 &&
        (op.attributes.integer("transpose_a") == 1 || op.attributes.integer("transpose_b") == 0))
      return {"contracted dimensions must come last", 0};
    return ForwardingDevice::query(op);
  }
};

}  // namespace

TEST_CASE("every recipe trains, near bf16 and not equal to it") {
  TinyFiles files;
  Losses bf16 = losses(files, "bf16", {"precision.id=bf16"});
  int number = 0;
  for (const Overrides& recipe : kRecipes) {
    CAPTURE(recipe.back());
    Losses got = losses(files, "r" + std::to_string(number++), recipe);
    REQUIRE(got.size() == bf16.size());
    bool differs = false;
    for (auto [step, loss] : got) {
      CHECK(loss == doctest::Approx(bf16[step]).epsilon(0.02));
      differs = differs || loss != bf16[step];
    }
    CHECK(differs);
  }
}

TEST_CASE("recomputation, a budget and kept or made transposed weights change no bit of 8-bit training") {
  TinyFiles files;
  for (const Overrides& recipe : {kRecipes[0], kRecipes[1], kRecipes[3], kRecipes[8], kRecipes[10]}) {
    Losses want = losses(files, "all" + recipe.back(), recipe);
    for (const char* policy : {"[\"swiglu\"]", "[\"norm\", \"swiglu\"]", "[\"att\"]", "[\"ffn\"]", "[\"block\"]"}) {
      CAPTURE(policy);
      CHECK(losses(files, recipe.back() + policy, with(recipe, {std::string("memory.recompute=") + policy})) == want);
    }
    for (const char* form : {"kept", "made"})
      if (recipe[0] == "precision.id=e4m3")
        CHECK(losses(files, form + recipe.back(),
                     with(recipe, {std::string("precision.e4m3.transposed_weights=") + form})) == want);
    std::int64_t bytes = planned_bytes(files, recipe);
    std::int64_t least = planned_bytes(files, with(recipe, {"memory.recompute=[\"block\"]"}));
    REQUIRE(least < bytes);
    for (std::int64_t budget : {least + (bytes - least) / 3, least + 2 * (bytes - least) / 3, bytes - 1}) {
      Overrides tight = with(recipe, {"memory.device_budget=" + std::to_string(budget)});
      CAPTURE(budget);
      CHECK(planned_bytes(files, tight) <= budget);
      CHECK(losses(files, "tight" + recipe.back() + std::to_string(budget), tight) == want);
    }
  }
}

// The CPU device sums in one order, whatever its operands' layout.
TEST_CASE("matmuls that read quantized values as stored have the bits of matmuls that read transposed copies") {
  TinyFiles files;
  for (const Overrides& recipe : {kRecipes[0], kRecipes[1], kRecipes[4], kRecipes[5], kRecipes[7], kRecipes[10]})
    for (const char* policy : {"[]", "[\"block\"]"}) {
      CAPTURE(recipe.back());
      CAPTURE(policy);
      const std::string form = recipe[0].substr(recipe[0].find('=') + 1) + ".transposed_weights=made";
      const Overrides made = with(recipe, {"precision." + form, std::string("memory.recompute=") + policy});
      const std::string name = recipe.back() + policy;
      const Losses copies =
          train_here(files, with(with(kShort, made), {files.run("copies" + name)}), 0, [](Session& session) {
            session.device = std::make_unique<ContractedLast>(std::shared_ptr<Device>(std::move(session.device)));
          }).losses;
      CHECK(losses(files, "stored" + name, made) == copies);
    }
}

TEST_CASE("8-bit training resumes bit for bit, histories included") {
  for (const Overrides& recipe : kRecipes) {
    TinyFiles files;
    CAPTURE(recipe.back());
    Overrides common = with(kShort, recipe);
    SessionResult straight = train_here(files, with(common, {files.run("straight")}));
    SessionResult first = train_here(files, with(common, {files.run("stopped")}), 3);
    CHECK_FALSE(first.result.finished);
    SessionResult second = train_here(files, with(common, {files.run("stopped")}));
    first.losses.merge(second.losses);
    CHECK(first.losses == straight.losses);
    CHECK(newest_tensors(files.at("stopped")) == newest_tensors(files.at("straight")));
  }
}

TEST_CASE("an evaluation leaves no trace in the scales") {
  TinyFiles files;
  Losses plain = losses(files, "plain", kRecipes[0]);
  CHECK(losses(files, "evaluated", with(kRecipes[0], {"train.eval_every=1"})) == plain);
}

TEST_CASE("high-precision layers in another precision") {
  TinyFiles files;
  Overrides outer = with(kRecipes[0], {"precision.first_layers=1", "precision.last_layers=1"});
  // The model has two layers: all are high-precision layers, and with the head in bf16 nothing is left to quantize.
  Losses all_outer = losses(files, "outer", with(outer, {"precision.e4m3.head=bf16"}));
  CHECK(all_outer == losses(files, "bf16", {"precision.id=bf16"}));
  CHECK(losses(files, "first", with(kRecipes[0], {"precision.first_layers=1"})) != losses(files, "none", kRecipes[0]));
  Outcome refused = quern_train(files, with(outer, {"precision.outer=fp32", files.run("refused")}));
  CHECK(refused.code == 2);
  CHECK(refused.err.find("precision.outer") != std::string::npos);
}

TEST_CASE("named parameters: the matmuls of their weights are in another precision") {
  TinyFiles files;
  auto named = [](const std::string& names) {
    return with(kRecipes[0], {"precision.outer_parameters=[" + names + "]"});
  };
  const Losses bf16 = losses(files, "bf16", {"precision.id=bf16"}), none = losses(files, "none", kRecipes[0]);
  const std::string blocks = R"("qkv.weight", "o.weight", "gate_up.weight", "down.weight")";
  CHECK(losses(files, "all", named(blocks + R"(, "lm_head.weight")")) == bf16);
  CHECK(losses(files, "blocks", named(blocks)) != bf16);
  CHECK(losses(files, "head", named(R"("lm_head.weight")")) ==
        losses(files, "its_option", with(kRecipes[0], {"precision.e4m3.head=bf16"})));
  const Losses down = losses(files, "down", named(R"("down.weight")"));
  CHECK((down != bf16 && down != none));
  Outcome refused = quern_train(files, with(named(R"("down")"), {files.run("refused")}));
  CHECK(refused.code == 2);
  CHECK(refused.err.find("precision.outer_parameters") != std::string::npos);
  CHECK(refused.err.find("down.weight") != std::string::npos);
}

TEST_CASE("a matmul that is none is refused by its option") {
  TinyFiles files;
  Outcome refused = quern_train(files, {"precision.id=e4m3", "precision.e4m3.products=[\"outputs\"]"});
  CHECK(refused.code == 2);
  CHECK(refused.err.find("outputs") != std::string::npos);
}
