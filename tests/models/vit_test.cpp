// Vision transformers against timm: logits, loss and every gradient, its files in and out; and what they learn of
// images that this test draws.
#include <algorithm>
#include <filesystem>

#include <doctest/doctest.h>

#include "base/files/test_directory.h"
#include "golden_models.h"
#include "run/weights.h"
#include "test_paths.h"

using namespace quern;
using namespace quern::testing;

namespace fs = std::filesystem;

namespace {

/// The logit of each row's label in place of its loss.
class PickLogit final : public Kernel {
 public:
  void launch(std::span<const View> in, std::span<const View> out, const Exec&) const override {
    for (std::int64_t row = 0; row < in[0].rows(); ++row) {
      const std::int32_t label = in[1].as<std::int32_t>()[row];
      out[0].as<float>()[row] = label < 0 ? 0.0f : in[0].as<float>()[row * in[0].columns() + label];
    }
  }
};

class LogitModel final : public Model {
 public:
  explicit LogitModel(const Model& model) : model_(model) {}
  ModelTraits traits() const override { return model_.traits(); }
  std::vector<ParameterSpec> parameters() const override { return model_.parameters(); }
  void embed(ProgramBuilder& b) const override { model_.embed(b); }
  void block(ProgramBuilder& b, std::int64_t layer) const override { model_.block(b, layer); }
  void head(ProgramBuilder& b) const override {
    model_.head(b);
    Program program = b.take();
    Op& loss = program.ops.back();
    REQUIRE(loss.kind == "class_loss");
    loss.kind = "pick_logit";
    loss.outputs.resize(1);
    loss.attributes = {};
    b.replace(std::move(program));
  }
  std::string hf_config() const override { return model_.hf_config(); }

 private:
  const Model& model_;
};

/// Of which matmuls of the embedding are quantized too.
class QuantizedPatches final : public Model {
 public:
  explicit QuantizedPatches(const Model& model) : model_(model) {}
  ModelTraits traits() const override { return model_.traits(); }
  std::vector<ParameterSpec> parameters() const override {
    auto list = model_.parameters();
    list[0].quantized = true;
    return list;
  }
  void embed(ProgramBuilder& b) const override { model_.embed(b); }
  void block(ProgramBuilder& b, std::int64_t layer) const override { model_.block(b, layer); }
  void head(ProgramBuilder& b) const override { model_.head(b); }
  std::string hf_config() const override { return model_.hf_config(); }

 private:
  const Model& model_;
};

struct Golden {
  explicit Golden(const fs::path& folder) : file((folder / "golden.safetensors").string()) {
    OptionValues values;
    values.set("config", folder.string());
    plugin_host().require("model", "vit");
    model = plugin_host().create<Model>("vit", values);
    patch = model->parameters()[0].parts[0].shape;
    const Extents& images = file.at("images").extents;
    across = images[2] / patch[2];
    batch.targets = integers(file, "targets");
    geometry = {images[0], model->traits().max_positions};
    const std::vector<float> pixels = file.read_floats("images");
    std::vector<float> patches;
    for (std::int64_t image = 0; image < images[0]; ++image) {
      for (std::int64_t i = 0; i < geometry.sequence; ++i) batch.positions.push_back(static_cast<std::int32_t>(i));
      for (std::int64_t p = 0; p < across * across; ++p)
        for (std::int64_t v = 0; v < patch[1] * patch[2] * patch[3]; ++v) {
          const std::int64_t c = v / (patch[2] * patch[3]), y = p / across * patch[2] + v / patch[3] % patch[2],
                             x = p % across * patch[3] + v % patch[3];
          patches.push_back(
              pixels[static_cast<std::size_t>(((image * images[1] + c) * images[2] + y) * images[3] + x)]);
        }
    }
    batch.set("pixels", std::span<const float>(patches));
  }

