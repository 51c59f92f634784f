// Whole models on the GPU: the goldens of the CPU device, and the promise that capture, recomputation and a restart
// change no bit.
#include <algorithm>
#include <map>
#include <string>

#include <doctest/doctest.h>

#include "end_to_end.h"
#include "golden_models.h"
#include "quern/error.h"
#include "quern/testkit/forwarding_device.h"

using namespace quern;
using namespace quern::testing;

namespace {

/// Null where no GPU can be opened, with a message that says "skipped: <reason>".
std::unique_ptr<Device> open_gpu(const std::string& attention = "auto") {
  static PluginHost host(PluginHost::standard_folders());
  const Factory& factory = host.require("device", "cuda");
  OptionValues values = default_values(factory.options);
  values.set("attention", OptionValue(attention));
  auto device = host.create<Device>("cuda", values);
  try {
    device->open(0);
  } catch (const Error& error) {
    MESSAGE("skipped: " << std::string(error.what()));
    return nullptr;
  }
  return device;
}

void check_goldens(Device& device, const std::string& precision, const GoldenTolerance& tolerance) {
  for (const auto& folder : golden_cases()) check_golden(folder, device, precision, tolerance);
}

/// A device that launches what it could capture.
class Uncaptured final : public testkit::ForwardingDevice {
 public:
  explicit Uncaptured(Device& device) : ForwardingDevice({&device, [](Device*) {}}), traits_(device.traits()) {
    traits_.can_capture = false;
  }
  const DeviceTraits& traits() const override { return traits_; }

 private:
  DeviceTraits traits_;
};

/// Two optimizer steps of three micro-steps each: masters and moments.
std::map<std::string, std::vector<float>> train_two_steps(TinyRun& run) {
  for (std::uint32_t step = 0; step < 2; ++step) {
    for (std::uint32_t micro_step = 0; micro_step < 3; ++micro_step) {
      const Batch batch = random_batch(run.plan().options.geometry, run.plan().model.vocabulary, 3 * step + micro_step);
      run.engine().micro_step(
          batch, {.step = step, .micro_step = micro_step, .seed_low = 5, .learning_rate = 1e-2f, .clip_norm = 1.0f},
          {.first = micro_step == 0, .last = micro_step == 2});
    }
    run.engine().update();
  }
  auto state = run.all("master");
  for (const char* kind : {"moment1", "moment2"})
    for (auto& [name, values] : run.all(kind)) state[std::string(kind) + " of " + name] = std::move(values);
  return state;
}

}  // namespace

TEST_CASE("models on the GPU agree with transformers: logits, loss and every gradient") {
  std::unique_ptr<Device> device = open_gpu();
  if (!device) return;
  // Five times what the CPU is let: the GPU's expf, sinf and rsqrtf are good to a few units in the last place, and a
  // matmul's terms are summed in blocks.
  check_goldens(*device, "fp32", {5e-5, 5e-5, 5e-5});
}

TEST_CASE("models on the GPU in bf16 agree with transformers in double precision") {
  std::unique_ptr<Device> device = open_gpu();
  if (!device) return;
  check_goldens(*device, "bf16", kBf16);
}

TEST_CASE("documents that fill rows give on the GPU what plain rows give") {
  std::unique_ptr<Device> device = open_gpu("own");
  if (!device) return;
  testkit::TinyModelOptions form;
  PlanOptions options;
  options.geometry = {3, 8};
  Batch batch = random_batch(options.geometry, form.vocabulary, 4);
  TinyRun plain(form, options, DType::f32, *device);
  auto want = plain.gradients(batch);
  options.documents = true;
  TinyRun packed(form, options, DType::f32, *device);
  CHECK(packed.gradients(batch) == want);
}

TEST_CASE("state in host memory changes no bit on the GPU, in a graph of several streams or launch by launch") {
  std::unique_ptr<Device> device = open_gpu();
  if (!device) return;
  Uncaptured uncaptured(*device);
  testkit::TinyModelOptions form{.layers = 4, .bias = true};
  PlanOptions options;
  options.geometry = {2, 64};
  TinyRun resident(form, options, DType::bf16, *device);
  const auto want = train_two_steps(resident);
  for (const char* store : {"host", "zerocopy"})
    for (unsigned places = 1; places < 32; ++places) {
      options = stored_options(places, 1 + static_cast<int>(places % 2), store);
      options.geometry = {2, 64};
      if (places == 1) options.state.moments.memory = "host";   // masters in either, beside slots
      if (places % 4 == 3) options.update_window_bytes = 2048;  // slices of rows
      if (places % 8 == 5)                                      // half of the layers on the device
        for (const PlacedKey& key : kPlacedKeys) (options.state.*key.placement).device_percent = 50;
      CAPTURE(store);
      CAPTURE(places);
      TinyRun captured(form, options, DType::bf16, *device), launched(form, options, DType::bf16, uncaptured);
      CHECK(train_two_steps(captured) == want);
      CHECK(train_two_steps(launched) == want);
    }
}

TEST_CASE("recomputation changes no bit on the GPU") {
  std::unique_ptr<Device> device = open_gpu();
  if (!device) return;
  testkit::TinyModelOptions form{.bias = true};
  PlanOptions options;
  options.geometry = {2, 64};
  Batch batch = random_batch(options.geometry, form.vocabulary, 5);
  for (DType dtype : {DType::f32, DType::bf16}) {
    options.recompute = {};
    TinyRun keep_all(form, options, dtype, *device);
    auto want = keep_all.gradients(batch);
    for (const char* name : {"swiglu", "norm", "ffn", "qkv", "att", "block"}) {
      CAPTURE(name);
      options.recompute = {name};
      TinyRun run(form, options, dtype, *device);
      CHECK(run.gradients(batch) == want);
    }
  }
}

