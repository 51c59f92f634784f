// Export then import is the identity (up to the export's rounding); every kind of wrong model is refused by name.
#include "hf/hf_weights.h"

#include <sys/stat.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <limits>

#include <doctest/doctest.h>

#include "base/files/test_directory.h"
#include "checkpoint/test_support.h"
#include "quern/numeric.h"
#include "quern/testkit/compare.h"
#include "quern/testkit/refusal.h"

using namespace quern;
using testkit::check_refused;
namespace fs = std::filesystem;

namespace {

constexpr std::int64_t kLayers = 3;

std::vector<ParameterSpec> small_model(bool tied) {
  std::vector<ParameterSpec> parameters{
      matrix("embed.weight", ParameterGroup::embedding, "model.embed_tokens.weight", 11, 5),
      packed("qkv.weight", ParameterGroup::block,
             {{"model.layers.{layer}.self_attn.q_proj.weight", 6, {}},
              {"model.layers.{layer}.self_attn.k_proj.weight", 2, {}},
              {"model.layers.{layer}.self_attn.v_proj.weight", 2, {}}},
             5),
      packed("qkv.bias", ParameterGroup::block,
             {{"model.layers.{layer}.self_attn.q_proj.bias", 6, {}},
              {"model.layers.{layer}.self_attn.k_proj.bias", 2, {}},
              {"model.layers.{layer}.self_attn.v_proj.bias", 2, {}}},
             1),
      vector("norm.weight", ParameterGroup::head, "model.norm.weight", 5, Init::Kind::ones)};
  if (!tied) parameters.push_back(matrix("lm_head.weight", ParameterGroup::head, "lm_head.weight", 11, 5));
  return parameters;
}

using Values = std::map<std::pair<std::string, std::int64_t>, std::vector<float>>;

Values random_values(const std::vector<ParameterSpec>& parameters) {
  Values values;
  std::uint64_t seed = 0;
  for (const ParameterSpec& parameter : parameters)
    for (std::int64_t layer = 0; layer < (parameter.group == ParameterGroup::block ? kLayers : 1); ++layer)
      values[{parameter.name, parameter.group == ParameterGroup::block ? layer : -1}] =
          testkit::random_normal(parameter.count(), ++seed);
  return values;
}

/// Hands every part that the files have to sink(parameter, layer, first, values), in pieces.
template <class Sink>
void import_hf_weights(const WeightFiles& files, const std::vector<ParameterSpec>& parameters, std::int64_t layers,
                       Sink sink) {
  check_hf_weights(files, parameters, layers);
  for (const ParameterSpec& parameter : parameters)
    for (std::int64_t layer = 0; layer < (parameter.group == ParameterGroup::block ? layers : 1); ++layer) {
      std::int64_t begin = 0;
      for (const ParameterPart& part : parameter.parts) {
        const std::int64_t count = part.rows * parameter.columns(), most = part.as_stored() ? 7 : count;
        for (std::int64_t done = 0; done < count; done += most) {
          std::vector<float> values(static_cast<std::size_t>(std::min(most, count - done)));
          read_hf_part(files, parameter, part, layer, done, values);
          sink(parameter, parameter.group == ParameterGroup::block ? layer : -1, begin + done,
               std::span<const float>(values));
        }
        begin += count;
      }
    }
}

WeightReader reader_of(const Values& values) {
  return [&values](const ParameterSpec& parameter, std::int64_t layer, std::int64_t first, std::span<float> out) {
    const auto& from = values.at({parameter.name, layer});
    for (std::size_t i = 0; i < out.size(); ++i) out[i] = from.at(static_cast<std::size_t>(first) + i);
  };
}

Values import_all(const std::string& path, const std::vector<ParameterSpec>& parameters) {
  Values values;
  import_hf_weights(
      WeightFiles(path), parameters, kLayers,
      [&](const ParameterSpec& parameter, std::int64_t layer, std::int64_t first, std::span<const float> piece) {
        auto& to = values[{parameter.name, layer}];
        CHECK(static_cast<std::int64_t>(to.size()) == first);  // ascending, no gaps
        to.insert(to.end(), piece.begin(), piece.end());
      });
  return values;
}

/// Writes the model's tensors after `change` had its way with them: (name, extents, values).
struct RawTensor {
  std::string name;
  Extents extents;
  std::vector<float> values;
};
void write_model(const std::string& path, const std::vector<ParameterSpec>& parameters, const Values& values,
                 const std::function<void(std::vector<RawTensor>&)>& change) {
  std::vector<RawTensor> tensors;
  for (const auto& [key, all] : values)
    for (const ParameterSpec& parameter : parameters) {
      if (parameter.name != key.first) continue;
      auto at = all.begin();
      for (const ParameterPart& part : parameter.parts) {
        auto end = at + part.rows * parameter.columns();
        tensors.push_back({hf_tensor_name(part, key.second), hf_tensor_extents(parameter, part), {at, end}});
        at = end;
      }
    }
  change(tensors);
  std::vector<TensorDeclaration> declared;
  for (const RawTensor& tensor : tensors) declared.push_back({tensor.name, StoredType::f32, tensor.extents});
  SafetensorsWriter writer(path, declared);
  for (const RawTensor& tensor : tensors) writer.write(std::as_bytes(std::span(tensor.values)));
  writer.finish();
}

}  // namespace

