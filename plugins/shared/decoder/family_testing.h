#pragma once
// For tests of families: models from the text of a config.json, and small ones from fields.

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include <doctest/doctest.h>

#include "quern/error.h"
#include "quern/testkit/model_conformance.h"
#include "quern/testkit/plugin_under_test.h"
#include "shared/decoder/family.h"
#include "test_paths.h"

namespace quern::decoder {

using FieldList = std::vector<std::pair<std::string, OptionValue>>;

/// All options: the file's fields over the defaults.
inline OptionValues values_from(const Family& family, const std::string& config) {
  const OptionValues fields = parse_hf_config(config, "config.json", hf_model_of(family));
  OptionValues values = default_values(options_of(family));
  for (const auto& [key, value] : fields.all()) values.set(key, value);
  return values;
}

inline std::unique_ptr<Model> model_from(const Family& family, const std::string& config) {
  return make_model(family, values_from(family, config));
}

/// Two layers of width 48 and 6 heads, 2 of them for keys and values, with `fields` over that.
inline std::unique_ptr<Model> small_model(const Family& family, const FieldList& fields = {}) {
  OptionValues values = default_values(options_of(family));
  for (const auto& [key, value] : std::vector<std::pair<const char*, std::int64_t>>{{"vocab_size", 97},
                                                                                    {"hidden_size", 48},
                                                                                    {"intermediate_size", 40},
                                                                                    {"num_hidden_layers", 2},
                                                                                    {"num_attention_heads", 6},
                                                                                    {"num_key_value_heads", 2},
                                                                                    {"head_dim", 0}})
    values.set(key, value);
  for (const auto& [key, value] : fields) values.set(key, value);
  return make_model(family, values);
}

inline const ParameterSpec& parameter(const std::vector<ParameterSpec>& list, const std::string& name) {
  auto it = std::find_if(list.begin(), list.end(), [&](const ParameterSpec& spec) { return spec.name == name; });
  REQUIRE(it != list.end());
  return *it;
}

inline void check_sound(const Model& model) {
  for (const std::string& fault : testkit::model_faults(model)) FAIL_CHECK(fault);
}

/// A published config.json: the model is sound and has as many parameters as published, and its own config.json is
/// read back as the same model.
inline void check_published(const Family& family, const std::string& config, std::int64_t parameters) {
  const std::unique_ptr<Model> model = model_from(family, config);
  check_sound(*model);
  CHECK(testkit::parameter_count(*model) == parameters);
  const std::unique_ptr<Model> again = model_from(family, model->hf_config());
  CHECK(again->hf_config() == model->hf_config());
  CHECK(testkit::model_programs(*again) == testkit::model_programs(*model));
}

/// `config` with more fields is refused in a message that has `words`.
inline void check_refuses(const Family& family, const std::string& config, const std::string& fields,
                          const char* words) {
  const std::string text = config.substr(0, config.rfind('}')) + ", " + fields + "}";
  CHECK_THROWS_WITH_AS(model_from(family, text), doctest::Contains(words), Error);
}

/// The goldens (tests/goldens), whose losses and gradients are transformers', use every option of the family that Llama
/// has not, or with another default; with `general` all options. initializer_range changes nothing in a loaded model.
inline void check_goldens(const Family& family, bool general = false) {
  const std::vector<OptionSpec> options = options_of(family), shared = options_of(Family{});
  std::set<std::string> unused;
  for (const OptionSpec& spec : options) {
    const bool is_shared = !general && std::ranges::any_of(shared, [&](const OptionSpec& other) {
      return other.key == spec.key && other.default_value == spec.default_value;
    });
    if (!is_shared && !spec.required && spec.choices.size() != 1 && spec.key != "initializer_range")
      unused.insert(spec.key);
  }
  const OptionValues defaults = default_values(options);
  for (const auto& folder : std::filesystem::directory_iterator(QUERN_SOURCE_DIR "/tests/goldens")) {
    std::ifstream file(folder.path() / "config.json");
    const std::string config((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
    if (config.find("\"model_type\": \"" + family.model_type + "\"") == std::string::npos) continue;
    const OptionValues values = values_from(family, config);
    std::erase_if(unused, [&](const std::string& key) { return *values.find(key) != *defaults.find(key); });
  }
  for (const std::string& key : unused) FAIL_CHECK("no golden has a value of " << key << " other than its default");
}

/// The plugin under test makes the family's model.
inline void check_plugin(const Family& family) {
  OptionValues values;
  for (const char* key : {"vocab_size", "hidden_size", "intermediate_size", "num_attention_heads"})
    values.set(key, std::int64_t{8});
  CHECK_THROWS_WITH_AS(testkit::plugin_under_test<Model>(family.model_type, values),
                       doctest::Contains("num_hidden_layers: missing"), Error);
  values.set("num_hidden_layers", std::int64_t{3});
  values.set("num_key_value_heads", std::int64_t{8});
  values.set("head_dim", std::int64_t{4});
  CHECK(testkit::plugin_under_test<Model>(family.model_type, values)->traits().layers == 3);
}

}  // namespace quern::decoder