TEST_CASE("captured steps on the GPU have the bits of ops launched one by one") {
  std::unique_ptr<Device> device = open_gpu();
  if (!device) return;
  Uncaptured uncaptured(*device);
  const testkit::TinyModelOptions form{.bias = true};
  for (const Geometry& geometry : {Geometry{3, 20}, Geometry{2, 64}}) {  // attention by own kernels, and through cuDNN
    for (DType dtype : {DType::f32, DType::bf16}) {
      PlanOptions options;
      options.geometry = geometry;
      TinyRun one_by_one(form, options, dtype, uncaptured), captured(form, options, dtype, *device);
      const auto want = train_two_steps(one_by_one);
      CHECK(want.size() > 10);
      CHECK(train_two_steps(captured) == want);
    }
  }
}

TEST_CASE("captured steps on the GPU have the bits of 8-bit matmuls launched one by one, fused with swiglu too") {
  std::unique_ptr<Device> device = open_gpu();
  if (!device) return;
  Uncaptured uncaptured(*device);
  const std::string& name = device->traits().name;
  const bool hopper = name.find("H100") != std::string::npos || name.find("H200") != std::string::npos;
  // As wide as GEMMs that quantize SwiGLU take.
  const testkit::TinyModelOptions form{.width = 896, .vocabulary = 64, .heads = 14, .head_dim = 64, .ffn = 256};
  PlanOptions options;
  options.geometry = {2, 64};
  options.uploads = 4;
  options.gradient = DType::bf16;
  struct Recipe {
    std::string precision, scaling, gradients, fused;
  };
  for (const Recipe& recipe :
       {Recipe{"e4m3", "delayed", "e5m2", "matmul_swiglu_quantize_delayed"},
        Recipe{"e4m3", "square", "e4m3", "matmul_swiglu_quantize_squares"},
        Recipe{"e4m3", "block", "e5m2", "matmul_swiglu_quantize_blocks"}, Recipe{"int8", "row", "", ""}}) {
    CAPTURE(recipe.precision);
    CAPTURE(recipe.scaling);
    OptionValues values = default_values(plugin_host().require("precision", recipe.precision).options);
    if (!recipe.gradients.empty()) {
      values.set("activation_scaling", OptionValue(recipe.scaling));
      values.set("gradient_scaling", OptionValue(recipe.scaling));
      values.set("gradient_format", OptionValue(recipe.gradients));
    }
    const auto precision = plugin_host().create<PrecisionBackend>(recipe.precision, values);
    auto on = [&](Device& gpu) { return tiny_plan(options, gpu, *precision, form); };
    const Plan plan = on(*device);
    const auto& ops = plan.classes[0].forward.program.ops;
    const bool fused = std::any_of(ops.begin(), ops.end(), [&](const auto& op) { return op.kind == recipe.fused; });
    if (hopper) CHECK(fused == !recipe.fused.empty());
    TinyRun one_by_one(on(uncaptured), uncaptured), captured(on(*device), *device);
    const auto want = train_two_steps(one_by_one);
    CHECK(want.size() > 10);
    CHECK(train_two_steps(captured) == want);
  }
}

TEST_CASE("a run on the GPU gives its bits again, stopped and continued too") {
  if (!open_gpu()) return;
  // As wide as GEMMs that quantize SwiGLU take.
  auto with_blocks = [](const std::string& scaling, Overrides more) {
    Overrides all{"precision.id=e4m3",
                  "precision.e4m3.activation_scaling=" + scaling,
                  "precision.e4m3.gradient_scaling=" + scaling,
                  "model.llama.hidden_size=896",
                  "model.llama.intermediate_size=256",
                  "model.llama.num_attention_heads=14",
                  "model.llama.max_position_embeddings=64",
                  "train.sequence=64"};
    all.insert(all.end(), more.begin(), more.end());
    return all;
  };
  const Overrides recipes[] = {
      {"precision.id=bf16", "optimizer.master=bf16", "optimizer.gradient=bf16", "optimizer.adamw.moments=bf16"},
      {"precision.id=bf16", "precision.bf16.transposed_weights=kept", "model.llama.head_dim=64"},
      {"precision.id=e4m3", "precision.e4m3.history=3"},
      {"precision.id=e4m3", "precision.e4m3.activation_scaling=row", "precision.e4m3.gradient_scaling=row"},
      with_blocks("square", {}),
      with_blocks("block", {"precision.e4m3.gradient_format=e5m2"})};
  for (const Overrides& recipe : recipes) {
    for (int accumulation : {1, 3}) {
      CAPTURE(recipe[0]);
      CAPTURE(recipe[1]);
      CAPTURE(accumulation);
      TinyFiles files;
      auto train = [&](const std::string& directory, int stop_after) {
        Overrides all = recipe;
        all.insert(all.end(), {"device.id=cuda", "checkpoint.every=0", "checkpoint.export=false", "train.steps=8",
                               "train.accumulation=" + std::to_string(accumulation), files.run(directory)});
        return train_here(files, all, stop_after);
      };
      SessionResult straight = train("straight", 0), again = train("again", 0), first = train("stopped", 4);
      CHECK(newest_step(files.at("stopped")) == 4);
      const SessionResult second = train("stopped", 0);
      CHECK(second.result.finished);
      first.losses.merge(Losses(second.losses));
      CHECK(straight.losses.size() == 8);
      CHECK(again.losses == straight.losses);
      CHECK(first.losses == straight.losses);
      CHECK(newest_tensors(files.at("again")) == newest_tensors(files.at("straight")));
      CHECK(newest_tensors(files.at("stopped")) == newest_tensors(files.at("straight")));
    }
  }
}