TEST_CASE("importing an export gives the same weights, rounded to its type") {
  for (bool tied : {false, true})
    for (DType dtype : {DType::f32, DType::bf16}) {
      TestDirectory directory;
      auto parameters = small_model(tied);
      Values values = random_values(parameters);
      export_hf_model(directory / "out", {dtype, "{}", "", ""}, parameters, kLayers, reader_of(values));
      Values got = import_all(directory / "out", parameters);
      for (auto& [key, all] : values)
        for (float& value : all) value = round_to(dtype, value);
      CHECK(got == values);
      SafetensorsFile file(directory / "out/model.safetensors");
      CHECK(file.metadata().at("format") == "pt");
      CHECK(file.at("model.layers.2.self_attn.k_proj.weight").extents == Extents{2, 5});
      CHECK(file.at("model.layers.2.self_attn.k_proj.bias").extents == Extents{2});
    }
}

TEST_CASE("parts that are stored in another form than the file's are turned on the way in and out") {
  std::vector<ParameterSpec> parameters = small_model(true);
  parameters[1].parts[0].row_order = {2, 0, 1};  // twice in 6 rows
  parameters[1].parts[1].transposed = true;
  parameters[1].parts[2].row_order = {1, 0}, parameters[1].parts[2].transposed = true;
  parameters[2].parts[0].row_order = {5, 4, 3, 2, 1, 0};
  parameters[3].parts[0].offset = 1;
  TestDirectory directory;
  const Values values = random_values(parameters);
  export_hf_model(directory / "out", {DType::f32, "{}", "", ""}, parameters, kLayers, reader_of(values));
  const SafetensorsFile file(directory / "out/model.safetensors");
  const std::string layer = "model.layers.1.self_attn.";
  const std::vector<float>&qkv = values.at({"qkv.weight", 1}), &bias = values.at({"qkv.bias", 1});
  const std::vector<float> q = file.read_floats(layer + "q_proj.weight"), k = file.read_floats(layer + "k_proj.weight"),
                           v = file.read_floats(layer + "v_proj.weight"), b = file.read_floats(layer + "q_proj.bias"),
                           norm = file.read_floats("model.norm.weight");
  CHECK(file.at(layer + "q_proj.weight").extents == Extents{6, 5});
  CHECK(file.at(layer + "k_proj.weight").extents == Extents{5, 2});
  CHECK(q[2 * 5 + 3] == qkv[0 * 5 + 3]);  // stored row 0 is the tensor's row 2
  CHECK(q[3 * 5 + 1] == qkv[4 * 5 + 1]);  // of the second group, stored row 1 is row 0
  CHECK(k[3 * 2 + 1] == qkv[7 * 5 + 3]);
  CHECK(v[3 * 2 + 1] == qkv[8 * 5 + 3]);  // stored row 0 is the tensor's row 1
  CHECK(b[5] == bias[0]);
  CHECK(norm[2] == values.at({"norm.weight", -1})[2] - 1);
  const Values back = import_all(directory / "out", parameters);
  for (const auto& [key, want] : values) {
    const std::string& name = key.first;
    CAPTURE(name);
    // The offset costs the last bits of numbers near zero.
    CHECK(testkit::mismatch(back.at(key), want, 0, name == "norm.weight" ? 1e-7 : 0) == "");
  }
}

TEST_CASE("a parameter longer than the buffer arrives in pieces that fit together") {
  TestDirectory directory;
  std::vector<ParameterSpec> parameters{matrix("embed.weight", ParameterGroup::embedding, "e", 1025, 2049)};
  Values values;
  auto& all = values[{"embed.weight", -1}];
  for (std::int64_t i = 0; i < parameters[0].count(); ++i) all.push_back(static_cast<float>(i));
  export_hf_model(directory / "out", {DType::f32, "{}", "", ""}, parameters, kLayers, reader_of(values));
  CHECK(import_all(directory / "out", parameters) == values);
}

