// What a run adds to the config.json of its export.
#include <filesystem>

#include <doctest/doctest.h>
#include <nlohmann/json.hpp>

#include "base/files/test_directory.h"
#include "quern/testkit/refusal.h"
#include "run/export/export_config.h"

using namespace quern;
using nlohmann::json;

namespace {

const std::string kModel = R"({"model_type": "llama", "bos_token_id": null, "eos_token_id": null, "vocab_size": 100})";

json exported(ExportFacts facts) {
  facts.vocabulary = 100;
  return json::parse(exported_config(kModel, facts));
}

}  // namespace

TEST_CASE("an export's config keeps the model's fields and states its dtype") {
  json config = exported({});
  CHECK(config["model_type"] == "llama");
  CHECK(config["vocab_size"] == 100);
  CHECK(config["torch_dtype"] == "float32");
  CHECK(config["eos_token_id"].is_null());
  CHECK(exported({.dtype = DType::bf16, .sources = {}, .tokenizer = {}})["torch_dtype"] == "bfloat16");
}

TEST_CASE("token ids come from the first source that has them, then from the tokenizer") {
  TestDirectory directory;
  std::filesystem::create_directory(directory / "model");
  std::filesystem::create_directory(directory / "tokenizer");
  write_text(directory / "first.json", R"({"bos_token_id": 7, "eos_token_id": null})");
  write_text(directory / "model/config.json", R"({"bos_token_id": 8, "eos_token_id": [3, 4]})");
  write_text(directory / "tokenizer/tokenizer_config.json",
             R"({"bos_token": "<s>", "eos_token": {"content": "</s>"}, "pad_token": "<pad>"})");
  write_text(directory / "tokenizer/tokenizer.json",
             R"({"added_tokens": [{"id": 11, "content": "<s>"}, {"id": 12, "content": "</s>"}],
            "model": {"vocab": {"<pad>": 13}}})");
  const std::string first = directory / "first.json", model = directory / "model", tokenizer = directory / "tokenizer";

  json config = exported({.dtype = DType::f32, .sources = {"", first, model}, .tokenizer = tokenizer});
  CHECK(config["bos_token_id"] == 7);
  CHECK(config["eos_token_id"] == json({3, 4}));
  CHECK(config["pad_token_id"] == 13);  // in the vocabulary only
  config = exported({.dtype = DType::f32, .sources = {}, .tokenizer = tokenizer});
  CHECK(config["bos_token_id"] == 11);
  CHECK(config["eos_token_id"] == 12);
  // A folder of weights alone, or a file of them, is a source that states nothing.
  config = exported({.dtype = DType::f32, .sources = {tokenizer, directory / "model.safetensors"}, .tokenizer = {}});
  CHECK(config["eos_token_id"].is_null());
}

TEST_CASE("tokens that end the data's replies join the model's, in config.json and generation_config.json") {
  TestDirectory directory;
  const std::string model = directory.path(), config = directory / "config.json";
  struct Case {
    const char *given, *made;
    std::vector<std::int32_t> end_tokens;
  };
  for (const auto& [given, made, end_tokens] : std::vector<Case>{{"0", "[7,0]", {7}},
                                                                 {"null", "7", {7}},
                                                                 {"[7, 8]", "[7,8]", {7}},
                                                                 {"7", "7", {7}},
                                                                 {"[5, 6]", "[9,7,5,6]", {9, 7}},
                                                                 {"5", "5", {}},
                                                                 {"5", "5", {100}}}) {
    CAPTURE(given);
    write_text(config, std::string("{\"eos_token_id\": ") + given + "}");
    write_text(directory / "generation_config.json",
               std::string("{\"temperature\": 0.6, \"eos_token_id\": ") + given + "}");
    ExportFacts facts{.dtype = DType::f32, .vocabulary = 100, .sources = {config}, .tokenizer = {}};
    facts.end_tokens = end_tokens;
    CHECK(exported(facts)["eos_token_id"] == json::parse(made));
    const json generation = json::parse(exported_generation_config(facts));
    CHECK(generation == json{{"temperature", 0.6}, {"eos_token_id", json::parse(made)}});
    const json ids = json::parse(made);
    CHECK(end_tokens_of(exported_generation_config(facts)) ==
          (ids.is_array() ? ids : json::array({ids})).get<std::vector<std::int32_t>>());
    facts.sources = {directory / "model.safetensors"};  // weights alone
    CHECK(exported_generation_config(facts).empty());
    facts.tokenizer = model;
    CHECK(json::parse(exported_generation_config(facts)) == generation);
  }
  CHECK(end_tokens_of("{}").empty());
}

TEST_CASE("ids that the vocabulary does not have, and things that are no ids, stay out") {
  TestDirectory directory;
  const std::string source = directory / "config.json";
  for (const char* bad : {"100", "-1", "\"2\"", "[]", "[1, 100]", "[[1]]", "1.5", "true", "{}"}) {
    CAPTURE(bad);
    write_text(source, std::string("{\"eos_token_id\": ") + bad + "}");
    CHECK(exported({.dtype = DType::f32, .sources = {source}, .tokenizer = {}})["eos_token_id"].is_null());
  }
  for (const char* text : {"[1]", "3", "null"}) {  // JSON, but of another shape
    write_text(source, text);
    write_text(directory / "tokenizer_config.json", R"({"eos_token": "a"})");
    write_text(directory / "tokenizer.json", std::string("{\"added_tokens\": ") + text + ", \"model\": " + text + "}");
    CHECK(
        exported({.dtype = DType::f32, .sources = {source}, .tokenizer = directory.path()})["eos_token_id"].is_null());
  }
}

TEST_CASE("damaged files and a tokenizer that is no folder are input errors that name them") {
  TestDirectory directory;
  auto fails = [](const ExportFacts& facts, const std::string& part) {
    testkit::check_refused(ErrorCode::input, {part}, [&] { exported(facts); });
  };
  write_text(directory / "config.json", "{");
  write_text(directory / "tokenizer_config.json", R"({"eos_token": "a", "eos_token": "b"})");
  fails({.dtype = DType::f32, .sources = {directory.path()}, .tokenizer = {}}, "config.json");
  fails({.dtype = DType::f32, .sources = {}, .tokenizer = directory.path()}, "tokenizer_config.json");
  fails({.dtype = DType::f32, .sources = {}, .tokenizer = directory / "none"}, "checkpoint.tokenizer");
}
