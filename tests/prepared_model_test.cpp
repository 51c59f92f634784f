// Models and data as people have them: fields of config.json that say nothing about the model, paths with ~, a pointer
// in place of the weights, and what data preparation recorded of conversations, in the export and in generation.
#include <doctest/doctest.h>

#include <cstdlib>
#include <filesystem>

#include "end_to_end.h"

using namespace quern;
using namespace quern::testing;
using nlohmann::json;
namespace fs = std::filesystem;

namespace {

constexpr const char* kShort = "train.steps=1";

json parsed(const std::string& path) { return json::parse(read_text(path)); }

}  // namespace

TEST_CASE("bookkeeping in config.json is ignored, and named in one line by train, eval and plan") {
  TinyFiles files;
  REQUIRE(quern_train(files, {kShort}).code == 0);
  const std::string model = files.at("run") + "/export";
  json config = parsed(model + "/config.json");
  config["unsloth_fixed"] = true;
  config["temperature"] = 0.9;
  write_text(model + "/config.json", config.dump());
  std::string text = read_text(files.config());
  text.replace(text.find("[model.llama]"), text.find("[", text.find("[model.llama]") + 1) - text.find("[model.llama]"),
               "");
  text.replace(text.find("[model]"), 7, "[model]\nconfig = \"" + model + "\"");
  write_text(files.at("again.toml"), text);
  const std::string said = "ignored, since it changes nothing in the model: 'temperature', 'unsloth_fixed'";
  for (const std::vector<std::string>& command :
       {std::vector<std::string>{"train", files.at("again.toml"), "--set", kShort, "--set", files.run("again")},
        {"eval", files.at("again.toml"), "--from", model},
        {"plan", files.at("again.toml")}}) {
    const Outcome outcome = quern_run(command);
    CAPTURE(outcome.err);
    CHECK(outcome.code == 0);
    CHECK(occurrences(outcome.out + outcome.err, said) == 1);
  }
  config["num_experts"] = 8;
  write_text(model + "/config.json", config.dump());
  check_fails(quern_run({"train", files.at("again.toml")}), 3, {"num_experts: found 8", "does not honour"});
}

TEST_CASE("~ in a config and behind an option is the home directory") {
  TinyFiles files;
  const std::string home = files.at("home");
  auto at_home = [&] {
    ::setenv("HOME", home.c_str(), 1);
    fs::current_path(files.at(""));
  };
  fs::create_directory(home);
  const Outcome trained =
      quern_run({"train", files.config(), "--set", kShort, "--set", "log.directory=\"~/runs/a\""}, at_home);
  CAPTURE(trained.err);
  CHECK(trained.code == 0);
  CHECK(fs::exists(home + "/runs/a/export/model.safetensors"));
  CHECK_FALSE(fs::exists(files.at("~")));
  CHECK(quern_run({"eval", files.config(), "--from=~/runs/a/export", "--json=~/eval.json"}, at_home).code == 0);
  CHECK(fs::exists(home + "/eval.json"));
}

TEST_CASE("a pointer of git-lfs in place of weights or of a tokenizer is called that") {
  TinyFiles files;
  const std::string pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 2471645608\n";
  fs::create_directory(files.at("model"));
  write_text(files.at("model/model.safetensors"), pointer);
  check_fails(quern_train(files, {"train.from=" + files.at("model")}), 3,
              {"model.safetensors: a git-lfs pointer", "git lfs pull"});
  fs::create_directory(files.at("tokenizer"));
  write_text(files.at("tokenizer/tokenizer_config.json"), R"({"eos_token": "</s>"})");
  write_text(files.at("tokenizer/tokenizer.json"), pointer);
  check_fails(quern_train(files, {"checkpoint.tokenizer=" + files.at("tokenizer")}), 3,
              {"tokenizer.json: a git-lfs pointer"});
}