TEST_CASE("models that do not fit are refused by name before a value moves") {
  TestDirectory directory;
  auto parameters = small_model(true);
  Values values = random_values(parameters);
  auto refused = [&](const std::string& words, const std::function<void(std::vector<RawTensor>&)>& change) {
    write_model(directory / "model.safetensors", parameters, values, change);
    bool moved = false;
    check_refused(ErrorCode::input, {words}, [&] {
      import_hf_weights(WeightFiles(directory.path()), parameters, kLayers, [&](auto&&...) { moved = true; });
    });
    CHECK(!moved);
  };
  auto named = [](std::vector<RawTensor>& tensors, const std::string& name) -> RawTensor& {
    return *std::find_if(tensors.begin(), tensors.end(), [&](const RawTensor& tensor) { return tensor.name == name; });
  };
  refused(
      "1 tensors are missing: 'model.norm.weight'; check that config.json belongs to these weights",
      [&](auto& tensors) { tensors.erase(tensors.begin() + (&named(tensors, "model.norm.weight") - tensors.data())); });
  refused("20 tensors are missing", [](auto& tensors) { tensors.resize(0); });
  refused("and 12 more", [](auto& tensors) { tensors.resize(0); });
  refused("2 tensors are not part of the model: found 'model.layers.3.mlp', 'x'", [](auto& tensors) {
    tensors.push_back({"x", {1}, {1}});
    tensors.push_back({"model.layers.3.mlp", {1}, {1}});
  });
  refused("shape of tensor 'model.layers.1.self_attn.q_proj.weight': found (5, 6), expected (6, 5)",
          [&](auto& tensors) {
            named(tensors, "model.layers.1.self_attn.q_proj.weight").extents = {5, 6};
          });
  refused("found (5, 1), expected (5)", [&](auto& tensors) { named(tensors, "model.norm.weight").extents = {5, 1}; });
  refused("differs from the embedding", [&](auto& tensors) {
    RawTensor head = named(tensors, "model.embed_tokens.weight");
    head.name = "lm_head.weight";
    head.values[7] += 1;
    tensors.push_back(head);
  });
}

TEST_CASE("a tied head that repeats the embedding, and rope buffers, may be there") {
  TestDirectory directory;
  auto parameters = small_model(true);
  Values values = random_values(parameters);
  write_model(directory / "model.safetensors", parameters, values, [](std::vector<RawTensor>& tensors) {
    for (RawTensor tensor : std::vector<RawTensor>(tensors))
      if (tensor.name == "model.embed_tokens.weight")
        tensors.push_back({"lm_head.weight", tensor.extents, tensor.values});
    tensors.push_back({"model.layers.0.self_attn.rotary_emb.inv_freq", {1}, {1}});
  });
  CHECK(import_all(directory.path(), parameters) == values);
}

TEST_CASE("weights that are not finite numbers are refused by name, read or written") {
  auto parameters = small_model(true);
  for (float bad : {std::numeric_limits<float>::quiet_NaN(), -std::numeric_limits<float>::infinity()}) {
    TestDirectory directory;
    Values values = random_values(parameters);
    values.at({"qkv.weight", 1})[6 * 5 + 3] = values.at({"qkv.weight", 1})[6 * 5 + 9] = bad;
    write_model(directory / "model.safetensors", parameters, values, [](auto&) {});
    check_refused(
        ErrorCode::input,
        {"2 of 10 elements of tensor 'model.layers.1.self_attn.k_proj.weight' are not finite, the first at element 3"},
        [&] { import_all(directory.path(), parameters); });
    check_refused(ErrorCode::numerics, {"'model.layers.1.self_attn.k_proj.weight'"}, [&] {
      export_hf_model(directory / "out", {DType::bf16, "{}", "", ""}, parameters, kLayers, reader_of(values));
    });
    CHECK(!fs::exists(directory / "out"));
    CHECK(directory.entries() == 1);
  }
}

TEST_CASE("weights that are not real numbers are refused") {
  TestDirectory directory;
  std::vector<ParameterSpec> parameters{vector("norm.weight", ParameterGroup::head, "n", 2, Init::Kind::ones)};
  SafetensorsWriter writer(directory / "model.safetensors", {{"n", StoredType::i32, {2}}});
  writer.write(std::vector<std::byte>(8));
  writer.finish();
  check_refused(ErrorCode::input, {"type of tensor 'n': found I32"}, [&] { import_all(directory.path(), parameters); });
}

