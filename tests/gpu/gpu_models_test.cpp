// Whole models on the GPU: the goldens of the CPU device, and the promise that capture and recomputation change no bit.
#include <string>

#include <doctest/doctest.h>

#include "golden_models.h"
#include "quern/error.h"

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

}  // namespace

TEST_CASE("models on the GPU agree with transformers: logits, loss and every gradient") {
  std::unique_ptr<Device> device = open_gpu();
  if (!device) return;
  // Five times what the CPU is let: the GPU's expf, sinf and rsqrtf are good to a few units in the last place, and a
  // product's terms are summed in blocks.
  for (const auto& folder : golden_cases()) check_golden(folder, *device, "fp32", {5e-5, 5e-5, 5e-5});
}

TEST_CASE("models on the GPU in bf16 agree with transformers in double precision") {
  std::unique_ptr<Device> device = open_gpu();
  if (!device) return;
  for (const auto& folder : golden_cases()) check_golden(folder, *device, "bf16", kBf16);
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
