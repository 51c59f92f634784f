#include "run/export/export_config.h"

#include <algorithm>
#include <filesystem>
#include <optional>

#include "base/files/json_file.h"
#include "base/files/strict_json.h"
#include "quern/error.h"

namespace quern {

namespace {

namespace fs = std::filesystem;
using nlohmann::json;

constexpr int kDepth = 32;
constexpr std::size_t kLargestConfig = std::size_t{1} << 20;
constexpr std::size_t kLargestTokenizer = std::size_t{256} << 20;  // large vocabularies have 10 to 40 MiB

// Null when there is no such file, or it is not an object.
json read_object(const fs::path& path, std::size_t largest) {
  std::error_code ignored;
  if (!fs::is_regular_file(path, ignored)) return nullptr;
  json object = read_strict_json(path.string(), largest, kDepth);
  return object.is_object() ? object : json();
}

json member(const json& object, const std::string& key) {
  return object.is_object() && object.contains(key) ? object.at(key) : json();
}

// A token id, or a list of them as models with several ends of text have.
bool is_id(const json& value, std::int64_t vocabulary) {
  if (value.is_array())
    return !value.empty() && std::all_of(value.begin(), value.end(), [vocabulary](const json& item) {
      return !item.is_array() && is_id(item, vocabulary);
    });
  return value.is_number_integer() && value >= 0 && value < vocabulary;
}

/// `known`, an id or a list of them or null, with the entries of `more` that it lacks before it.
json with_end_tokens(const json& known, const ExportFacts& facts) {
  json ids = json::array();
  auto add = [&](const json& id) {
    if (is_id(id, facts.vocabulary) && std::find(ids.begin(), ids.end(), id) == ids.end()) ids.push_back(id);
  };
  const json before = known.is_array() ? known : known.is_null() ? json::array() : json::array({known});
  for (std::int32_t token : facts.end_tokens)
    if (std::find(before.begin(), before.end(), json(token)) == before.end()) add(token);
  if (ids.empty()) return known;
  for (const json& id : before) add(id);
  return ids.size() == 1 ? ids[0] : ids;
}

// Of a folder, or of a config.json in one; weights have none beside them.
fs::path folder_of(const std::string& source) {
  std::error_code ignored;
  if (fs::is_directory(source, ignored)) return source;
  return fs::path(source).extension() == ".json" ? fs::path(source).parent_path() / "." : fs::path();
}

/// The tokens of a tokenizer, read when first asked for.
class Tokenizer {
 public:
  explicit Tokenizer(const std::string& folder) : folder_(folder) {
    std::error_code ignored;
    if (folder.empty()) return;
    if (!fs::is_directory(folder, ignored))
      throw Error(ErrorCode::input, {.where = folder,
                                     .what = "no folder of a tokenizer",
                                     .expected = "a folder with tokenizer.json or the like",
                                     .next = "correct checkpoint.tokenizer"});
    config_ = read_object(fs::path(folder) / "tokenizer_config.json", kLargestConfig * 16);
  }

  /// The id of the token that tokenizer_config.json calls `name` ("eos_token"); null when it has none.
  json id_of(const std::string& name) {
    json token = member(config_, name);
    if (token.is_object()) token = member(token, "content");
    if (!token.is_string()) return nullptr;
    if (!tokens_) tokens_ = read_object(fs::path(folder_) / "tokenizer.json", kLargestTokenizer);
    for (const json& added : member(*tokens_, "added_tokens"))
      if (member(added, "content") == token) return member(added, "id");
    return member(member(member(*tokens_, "model"), "vocab"), token.get<std::string>());
  }

 private:
  std::string folder_;
  json config_;
  std::optional<json> tokens_;
};

}  // namespace

std::string exported_config(const std::string& model_config, const ExportFacts& facts) {
  json config = parse_strict_json("config.json of the model", model_config, kDepth);
  if (facts.dtype != DType::f32 && facts.dtype != DType::bf16) fail_internal("export", "weights are f32 or bf16");
  config["torch_dtype"] = facts.dtype == DType::f32 ? "float32" : "bfloat16";
  std::vector<json> sources;
  for (const std::string& source : facts.sources) {
    if (source.empty()) continue;
    std::error_code ignored;
    bool is_config = fs::path(source).extension() == ".json";  // else weights, which have none beside them
    if (fs::is_directory(source, ignored))
      sources.push_back(read_object(fs::path(source) / "config.json", kLargestConfig));
    else if (is_config)
      sources.push_back(read_object(source, kLargestConfig));
  }
  Tokenizer tokenizer(facts.tokenizer);
  for (const std::string name : {"bos_token", "eos_token", "pad_token"}) {
    json& id = config[name + "_id"];
    for (const json& source : sources)
      if (json given = member(source, name + "_id"); id.is_null() && is_id(given, facts.vocabulary)) id = given;
    if (!id.is_null()) continue;
    if (json found = tokenizer.id_of(name); is_id(found, facts.vocabulary)) id = found;
  }
  config["eos_token_id"] = with_end_tokens(config["eos_token_id"], facts);
  return config.dump(2) + "\n";
}

std::string exported_generation_config(const ExportFacts& facts) {
  std::vector<std::string> places = facts.sources;
  places.push_back(facts.tokenizer);
  for (const std::string& place : places) {
    const fs::path folder = folder_of(place);
    if (folder.empty()) continue;
    json config = read_object(folder / "generation_config.json", kLargestConfig);
    if (!config.is_object()) continue;
    if (json ids = with_end_tokens(member(config, "eos_token_id"), facts); !ids.is_null()) config["eos_token_id"] = ids;
    return config.dump(2) + "\n";
  }
  return {};
}

std::vector<std::int32_t> end_tokens_of(const std::string& config) {
  const json ids = member(json::parse(config, nullptr, false), "eos_token_id");
  std::vector<std::int32_t> tokens;
  for (const json& id : ids.is_array() ? ids : json::array({ids}))
    if (is_id(id, std::int64_t{1} << 31)) tokens.push_back(id.get<std::int32_t>());
  return tokens;
}

}  // namespace quern