TEST_CASE("an export replaces an older one whole, copies the tokenizer, and destroys nothing else") {
  TestDirectory directory;
  auto parameters = small_model(false);
  Values values = random_values(parameters);
  fs::create_directory(directory / "tokenizer");
  HfExport what{DType::bf16, "{\"a\":1}", "{\"b\":2}", directory / "tokenizer"};
  auto write = [&] { export_hf_model(directory / "models/out/", what, parameters, kLayers, reader_of(values)); };
  check_refused(ErrorCode::input, {"no tokenizer files"}, [&] { write(); });
  CHECK(fs::is_empty(directory / "models"));
  write_text(directory / "tokenizer/tokenizer.json", "{}");
  write_text(directory / "tokenizer/merges.txt", "m");
  write_text(directory / "tokenizer/secret.txt", "s");
  write();
  CHECK(read_text(directory / "models/out/config.json") == "{\"a\":1}");
  CHECK(read_text(directory / "models/out/generation_config.json") == "{\"b\":2}");
  CHECK(read_text(directory / "models/out/merges.txt") == "m");
  CHECK(std::distance(fs::directory_iterator(directory / "models/out"), {}) == 5);

  write_text(directory / "tokenizer/tokenizer_config.json", R"({"eos_token": "é", "chat_template": "own", "a": 1})");
  what.chat_templates = {{"default", "{{ used }}"}};
  write();
  CHECK(read_text(directory / "models/out/chat_template.jinja") == "{{ used }}");
  CHECK(read_text(directory / "models/out/tokenizer_config.json") ==
        "{\n  \"eos_token\": \"é\",\n  \"chat_template\": \"{{ used }}\",\n  \"a\": 1\n}\n");
  write_text(directory / "tokenizer/tokenizer_config.json", R"({"eos_token": "é"})");
  write();
  CHECK(read_text(directory / "models/out/tokenizer_config.json") == R"({"eos_token": "é"})");

  what.chat_templates["tool_use"] = "{{ tools }}";
  write();
  write();  // the older export's folder is no obstacle
  CHECK(read_text(directory / "models/out/additional_chat_templates/tool_use.jinja") == "{{ tools }}");
  write_text(directory / "models/out/additional_chat_templates/mine.txt", "mine");
  check_refused(ErrorCode::resources, {"'additional_chat_templates/mine.txt'"}, [&] { write(); });
  fs::remove(directory / "models/out/additional_chat_templates/mine.txt");

  what.config = "{\"a\":2}";
  what.generation_config = "";
  write();
  CHECK(read_text(directory / "models/out/config.json") == "{\"a\":2}");
  CHECK(!fs::exists(directory / "models/out/generation_config.json"));
  // A fault while the next one is made leaves the older one as it was.
  values.at({"norm.weight", -1})[0] = std::numeric_limits<float>::quiet_NaN();
  what.config = "{\"a\":3}";
  check_refused(ErrorCode::numerics, {"model.norm.weight"}, [&] { write(); });
  CHECK(read_text(directory / "models/out/config.json") == "{\"a\":2}");
  CHECK(std::distance(fs::directory_iterator(directory / "models"), {}) == 1);

  values = random_values(parameters);
  write_text(directory / "models/out/thesis.txt", "years of work");
  check_refused(ErrorCode::resources, {"'thesis.txt'"}, [&] { write(); });
  CHECK(read_text(directory / "models/out/thesis.txt") == "years of work");
}

TEST_CASE("tokenizer files that cannot be copied are found before the export") {
  TestDirectory directory;
  const std::string file = directory / "tokenizer/tokenizer.json";
  const HfExport what{DType::f32, "{}", "", directory / "tokenizer"};
  auto check = [&] { check_export(directory / "out", what); };
  fs::create_directories(file);
  check_refused(ErrorCode::input, {"tokenizer.json: cannot be read: found a directory"}, check);
  fs::remove(file);
  REQUIRE(::mkfifo(file.c_str(), 0600) == 0);
  check_refused(ErrorCode::input, {"tokenizer.json: cannot be read: found not a regular file"}, check);
  fs::remove(file);
  fs::create_symlink("nowhere", file);
  write_text(directory / "tokenizer/merges.txt", "m");
  check_refused(ErrorCode::input, {"tokenizer.json: cannot be opened"}, check);
  fs::remove(file);
  check();
}

TEST_CASE("a model of another program is not replaced, though its files have an export's names") {
  TestDirectory directory;
  auto parameters = small_model(false);
  Values values = random_values(parameters);
  const std::string out = directory / "out", weights = out + "/model.safetensors";
  fs::create_directory(out);
  auto write = [&] { export_hf_model(out, {DType::f32, "{}", "", ""}, parameters, kLayers, reader_of(values)); };
  write();  // over an empty directory
  write();
  write_model(weights, parameters, values, [](auto&) {});
  const std::string downloaded = read_text(weights);
  check_refused(ErrorCode::resources, {"model.safetensors of another program"}, [&] { write(); });
  check_refused(ErrorCode::resources, {"model.safetensors of another program"}, [&] { check_export(out, {}); });
  CHECK(read_text(weights) == downloaded);
  fs::remove(weights);
  check_refused(ErrorCode::resources, {"no model.safetensors"}, [&] { write(); });  // a tokenizer, perhaps
  CHECK(read_text(out + "/config.json") == "{}");
}