  std::unique_ptr<Engine> engine(const Model& of, Device& device, const PrecisionBackend& precision, bool train) const {
    static const AdamW adamw{AdamWOptions{}};
    const std::vector<OpSpec> ops{
        {.kind = "pick_logit", .inputs = {"logits", "labels"}, .outputs = {"logit"}, .infer = [](InferContext& c) {
           c.outputs[0].shape = c.inputs[1]->shape;
           c.outputs[0].dtype = DType::f32;
         }}};
    PlanOptions options;
    options.geometry = geometry;
    options.train = train;
    return std::make_unique<Engine>(device, make_plan({of, precision, device, adamw, ops}, options));
  }

  SafetensorsFile file;
  std::unique_ptr<Model> model;
  Extents patch;
  std::int64_t across = 0;
  Batch batch;
  Geometry geometry;
};

}  // namespace

TEST_CASE("vision transformers agree with timm: logits, loss and every gradient") {
  const std::vector<fs::path> cases = golden_cases("image_goldens");
  REQUIRE(cases.size() == 3);
  const std::unique_ptr<Device> device = cpu_device();
  device->add_kernel({"cpu", "pick_logit", [](const OpInstance&) { return std::make_unique<PickLogit>(); }});
  const testkit::PlainPrecision fp32;
  for (const fs::path& folder : cases) {
    CAPTURE(folder.filename().string());
    const Golden golden(folder);
    const std::vector<float> want = golden.file.read_floats("logits");
    const auto rows = golden.batch.targets.size(), classes = want.size() / rows;
    const LogitModel logits(*golden.model);
    const std::unique_ptr<Engine> reads = golden.engine(logits, *device, fp32, false);
    import_weights(*reads, folder.string());
    std::vector<float> got;
    for (std::size_t row = 0; row < rows; ++row)
      for (std::size_t k = 0; k < classes; ++k) {
        Batch one = golden.batch;
        one.targets.assign(rows, -1);
        one.targets[row] = static_cast<std::int32_t>(k);
        got.push_back(static_cast<float>(reads->evaluate(one).loss_sum));
      }
    check_close(got, want, kFp32);

    const std::unique_ptr<Engine> trains = golden.engine(*golden.model, *device, fp32, true);
    import_weights(*trains, folder.string());
    trains->micro_step(golden.batch, {});
    const LossStats loss = trains->result().loss;
    CHECK(loss.loss_sum / loss.valid_tokens == doctest::Approx(golden.file.read_floats("loss")[0]).epsilon(1e-5));
    CHECK(check_gradients(*trains, golden.file, kFp32) + 4 == golden.file.tensors().size());
    double correct = 0;
    for (std::size_t row = 0; row < rows; ++row) {
      const auto first = want.begin() + static_cast<std::ptrdiff_t>(row * classes);
      const auto best = std::max_element(first, first + static_cast<std::ptrdiff_t>(classes)) - first;
      correct += best == golden.batch.targets[row] ? 1 : 0;
    }
    CHECK(loss.correct == correct);
  }
}

TEST_CASE("pixels as bytes give the losses of the numbers that they stand for, to the bit") {
  const fs::path folder = QUERN_SOURCE_DIR "/tests/image_goldens/vit_token";
  const std::unique_ptr<Device> device = cpu_device();
  const Golden golden(folder);
  OptionValues values;
  values.set("config", folder.string());
  values.set("pixels", std::string("u8"));
  const auto of_bytes = plugin_host().create<Model>("vit", values);
  const auto channels = static_cast<std::size_t>(golden.patch[1]), rows = golden.batch.targets.size();
  const std::size_t count = golden.batch.inputs.at("pixels").size() / sizeof(float),
                    part = static_cast<std::size_t>(golden.patch[2] * golden.patch[3]);
  std::vector<float> scale, numbers;
  for (std::size_t i = 0; i < rows * 2 * channels; ++i) scale.push_back(0.001f * static_cast<float>(1 + i));
  std::vector<std::uint8_t> bytes;
  for (std::size_t i = 0; i < count; ++i) {
    bytes.push_back(static_cast<std::uint8_t>(i * 7 + i / 256));
    const float* row = &scale[i / (count / rows) * 2 * channels];
    const std::size_t channel = i / part % channels;
    numbers.push_back(static_cast<float>(bytes.back()) * row[channel] + row[channels + channel]);
  }
  auto loss = [&](const Model& model, const Batch& batch, DType dtype) {
    const auto engine = golden.engine(model, *device, testkit::PlainPrecision(dtype), true);
    import_weights(*engine, folder.string());
    engine->micro_step(batch, {});
    return engine->result().loss.loss_sum;
  };
  Batch sent = golden.batch, wide = golden.batch;
  sent.set("pixels", std::span<const std::uint8_t>(bytes));
  sent.set("pixel_scale", std::span<const float>(scale));
  wide.set("pixels", std::span<const float>(numbers));
  for (const DType dtype : {DType::f32, DType::bf16})
    CHECK(loss(*of_bytes, sent, dtype) == loss(*golden.model, wide, dtype));
  sent.inputs.erase("pixel_scale");
  CHECK_THROWS_WITH_AS(loss(*of_bytes, sent, DType::f32), doctest::Contains("pixel_scale"), Error);
}

