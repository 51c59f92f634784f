#include "golden_models.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include <doctest/doctest.h>

#include "checkpoint/safetensors.h"
#include "quern/testkit/compare.h"
#include "run/weights.h"

namespace quern::testing {

namespace fs = std::filesystem;

namespace {

std::vector<std::int32_t> integers(const SafetensorsFile& file, const char* name) {
  auto bytes = file.bytes(file.at(name));
  std::vector<std::int32_t> values(bytes.size() / 4);
  std::memcpy(values.data(), bytes.data(), bytes.size());
  return values;
}

void compare(const std::vector<float>& got, const std::vector<float>& want, const GoldenTolerance& tolerance) {
  REQUIRE(got.size() == want.size());
  double largest = 0, difference = 0;
  for (std::size_t i = 0; i < want.size(); ++i) {
    largest = std::max(largest, std::fabs(double{want[i]}));
    difference = std::max(difference, std::fabs(double{got[i]} - want[i]));
  }
  CHECK(difference / largest < tolerance.element);
  CHECK(testkit::relative_error(got, want) < tolerance.tensor);
}

/// A parameter's gradients by Hugging Face name. The engine's are of the summed loss, and packed.
std::size_t compare_gradients(PluginRun& run, const ParameterPlan& parameter, int layer, float valid_tokens,
                              const SafetensorsFile& golden, const GoldenTolerance& tolerance) {
  std::vector<float> packed(static_cast<std::size_t>(parameter.spec.count()));
  run.engine->read(run.engine->plan().tensor("gradient", parameter.spec.name, layer), packed.data());
  auto at = packed.begin();
  for (const ParameterPart& part : parameter.spec.parts) {
    std::string name = hf_tensor_name(part, layer);
    std::vector<float> got(at, at + part.rows * parameter.spec.columns());
    at += part.rows * parameter.spec.columns();
    for (float& value : got) value /= valid_tokens;
    CAPTURE(name);
    compare(got, golden.read_floats("grad." + name), tolerance);
  }
  return parameter.spec.parts.size();
}

}  // namespace

std::vector<fs::path> golden_cases() {
  std::vector<fs::path> cases;
  for (const auto& entry : fs::directory_iterator(QUERN_SOURCE_DIR "/tests/goldens"))
    if (entry.is_directory()) cases.push_back(entry.path());
  std::sort(cases.begin(), cases.end());
  return cases;
}

PluginRun::PluginRun(const fs::path& folder, Device& on, const std::string& precision_id)
    : host(PluginHost::standard_folders()), device(on) {
  OptionValues values;
  values.set("config", folder.string());
  std::string id = folder.filename().string().substr(0, folder.filename().string().find('_'));
  if (id == "llama3") id = "llama";
  host.require("model", id);
  model = host.create<Model>(id, values);
  host.require("precision", precision_id);
  precision = host.create<PrecisionBackend>(precision_id, {});
}

void PluginRun::start(Geometry geometry) {
  PlanOptions options;
  options.geometry = geometry;
  options.logits = true;
  engine = std::make_unique<Engine>(device, make_plan({*model, *precision, device, optimizer, custom_ops}, options));
}

void check_golden(const fs::path& folder, Device& device, const std::string& precision,
                  const GoldenTolerance& tolerance) {
  CAPTURE(folder.filename().string());
  SafetensorsFile golden((folder / "golden.safetensors").string());
  const Extents& extents = golden.at("tokens").extents;
  Geometry geometry{extents[0], extents[1]};
  PluginRun run(folder, device, precision);
  run.start(geometry);
  import_weights(*run.engine, folder.string());

  Batch batch;
  batch.tokens = integers(golden, "tokens");
  batch.targets = integers(golden, "targets");
  for (std::int64_t i = 0; i < geometry.tokens(); ++i)
    batch.positions.push_back(static_cast<std::int32_t>(i % geometry.sequence));

  compare(run.engine->logits(batch), golden.read_floats("logits"), tolerance);
  run.engine->micro_step(batch, {});
  LossStats loss = run.engine->result().loss;
  CHECK(loss.loss_sum / loss.valid_tokens == doctest::Approx(golden.read_floats("loss")[0]).epsilon(tolerance.loss));

  std::size_t compared = 0;
  for (const ParameterPlan& parameter : run.engine->plan().parameters) {
    bool in_layers = parameter.spec.group == ParameterGroup::block;
    for (int layer = in_layers ? 0 : -1; layer < (in_layers ? static_cast<int>(run.engine->plan().model.layers) : 0);
         ++layer)
      compared += compare_gradients(run, parameter, layer, static_cast<float>(loss.valid_tokens), golden, tolerance);
  }
  CHECK(compared + 4 == golden.tensors().size());  // tokens, targets, logits and loss are the others
}

}  // namespace quern::testing
