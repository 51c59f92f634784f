// What the trainer adds to an export's config.json, and what it tells of a changed config. Whole runs are tested in
// tests/, where plugins are.
#include <filesystem>
#include <fstream>

#include <doctest/doctest.h>
#include <nlohmann/json.hpp>

#include "base/test_directory.h"
#include "checkpoint/changes.h"
#include "quern/error.h"
#include "run/export_config.h"

using namespace quern;
using nlohmann::json;

namespace {

void write(const std::string& path, const std::string& text) { std::ofstream(path, std::ios::binary) << text; }

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
  write(directory / "first.json", R"({"bos_token_id": 7, "eos_token_id": null})");
  write(directory / "model/config.json", R"({"bos_token_id": 8, "eos_token_id": [3, 4]})");
  write(directory / "tokenizer/tokenizer_config.json",
        R"({"bos_token": "<s>", "eos_token": {"content": "</s>"}, "pad_token": "<pad>"})");
  write(directory / "tokenizer/tokenizer.json",
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

TEST_CASE("ids that the vocabulary does not have, and things that are no ids, stay out") {
  TestDirectory directory;
  const std::string source = directory / "config.json";
  for (const char* bad : {"100", "-1", "\"2\"", "[]", "[1, 100]", "[[1]]", "1.5", "true", "{}"}) {
    CAPTURE(bad);
    write(source, std::string("{\"eos_token_id\": ") + bad + "}");
    CHECK(exported({.dtype = DType::f32, .sources = {source}, .tokenizer = {}})["eos_token_id"].is_null());
  }
  for (const char* text : {"[1]", "3", "null"}) {  // JSON, but of another shape
    write(source, text);
    write(directory / "tokenizer_config.json", R"({"eos_token": "a"})");
    write(directory / "tokenizer.json", std::string("{\"added_tokens\": ") + text + ", \"model\": " + text + "}");
    CHECK(
        exported({.dtype = DType::f32, .sources = {source}, .tokenizer = directory.path()})["eos_token_id"].is_null());
  }
}

TEST_CASE("damaged files and a tokenizer that is no folder are input errors that name them") {
  TestDirectory directory;
  auto fails = [](const ExportFacts& facts, const std::string& part) {
    try {
      exported(facts);
      FAIL("accepted");
    } catch (const Error& error) {
      CHECK(error.code() == ErrorCode::input);
      CHECK(std::string(error.what()).find(part) != std::string::npos);
    }
  };
  write(directory / "config.json", "{");
  write(directory / "tokenizer_config.json", R"({"eos_token": "a", "eos_token": "b"})");
  fails({.dtype = DType::f32, .sources = {directory.path()}, .tokenizer = {}}, "config.json");
  fails({.dtype = DType::f32, .sources = {}, .tokenizer = directory.path()}, "tokenizer_config.json");
  fails({.dtype = DType::f32, .sources = {}, .tokenizer = directory / "none"}, "checkpoint.tokenizer");
}

TEST_CASE("a library that is not the one before is reported, one that only one side has is not") {
  const std::vector<LibraryIdentity> before{{"quern", "0.1", "aa"}, {"plugin x", "1", "bb"}, {"plugin y", "1", "cc"}};
  CHECK(library_changes(before, before).empty());
  CHECK(library_changes({}, before).empty());
  CHECK(library_changes(before, {{"plugin x", "1", "dd"}, {"quern", "0.2", "aa"}, {"plugin z", "1", "cc"}}) ==
        std::vector<std::string>{"plugin x = 1, file dd (was 1, file bb)", "quern = 0.2, file aa (was 0.1, file aa)"});
}

TEST_CASE("changes between two configs are told by key, but for what moves no number") {
  const std::string before =
      "[train]\nsteps = 8 # default\nseed = 1\n[model.llama]\nrope_theta = 1e4\n[log]\nevery = 1\n";
  CHECK(config_changes(before, before).empty());
  CHECK(config_changes(before, "[train]\nsteps = 12\nseed = 1\n[model]\nllama.rope_theta = 1e4\n") ==
        std::vector<std::string>{"train.steps = 12 (was 8)"});
  CHECK(config_changes("[train]\nsteps = 8\n", before) ==
        std::vector<std::string>{"model.llama.rope_theta = 10000.0 (was not set)", "train.seed = 1 (was not set)"});
  CHECK(config_changes(before, "[train]\nsteps = 8\nseed = 1\n") ==
        std::vector<std::string>{"model.llama.rope_theta is not set (was 10000.0)"});
  CHECK(config_changes("[train", before).size() == 1);
}

TEST_CASE("what a device no longer does as it did is named, whatever else its state holds") {
  const std::string before = R"({"GPU A, lib 1": {"16x16x16 NT": "0123"}, "threads": 2})";
  CHECK(device_changes(before, before).empty());
  CHECK(
      device_changes(before, R"({"GPU A, lib 1": {"16x16x16 NT": "0123", "new": "x"}, "threads": 2, "a": 1})").empty());
  CHECK(device_changes(before, R"({"GPU A, lib 1": {"16x16x16 NT": "4567"}, "threads": 4})") ==
        "16x16x16 NT = 4567 (was 0123); threads = 4 (was 2)");
  CHECK(device_changes(before, R"({"GPU B, lib 1": {"16x16x16 NT": "0123"}, "threads": 2})") ==
        "none of \"GPU A, lib 1\" is kept");
  CHECK(device_changes(before, R"({"GPU A, lib 1": 7, "threads": 2})") == "16x16x16 NT = none (was 0123)");
  const std::string digits(128, '1'), others(128, '2');
  CHECK(device_changes(R"({"GPU": {"a product": ")" + digits + R"("}})",
                       R"({"GPU": {"a product": ")" + others + R"("}})") == "a product");
}

TEST_CASE("states of devices that are no JSON objects, or hostile ones, are told of in few words or not at all") {
  for (const char* text : {"", "[]", "{", "null", "3"}) {
    CHECK(device_changes(text, "{}").empty());
    CHECK(device_changes(R"({"a": 1})", text).empty());
  }
  std::string deep, many;
  for (int i = 0; i < 100000; ++i) deep += R"({"a":)";
  deep += "1" + std::string(100000, '}');
  CHECK(device_changes(deep, R"({"a": {"a": 1}})").empty());
  for (int i = 0; i < 1000; ++i) many += ",\"" + std::string(1000, 'n') + std::to_string(i) + "\\n\":1";
  const std::string told = device_changes("{" + many.substr(1) + "}", "{}");
  CHECK(told.size() < 1000);
  CHECK(told.find("and 995 more") != std::string::npos);
}
