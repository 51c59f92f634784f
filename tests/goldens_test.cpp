// Models on the CPU device against transformers, and an export against its own import.
#include <filesystem>

#include <doctest/doctest.h>

#include "base/files/test_directory.h"
#include "checkpoint/safetensors.h"
#include "golden_models.h"
#include "run/weights.h"
#include "test_paths.h"

using namespace quern;
using namespace quern::testing;

namespace fs = std::filesystem;

TEST_CASE("models agree with transformers: logits, loss and every gradient") {
  std::vector<fs::path> cases = golden_cases();
  REQUIRE(cases.size() >= 23);
  std::unique_ptr<Device> device = cpu_device();
  for (const fs::path& folder : cases) check_golden(folder, *device, "fp32", kFp32);
}

TEST_CASE("models in bf16 agree with transformers in double precision") {
  std::unique_ptr<Device> device = cpu_device();
  for (const fs::path& folder : golden_cases()) check_golden(folder, *device, "bf16", kBf16);
}

TEST_CASE("an export holds the same weights under the same names, and loads again") {
  fs::path folder = QUERN_SOURCE_DIR "/tests/goldens/qwen2_tied_gqa";
  const TestDirectory directory;
  fs::path out = directory / "export";
  std::unique_ptr<Device> device = cpu_device();
  PluginRun run(folder, *device);
  run.start({1, 4});
  import_weights(*run.engine, folder.string());
  HfExport what;
  what.dtype = DType::f32;
  what.config = run.model->hf_config();
  export_weights(master_reader(*run.engine), first_weights(*run.engine, {}), nullptr, out.string(), what);
  SafetensorsFile before((folder / "model.safetensors").string()), after((out / "model.safetensors").string());
  CHECK(before.tensors().size() == after.tensors().size());
  for (const StoredTensor& tensor : before.tensors()) {
    CAPTURE(tensor.name);
    REQUIRE(after.find(tensor.name));
    CHECK(before.read_floats(tensor.name) == after.read_floats(tensor.name));
  }
  fs::path renamed = directory / "qwen2_reloaded";
  fs::rename(out, renamed);
  PluginRun again(renamed, *device);
  again.start({1, 4});
  import_weights(*again.engine, renamed.string());
  Batch batch = random_batch({1, 4}, 90, 2);
  CHECK(run.engine->logits(batch) == again.engine->logits(batch));
}
