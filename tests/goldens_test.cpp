// Real model plugins against transformers: logits, loss and every gradient of the committed goldens
// (tests/goldens/make_goldens.py made them in double precision), and the export against its own import.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <filesystem>

#include <doctest/doctest.h>

#include "checkpoint/safetensors.h"
#include "quern/testkit/compare.h"
#include "training_fixture.h"

using namespace quern;
using namespace quern::testing;

namespace {

namespace fs = std::filesystem;

std::vector<fs::path> golden_cases() {
  std::vector<fs::path> cases;
  for (const auto& entry : fs::directory_iterator(QUERN_SOURCE_DIR "/tests/goldens"))
    if (entry.is_directory()) cases.push_back(entry.path());
  std::sort(cases.begin(), cases.end());
  return cases;
}

std::vector<std::int32_t> integers(const SafetensorsFile& file, const char* name) {
  auto bytes = file.bytes(file.at(name));
  std::vector<std::int32_t> values(bytes.size() / 4);
  std::memcpy(values.data(), bytes.data(), bytes.size());
  return values;
}

// A model plugin's engine on the CPU, in fp32 unless said otherwise.
struct PluginRun {
  explicit PluginRun(const fs::path& folder) : host(PluginHost::standard_folders()) {
    OptionValues values;
    values.set("config", folder.string());
    std::string id = folder.filename().string().substr(0, folder.filename().string().find('_'));
    if (id == "llama3") id = "llama";
    host.require("model", id);
    model = host.create<Model>(id, values);
    host.require("precision", "fp32");
    precision = host.create<PrecisionBackend>("fp32", {});
    device = cpu_device();
  }
  void start(Geometry geometry) {
    PlanOptions options;
    options.geometry = geometry;
    options.logits = true;
    engine =
        std::make_unique<Engine>(*device, make_plan({*model, *precision, *device, optimizer, custom_ops}, options));
  }
  PluginHost host;
  std::unique_ptr<Model> model;
  std::unique_ptr<PrecisionBackend> precision;
  AdamW optimizer{AdamWOptions{}};
  std::vector<OpSpec> custom_ops;
  std::unique_ptr<Device> device;
  std::unique_ptr<Engine> engine;
};

// Largest difference relative to the tensor's largest element: small elements are sums that cancel.
double worst(const std::vector<float>& got, const std::vector<float>& want) {
  REQUIRE(got.size() == want.size());
  double largest = 0, difference = 0;
  for (std::size_t i = 0; i < want.size(); ++i) {
    largest = std::max(largest, std::fabs(double{want[i]}));
    difference = std::max(difference, std::fabs(double{got[i]} - want[i]));
  }
  return difference / largest;
}

}  // namespace

TEST_CASE("models agree with transformers: logits, loss and every gradient") {
  std::vector<fs::path> cases = golden_cases();
  REQUIRE(cases.size() >= 8);
  for (const fs::path& folder : cases) {
    CAPTURE(folder.filename().string());
    SafetensorsFile golden((folder / "golden.safetensors").string());
    const Extents& extents = golden.at("tokens").extents;
    Geometry geometry{extents[0], extents[1]};
    PluginRun run(folder);
    run.start(geometry);
    import_weights(*run.engine, folder.string());

    Batch batch;
    batch.tokens = integers(golden, "tokens");
    batch.targets = integers(golden, "targets");
    for (std::int64_t i = 0; i < geometry.tokens(); ++i)
      batch.positions.push_back(static_cast<std::int32_t>(i % geometry.sequence));

    CHECK(worst(run.engine->logits(batch), golden.read_floats("logits")) < 1e-5);
    run.engine->micro_step(batch, {});
    LossStats loss = run.engine->result().loss;
    CHECK(loss.loss_sum / loss.valid_tokens == doctest::Approx(golden.read_floats("loss")[0]).epsilon(1e-5));

    // The engine's gradients are of the summed loss, and packed.
    std::size_t compared = 0;
    for (const ParameterPlan& parameter : run.engine->plan().parameters) {
      bool in_layers = parameter.spec.group == ParameterGroup::block;
      for (int layer = in_layers ? 0 : -1; layer < (in_layers ? static_cast<int>(run.engine->plan().model.layers) : 0);
           ++layer) {
        std::vector<float> packed(static_cast<std::size_t>(parameter.spec.count()));
        run.engine->read(run.engine->plan().tensor("gradient", parameter.spec.name, layer), packed.data());
        std::size_t at = 0;
        for (const ParameterPart& part : parameter.spec.parts) {
          std::string name = hf_tensor_name(part, layer);
          std::vector<float> got(
              packed.begin() + static_cast<std::ptrdiff_t>(at),
              packed.begin() + static_cast<std::ptrdiff_t>(at) + part.rows * parameter.spec.columns());
          at += got.size();
          for (float& value : got) value /= static_cast<float>(loss.valid_tokens);
          CAPTURE(name);
          CHECK(worst(got, golden.read_floats("grad." + name)) < 1e-5);
          ++compared;
        }
      }
    }
    CHECK(compared + 4 == golden.tensors().size());  // tokens, targets, logits and loss are the others
  }
}

TEST_CASE("an export holds the same weights under the same names, and loads again") {
  fs::path folder = QUERN_SOURCE_DIR "/tests/goldens/qwen2_tied_gqa";
  fs::path out = fs::temp_directory_path() / "quern-export-test";
  fs::remove_all(out);
  PluginRun run(folder);
  run.start({1, 4});
  import_weights(*run.engine, folder.string());
  HfExport what;
  what.dtype = DType::f32;
  what.config = run.model->hf_config();
  export_weights(*run.engine, out.string(), what);
  SafetensorsFile before((folder / "model.safetensors").string()), after((out / "model.safetensors").string());
  CHECK(before.tensors().size() == after.tensors().size());
  for (const StoredTensor& tensor : before.tensors()) {
    CAPTURE(tensor.name);
    REQUIRE(after.find(tensor.name));
    CHECK(before.read_floats(tensor.name) == after.read_floats(tensor.name));
  }
  fs::path renamed = out.parent_path() / "qwen2_reloaded";
  fs::remove_all(renamed);
  fs::rename(out, renamed);
  PluginRun again(renamed);
  again.start({1, 4});
  import_weights(*again.engine, renamed.string());
  Batch batch = random_batch({1, 4}, 90, 2);
  CHECK(run.engine->logits(batch) == again.engine->logits(batch));
  fs::remove_all(renamed);
}