TEST_CASE("vision transformers train in 8 bits, but for the patches' embedding") {
  const std::unique_ptr<Device> device = cpu_device();
  for (const fs::path& folder : golden_cases("image_goldens")) {
    CAPTURE(folder.filename().string());
    const Golden golden(folder);
    const double want = golden.file.read_floats("loss")[0];
    for (const char* id : {"e4m3", "int8"}) {
      CAPTURE(id);
      plugin_host().require("precision", id);
      const auto precision = plugin_host().create<PrecisionBackend>(id, {});
      const std::unique_ptr<Engine> engine = golden.engine(*golden.model, *device, *precision, true);
      import_weights(*engine, folder.string());
      const auto quantizes = [&](const PlacedProgram& placed) {
        return std::any_of(placed.program.ops.begin(), placed.program.ops.end(),
                           [](const Op& op) { return op.kind.starts_with("quantize"); });
      };
      CHECK(!quantizes(engine->plan().embed));
      CHECK(quantizes(engine->plan().layer_class(0).forward));
      double loss = 0;
      for (std::uint32_t step = 0; step < 3; ++step) {  // from the second on with scales of the one before
        engine->micro_step(golden.batch, {.step = step, .learning_rate = 1e-2f, .updates = step});
        engine->update();
        const LossStats stats = engine->result().loss;
        loss = stats.loss_sum / stats.valid_tokens;
        if (step == 0) CHECK(loss == doctest::Approx(want).epsilon(0.02));
      }
      CHECK(loss < want);
      const QuantizedPatches whole(*golden.model);
      if (id == std::string("e4m3"))
        CHECK_THROWS_WITH_AS(golden.engine(whole, *device, *precision, true),
                             doctest::Contains("a matmul whose scale has a history"), Error);
      else
        golden.engine(whole, *device, *precision, true)->micro_step(golden.batch, {});
    }
  }
}

TEST_CASE("an export of a vision transformer has timm's names, shapes and values") {
  const fs::path folder = QUERN_SOURCE_DIR "/tests/image_goldens/vit_token";
  const TestDirectory directory;
  const std::unique_ptr<Device> device = cpu_device();
  const Golden golden(folder);
  const std::unique_ptr<Engine> engine = golden.engine(*golden.model, *device, testkit::PlainPrecision(), true);
  import_weights(*engine, folder.string());
  HfExport what;
  what.dtype = DType::f32;
  what.config = golden.model->hf_config();
  const std::string out = directory / "export";
  export_weights(master_reader(*engine), first_weights(*engine, {}), nullptr, out, what);
  const SafetensorsFile before((folder / "model.safetensors").string()), after(out + "/model.safetensors");
  CHECK(before.tensors().size() == after.tensors().size());
  for (const StoredTensor& tensor : before.tensors()) {
    CAPTURE(tensor.name);
    REQUIRE(after.find(tensor.name));
    CHECK(after.at(tensor.name).extents == tensor.extents);
    CHECK(before.read_floats(tensor.name) == after.read_floats(tensor.name));
  }
}
