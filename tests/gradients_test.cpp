// Whole models on the CPU device: gradients against finite differences of the loss, and the promise that saving,
// recomputing, fusing and accumulating change no bit.
#include <cmath>

#include <doctest/doctest.h>

#include "training_fixture.h"

using namespace quern;
using testkit::TinyModelOptions;
using namespace quern::testing;

namespace {

std::vector<TinyModelOptions> forms() {
  return {{},
          {.layers = 1},
          {.layers = 3, .tied = true},
          {.bias = true},
          {.head_norm = true},
          {.parallel = true},
          {.bias = true, .layer_norm = true},
          {.layers = 1, .layer_norm = true, .gelu = Gelu::erf}};
}

PlanOptions options_for(Geometry geometry, std::vector<std::string> recompute = {}) {
  PlanOptions options;
  options.geometry = geometry;
  options.recompute = std::move(recompute);
  return options;
}

double loss_of(TinyRun& run, const Batch& batch) { return run.engine().evaluate(batch).loss_sum; }

}  // namespace

TEST_CASE("gradients agree with finite differences of the loss") {
  for (const TinyModelOptions& form : forms()) {
    Geometry geometry{2, 9};
    TinyRun run(form, options_for(geometry));
    Batch batch = random_batch(geometry, form.vocabulary, 3);
    auto gradients = run.gradients(batch);
    for (const PlannedTensor& master : run.plan().tensors) {
      if (master.kind != "master") continue;
      const std::string name = conformance::tensor_name(master);
      const std::vector<float>& gradient = gradients.at(name);
      const std::vector<float> values = run.tensor("master", master.parameter, master.layer);
      // Along the gradient's own direction the slope is its norm: one number checks every element's share. fp32 losses
      // of about 60 nats carry 1e-5 of rounding; a step that moves the loss by about 0.02 leaves 1e-3.
      double norm = 0;
      for (float g : gradient) norm += double{g} * g;
      norm = std::sqrt(norm);
      CAPTURE(name);
      REQUIRE(norm > 1e-4);
      double step = 0.02 / norm, losses[2];
      for (int side : {0, 1}) {
        std::vector<float> moved = values;
        for (std::size_t i = 0; i < moved.size(); ++i)
          moved[i] += static_cast<float>((side ? 1 : -1) * step * gradient[i] / norm);
        run.write("master", master.parameter, master.layer, moved);
        losses[side] = loss_of(run, batch);
      }
      run.write("master", master.parameter, master.layer, values);
      double slope = (losses[1] - losses[0]) / (2 * step);
      CHECK(slope == doctest::Approx(norm).epsilon(5e-3));
    }
  }
}

TEST_CASE("every choice of recomputation gives the same bits") {
  for (DType dtype : {DType::f32, DType::bf16}) {
    for (const TinyModelOptions& form : forms()) {
      Geometry geometry{3, 7};
      Batch batch = random_batch(geometry, form.vocabulary, 5);
      PlanOptions base = options_for(geometry);
      TinyRun keep_all(form, base, dtype);
      auto want = keep_all.gradients(batch);
      double loss = keep_all.engine().result().loss.loss_sum;
      std::int64_t most = keep_all.plan().device_bytes;
      for (std::vector<std::string> policy : std::vector<std::vector<std::string>>{
               {"swiglu"}, {"norm"}, {"ffn"}, {"qkv"}, {"att"}, {"swiglu", "norm"}, {"block"}}) {
        CAPTURE(policy[0]);
        TinyRun run(form, options_for(geometry, policy), dtype);
        CHECK(run.gradients(batch) == want);
        CHECK(run.engine().result().loss.loss_sum == loss);
      }
      PlanOptions budgeted = base;
      budgeted.device_budget = most - 1024;
      TinyRun tight(form, budgeted, dtype);
      CHECK(tight.plan().device_bytes <= budgeted.device_budget);
      CHECK(tight.gradients(batch) == want);
    }
  }
}

TEST_CASE("two micro-batches accumulate to the gradient of both") {
  TinyModelOptions form{.tied = true};
  Geometry geometry{2, 8};
  TinyRun run(form, options_for(geometry));
  Batch a = random_batch(geometry, form.vocabulary, 1), b = random_batch(geometry, form.vocabulary, 2);
  auto first = run.gradients(a), second = run.gradients(b);
  run.engine().micro_step(a, {});
  StepState later;
  later.micro_step = 1;
  run.engine().micro_step(b, later, {.first = false});
  auto both = run.all("gradient");
  for (auto& [name, values] : both)
    for (std::size_t i = 0; i < values.size(); ++i)
      REQUIRE(values[i] == doctest::Approx(double{first[name][i]} + second[name][i]).epsilon(1e-4).scale(1e-3));
}

TEST_CASE("a step lowers the loss, repeats bit for bit, and a bad gradient is not applied") {
  for (DType master : {DType::f32, DType::bf16}) {
    TinyModelOptions form;
    PlanOptions options = options_for({4, 8});
    options.master = master;
    options.gradient = master;
    DType dtype = master;
    Batch batch = random_batch(options.geometry, form.vocabulary, 9);
    auto train = [&](TinyRun& run) {
      StepState state;
      state.learning_rate = 1e-2f;
      state.clip_norm = 1.0f;
      double first = 0, last = 0;
      for (std::uint32_t step = 0; step < 30; ++step) {
        state.step = state.updates = step;
        run.engine().micro_step(batch, state);
        run.engine().update();
        auto result = run.engine().result();
        (step == 0 ? first : last) = result.loss.loss_sum / result.loss.valid_tokens;
        CHECK(result.update.apply == 1);
      }
      CHECK(last < first - 1.0);
      return run.all("master");
    };
    TinyRun one(form, options, dtype), two(form, options, dtype);
    auto masters = train(one);
    CHECK(masters == train(two));

    const PlannedTensor& weight = one.plan().tensor({"master", "final_norm.weight"});
    std::vector<std::byte> broken(static_cast<std::size_t>(weight.bytes()), std::byte{0xff});  // NaN
    one.engine().write(weight, broken.data());
    one.engine().refresh();
    one.engine().micro_step(batch, {});
    one.engine().update();
    CHECK(one.engine().result().update.apply == 0);
    CHECK(one.tensor("master", "qkv.weight", 0) == masters["qkv.weight/0"]);
  }
}

TEST_CASE("documents that fill rows give what plain rows give") {
  TinyModelOptions form;
  PlanOptions options = options_for({3, 8});
  Batch batch = random_batch(options.geometry, form.vocabulary, 4);
  TinyRun plain(form, options);
  auto want = plain.gradients(batch);
  options.documents = true;
  TinyRun packed(form, options);
  CHECK(packed.gradients(batch) == want);
}
