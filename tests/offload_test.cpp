// Where state is kept changes no bit: training with masters, moments, gradients, compute weights and saved activations
// in host memory, in every combination, in slots and in place, beside training with all of it on the device.
#include <doctest/doctest.h>

#include "end_to_end.h"
#include "training_fixture.h"

using namespace quern;
using namespace quern::testing;

namespace {

/// Losses and norms of four steps of two micro-batches, an evaluation after every other one, and all tensors in the
/// end.
struct Trained {
  std::vector<double> numbers;
  std::map<std::string, std::vector<float>> master, moment, gradient;
  bool operator==(const Trained&) const = default;
};

Trained train(TinyRun& run) {
  Trained trained;
  const Geometry& geometry = run.plan().options.geometry;
  auto batch = [&](std::uint64_t seed) { return random_batch(geometry, run.plan().model.vocabulary, seed); };
  for (std::uint32_t step = 0; step < 4; ++step) {
    StepState state;
    state.step = state.updates = step;
    state.learning_rate = 0.01f;
    state.clip_norm = 0.5f;
    for (std::uint32_t micro_step = 0; micro_step < 2; ++micro_step) {
      state.micro_step = micro_step;
      run.engine().micro_step(batch(2 * step + micro_step), state, {.first = micro_step == 0, .last = micro_step == 1});
    }
    run.engine().update();
    const Engine::StepResult result = run.engine().result();
    trained.numbers.insert(trained.numbers.end(), {result.loss.loss_sum, double{result.update.gradient_norm}});
    if (step % 2) trained.numbers.push_back(run.engine().evaluate(batch(90)).loss_sum);
  }
  trained.master = run.all("master");
  trained.moment = run.all("moment1");
  trained.gradient = run.all("gradient");
  return trained;
}

/// The store of the chosen kind, and of all others.
struct Stores {
  const char *chosen, *other;
};
constexpr Stores kStores[] = {{"host", "device"}, {"zerocopy", "device"}, {"zerocopy", "host"}};

/// All kinds of state there.
Overrides all_in(const std::string& memory) {
  Overrides overrides;
  for (const char* kind : {"master", "moments", "gradients", "weights", "activations"})
    overrides.push_back("memory." + std::string(kind) + "=" + memory);
  return overrides;
}

}  // namespace

TEST_CASE("state in host memory changes no bit, wherever each part is") {
  for (const testkit::TinyModelOptions& form :
       {testkit::TinyModelOptions{.layers = 3}, testkit::TinyModelOptions{.tied = true, .bias = true}}) {
    for (DType dtype : {DType::f32, DType::bf16}) {
      TinyRun resident(form, stored_options(0, 1), dtype);
      const Trained want = train(resident);
      REQUIRE(want.numbers[0] > 0);
      for (unsigned places = 1; places < 32; ++places)
        for (const Stores& stores : kStores) {
          CAPTURE(places);
          CAPTURE(stores.chosen);
          CAPTURE(stores.other);
          PlanOptions options = stored_options(places, 1 + static_cast<int>(places % 3), stores.chosen);
          for (const PlacedKey& key : kPlacedKeys)
            if (Placement& placed = options.state.*key.placement; placed.memory == kOnDevice)
              placed.memory = stores.other;
          if (places % 2) options.update_window_bytes = 2048;  // slices of rows
          TinyRun run(form, options, dtype);
          CHECK(train(run) == want);
        }
    }
  }
}

TEST_CASE("shares of the layers on the device change no bit") {
  for (const testkit::TinyModelOptions& form :
       {testkit::TinyModelOptions{.layers = 5}, testkit::TinyModelOptions{.layers = 5, .tied = true, .bias = true}}) {
    for (DType dtype : {DType::f32, DType::bf16}) {
      TinyRun resident(form, stored_options(0, 1), dtype);
      const Trained want = train(resident);
      for (unsigned shared = 1; shared < 32; ++shared)
        for (const char* store : {"host", "zerocopy"}) {
          CAPTURE(shared);
          CAPTURE(store);
          PlanOptions options = stored_options(31, 1 + static_cast<int>(shared % 3), store);
          unsigned bit = 0;
          for (const PlacedKey& key : kPlacedKeys) {
            if (shared >> bit & 1) (options.state.*key.placement).device_percent = 20 + 15 * bit;
            ++bit;
          }
          if (shared % 2) options.update_window_bytes = 2048;  // slices of rows
          TinyRun run(form, options, dtype);
          CHECK(train(run) == want);
        }
    }
  }
}

TEST_CASE("tensors in a store are read and written like tensors on the device") {
  for (const char* store : {"host", "zerocopy"}) {
    TinyRun run({}, stored_options(15, 1, store));
    for (const PlannedTensor& tensor : run.plan().tensors) {
      if (tensor.store < 0) continue;
      std::vector<std::byte> want(static_cast<std::size_t>(tensor.bytes())), got(want.size());
      for (std::size_t i = 0; i < want.size(); ++i) want[i] = static_cast<std::byte>(i * 31 + 7);
      run.engine().write(tensor, want.data());
      run.engine().read(tensor, got.data());
      CHECK(got == want);
    }
  }
}

TEST_CASE("a run goes on with its state elsewhere, with the bits of one that kept it in one place") {
  // From each place to each other one.
  const Overrides places[] = {
      all_in("device"),
      all_in("host"),
      all_in("zerocopy"),
      all_in("disk"),
      all_in("device"),
      all_in("zerocopy"),
      {"memory.master=disk", "memory.moments=device:50%,disk", "memory.weights=host"},
      {"memory.master=host", "memory.moments=zerocopy"},
      all_in("host"),
      all_in("device:50%,host"),
      {"memory.master=device:60%,zerocopy", "memory.moments=device:99%,host", "memory.weights=host"},
      all_in("host"),
      {"memory.gradients=host", "memory.weights=host", "memory.activations=host", "memory.recompute=[\"block\"]"},
      all_in("device")};
  for (const char* precision : {"precision.id=fp32", "precision.id=bf16", "precision.id=e4m3"}) {
    CAPTURE(precision);
    TinyFiles files;
    auto train = [&](const std::string& directory, const Overrides& where, int stop_after) {
      Overrides all = where;
      all.insert(all.end(), {precision, "optimizer.gradient=bf16", "optimizer.adamw.moments=bf16", "log.scales_every=3",
                             "checkpoint.every=0", "checkpoint.export=false", "train.steps=28", "train.accumulation=3",
                             "device.cpu.streams=shuffled", files.run(directory)});
      return train_here(files, all, stop_after);
    };
    const SessionResult straight = train("straight", {}, 0);
    Losses losses;
    for (int part = 0; part < 14; ++part)
      losses.merge(Losses(train("moving", places[part], part < 13 ? 2 * part + 2 : 0).losses));
    CHECK(losses == straight.losses);
    CHECK(newest_tensors(files.at("moving")) == newest_tensors(files.at("straight")));
  }
}