TEST_CASE("what preparation recorded of conversations reaches the export, and ends texts of quern generate") {
  TinyFiles files;
  write_text(files.at("meta.json"), R"({"split": "conversations", "end_tokens": [9, 64]})");  // 64: not a token
  write_text(files.at("chat_template.jinja"), "{{ used }}");
  fs::create_directory(files.at("tokenizer"));
  write_text(files.at("tokenizer/tokenizer.json"), R"({"model": {"vocab": {"</s>": 3}}})");
  write_text(files.at("tokenizer/tokenizer_config.json"), R"({"eos_token": "</s>", "chat_template": "own"})");
  write_text(files.at("tokenizer/generation_config.json"), R"({"top_k": 5, "eos_token_id": 3})");
  const Outcome trained = quern_train(files, {kShort, "checkpoint.tokenizer=" + files.at("tokenizer")});
  CAPTURE(trained.err);
  REQUIRE(trained.code == 0);
  const std::string exported = files.at("run") + "/export";
  CHECK(parsed(exported + "/config.json").at("eos_token_id") == json({9, 3}));
  CHECK(parsed(exported + "/generation_config.json") == json{{"top_k", 5}, {"eos_token_id", {9, 3}}});
  CHECK(read_text(exported + "/chat_template.jinja") == "{{ used }}");
  CHECK(parsed(exported + "/tokenizer_config.json").at("chat_template") == "{{ used }}");

  // Several templates by name, and a folder of data with another one.
  fs::create_directories(files.at("additional_chat_templates"));
  write_text(files.at("additional_chat_templates/tool_use.jinja"), "{{ tools }}");
  fs::create_directory(files.at("other"));
  fs::copy_file(files.at("train.tok"), files.at("other/train.tok"));
  write_text(files.at("other/meta.json"), R"({"end_tokens": [9]})");
  write_text(files.at("other/chat_template.jinja"), "{{ other }}");
  auto export_again = [&](const std::vector<std::string>& more) {
    fs::remove_all(files.at("run"));
    std::vector<std::string> sets{kShort, "checkpoint.tokenizer=" + files.at("tokenizer")};
    sets.insert(sets.end(), more.begin(), more.end());
    const Outcome outcome = quern_train(files, sets);
    CAPTURE(outcome.err);
    REQUIRE(outcome.code == 0);
    return outcome.out + outcome.err;
  };
  const std::string both =
      "data.tokens.train=[\"" + files.at("train.tok") + "\", \"" + files.at("other/train.tok") + "\"]";
  CHECK(occurrences(export_again({both}), "data have several chat templates") == 1);
  CHECK(read_text(exported + "/chat_template.jinja") == "{{ used }}");
  CHECK(read_text(exported + "/additional_chat_templates/tool_use.jinja") == "{{ tools }}");
  CHECK(parsed(exported + "/tokenizer_config.json").at("chat_template").at(1) ==
        json{{"name", "tool_use"}, {"template", "{{ tools }}"}});
  fs::rename(files.at("additional_chat_templates"), files.at("tokenizer/additional_chat_templates"));
  CHECK(occurrences(export_again({}), "several chat templates") == 0);
  CHECK_FALSE(fs::exists(exported + "/additional_chat_templates"));  // with the one template that was used
  fs::remove(files.at("chat_template.jinja"));
  export_again({});
  CHECK(read_text(exported + "/additional_chat_templates/tool_use.jinja") == "{{ tools }}");
  write_text(files.at("chat_template.jinja"), "{{ used }}");
  export_again({});

  // Of a model elsewhere, its own tokens count.
  const std::vector<std::string> generate{
      "generate",        files.config(), "--set",        "checkpoint.tokenizer=" + files.at("tokenizer"),
      "--prompt-tokens", "1,2",          "--max-tokens", "20",
      "--seed"};
  auto ends = [&](std::vector<std::string> more) {
    int nines = 0;
    for (int seed = 0; seed < 12; ++seed) {
      std::vector<std::string> words = generate;
      words.push_back(std::to_string(seed));
      words.insert(words.end(), more.begin(), more.end());
      const Outcome made = quern_run(words);
      REQUIRE(made.code == 0);
      const std::vector<std::int32_t> tokens = json::parse(made.out).at("tokens");
      nines += std::count(tokens.begin(), tokens.end(), 9) > 0 && tokens.back() != 9;
    }
    return nines;
  };
  CHECK(ends({}) == 0);

  // Other data record nothing.
  write_text(files.at("meta.json"), "of another program");
  fs::remove_all(files.at("run"));
  REQUIRE(quern_train(files, {kShort, "checkpoint.tokenizer=" + files.at("tokenizer")}).code == 0);
  CHECK(parsed(exported + "/config.json").at("eos_token_id") == 3);
  CHECK(parsed(exported + "/tokenizer_config.json").at("chat_template") == "own");
}
