// Generation against the program that gives all logits, and `quern generate` and samples as a user meets them.
#include <algorithm>
#include <filesystem>

#include <doctest/doctest.h>

#include "end_to_end.h"
#include "generate/generator.h"
#include "generate/prompts.h"
#include "training_fixture.h"

using namespace quern;
using namespace quern::testing;

namespace {

PlanOptions options_for(std::int64_t batch, std::int64_t sequence) {
  PlanOptions options;
  options.geometry = {batch, sequence};
  options.train = false;
  options.next_logits = true;
  options.logits = true;
  return options;
}

// The oracle: all logits of one row, the largest behind the prefix.
std::vector<std::int32_t> greedy_by_all_logits(TinyRun& run, std::vector<std::int32_t> text, std::int64_t count) {
  const Geometry geometry = run.plan().options.geometry;
  const auto vocabulary = static_cast<std::size_t>(run.plan().model.vocabulary);
  std::vector<std::int32_t> made;
  for (std::int64_t i = 0; i < count; ++i) {
    Batch batch;
    batch.tokens.assign(static_cast<std::size_t>(geometry.tokens()), 1);  // other padding than generate's
    batch.targets.assign(batch.tokens.size(), -1);
    std::copy(text.begin(), text.end(), batch.tokens.begin());
    for (std::size_t at = 0; at < batch.tokens.size(); ++at)
      batch.positions.push_back(static_cast<std::int32_t>(static_cast<std::int64_t>(at) % geometry.sequence));
    const std::vector<float> logits = run.engine().logits(batch);
    auto begin = logits.begin() + static_cast<std::ptrdiff_t>((text.size() - 1) * vocabulary);
    made.push_back(
        static_cast<std::int32_t>(std::max_element(begin, begin + static_cast<std::ptrdiff_t>(vocabulary)) - begin));
    text.push_back(made.back());
  }
  return made;
}

const std::vector<Prompt> kPrompts{
    {"a", {3, 1, 4}}, {"b", {9}}, {"c", {1, 2, 3, 4, 5, 6, 7}}, {"d", {36, 0}}, {"e", {5, 5, 5, 5}}};

std::vector<nlohmann::json> lines_of(const Outcome& outcome) {
  CAPTURE(outcome.err);
  REQUIRE(outcome.code == 0);
  std::vector<nlohmann::json> lines;
  for (std::size_t at = 0; at < outcome.out.size();) {
    std::size_t end = outcome.out.find('\n', at);
    lines.push_back(nlohmann::json::parse(outcome.out.substr(at, end - at)));
    at = end + 1;
  }
  return lines;
}

std::vector<std::string> words(const TinyFiles& files, std::vector<std::string> more) {
  more.insert(more.begin(), {"generate", files.config()});
  return more;
}

void check_fails(const Outcome& outcome, int code, const std::string& part) {
  CAPTURE(outcome.err);
  CAPTURE(part);
  CHECK(outcome.code == code);
  CHECK(outcome.err.find(part) != std::string::npos);
  CHECK(outcome.out == "");
}

}  // namespace

TEST_CASE("greedy texts are what the largest of all logits give, for every form of model") {
  std::vector<testkit::TinyModelOptions> forms(3);
  forms[1].tied = true;
  forms[1].bias = true;
  forms[2].layer_norm = true;
  forms[2].head_norm = true;
  for (const testkit::TinyModelOptions& form : forms) {
    TinyRun run(form, options_for(2, 16));
    GenerateSettings settings;
    settings.max_tokens = 6;
    settings.sampling.temperature = 0;
    const std::vector<Continuation> made = generate(run.engine(), kPrompts, settings);
    REQUIRE(made.size() == kPrompts.size());
    for (std::size_t i = 0; i < made.size(); ++i) {
      CAPTURE(i);
      CHECK(made[i].tokens == greedy_by_all_logits(run, kPrompts[i].tokens, settings.max_tokens));
      CHECK(made[i].finish == Finish::length);
    }
  }
}

TEST_CASE("logits of the next token equal the logits of all tokens at the rows asked for") {
  for (DType dtype : {DType::f32, DType::bf16}) {
    TinyRun run({}, options_for(3, 8), dtype);
    const Batch batch = random_batch({3, 8}, 37, 5);
    const std::vector<std::int32_t> rows{7, 8, 20};
    const std::vector<float> all = run.engine().logits(batch), next = run.engine().next_logits(batch, rows);
    REQUIRE(next.size() == 3 * 37);
    for (std::size_t i = 0; i < next.size(); ++i) {
      CAPTURE(i);
      const float want = all[static_cast<std::size_t>(rows[i / 37]) * 37 + i % 37];
      // fp32: sums in another order. bf16: `all` is rounded to 8 bits, `next` is not.
      CHECK(next[i] == doctest::Approx(want).epsilon(dtype == DType::f32 ? 1e-5 : 1.0 / 256));
    }
  }
}

TEST_CASE("a text does not depend on other texts generated beside it, and repeats") {
  GenerateSettings settings;
  settings.max_tokens = 9;
  settings.sampling = {.temperature = 1.5, .top_p = 0.9, .seed = 4};
  std::vector<std::vector<Continuation>> all;
  for (std::int64_t batch : {1, 2, 5, 7}) {
    TinyRun run({}, options_for(batch, 24));
    all.push_back(generate(run.engine(), kPrompts, settings));
    all.push_back(generate(run.engine(), kPrompts, settings));
    // Other texts beside the first two.
    std::vector<Prompt> others{kPrompts[0], kPrompts[1], {"x", {7, 7}}};
    std::vector<Continuation> beside = generate(run.engine(), others, settings);
    for (std::size_t i : {0, 1}) CHECK(beside[i].tokens == all[0][i].tokens);
  }
  for (const auto& made : all)
    for (std::size_t i = 0; i < kPrompts.size(); ++i) CHECK(made[i].tokens == all[0][i].tokens);
  settings.sampling.seed = 5;
  TinyRun run({}, options_for(2, 24));
  CHECK(generate(run.engine(), kPrompts, settings)[2].tokens != all[0][2].tokens);
}

TEST_CASE("a stop token ends its text only, and is not part of it") {
  TinyRun run({}, options_for(2, 24));
  GenerateSettings settings;
  settings.max_tokens = 12;
  settings.sampling.temperature = 2;
  const std::vector<Continuation> whole = generate(run.engine(), kPrompts, settings);
  settings.stop = {whole[0].tokens[4]};
  std::vector<std::size_t> heard(kPrompts.size());
  const std::vector<Continuation> cut =
      generate(run.engine(), kPrompts, settings, [&](std::size_t prompt, std::int32_t) { ++heard[prompt]; });
  for (std::size_t i = 0; i < kPrompts.size(); ++i) {
    std::vector<std::int32_t> want = whole[i].tokens;
    auto end = std::find(want.begin(), want.end(), settings.stop[0]);
    CHECK((cut[i].finish == Finish::stop) == (end != want.end()));
    want.erase(end, want.end());
    CHECK(cut[i].tokens == want);
    CHECK(heard[i] == want.size());
  }
  CHECK(cut[0].finish == Finish::stop);
}

TEST_CASE("quern generate continues prompts with a checkpoint or an export, in every precision") {
  TinyFiles files;
  REQUIRE(quern_train(files, {"train.steps=30", "optimizer.learning_rate=2e-2"}).code == 0);
  write_text(files.at("prompts.jsonl"), "[1]\n{\"tokens\": [8, 43, 26]}\n[8, 43]\n");
  const std::string prompts = files.at("prompts.jsonl"), run = files.at("run");
  const std::vector<nlohmann::json> made =
      lines_of(quern_run(words(files, {"--prompts", prompts, "--max-tokens", "5", "--greedy"})));
  REQUIRE(made.size() == 3);
  for (std::size_t i = 0; i < 3; ++i) {
    CHECK(made[i].at("prompt") == i);
    CHECK(made[i].at("finish") == "length");
    CHECK(made[i].at("tokens").size() == 5);
  }
  CHECK(made[0].at("tokens")[0] == 8);  // 5 t + 3 modulo 64: the chain that it learned
  for (std::vector<std::string> source : {std::vector<std::string>{"--checkpoint", run},
                                          {"--checkpoint", run + "/checkpoints/step-00000030"},
                                          {"--from", run + "/export"},
                                          {"--batch", "1"},
                                          {"--temperature", "0"}}) {
    source.insert(source.end(), {"--prompts", prompts, "--max-tokens", "5"});
    if (source[0] != "--temperature") source.push_back("--greedy");
    CAPTURE(source[0]);
    CHECK(lines_of(quern_run(words(files, source))) == made);
  }
  for (const char* precision : {"bf16", "e4m3", "e5m2", "int8"}) {
    CAPTURE(precision);
    auto lines =
        lines_of(quern_run(words(files, {"--from", run + "/export", "--prompt-tokens", "1", "--max-tokens", "3",
                                         "--greedy", "--set", std::string("precision.id=") + precision})));
    CHECK(lines.at(0).at("tokens")[0] == 8);
  }
  // Drawn tokens come first, one a line, when they are to be streamed.
  auto streamed = lines_of(quern_run(words(
      files, {"--prompt-tokens", "1", "--prompt-tokens", "2,3", "--max-tokens", "4", "--stream", "--seed", "3"})));
  REQUIRE(streamed.size() == 4 + 4 + 2);
  for (std::size_t i = 0; i < 8; ++i) CHECK(streamed[i].at("token") == streamed[8 + i % 2].at("tokens")[i / 2]);
  std::string stop = std::to_string(made[1].at("tokens")[2].get<int>());
  auto cut = lines_of(
      quern_run(words(files, {"--prompt-tokens", "8,43,26", "--max-tokens", "5", "--greedy", "--stop", stop})));
  CHECK(cut.at(0).at("finish") == "stop");
  CHECK(cut.at(0).at("tokens").size() <= 2);
}

TEST_CASE("what quern generate cannot do it says, before it takes a device") {
  TinyFiles files;
  auto fails = [&](std::vector<std::string> more, int code, const std::string& part) {
    check_fails(quern_run(words(files, std::move(more))), code, part);
  };
  fails({}, 2, "no prompt");
  fails({"--prompt-tokens", ""}, 2, "--prompt-tokens: empty");
  fails({"--prompt-tokens", "a"}, 3, "not a list of tokens");
  fails({"--prompt-tokens", "1,64"}, 3, "token outside of the vocabulary: found 64, expected from 0 to 63");
  fails({"--prompt-tokens", "1,2", "--max-tokens", "31"}, 3,
        "longer than the model's positions: found 2 + 31 tokens, expected at most 32");
  fails({"--prompts", files.at("none.jsonl")}, 3, "none.jsonl");
  fails({"--prompt-tokens", "1", "--max-tokens", "0"}, 2, "--max-tokens");
  fails({"--prompt-tokens", "1", "--top-p", "0"}, 2, "--top-p");
  fails({"--prompt-tokens", "1", "--temperature", "-1"}, 2, "--temperature");
  fails({"--prompt-tokens", "1", "--temperature", "nan"}, 2, "--temperature");
  fails({"--prompt-tokens", "1", "--max-tokens", "2", "--batch", "0"}, 2, "--batch");
  fails({"--prompt-tokens", "1", "--checkpoint", "a", "--from", "b"}, 2, "two sources of weights");
  fails({"--prompt-tokens", "1", "--max-tokens", "2"}, 3, "no checkpoint there");
  fails({"--prompt-tokens", "1", "--max-tokens", "2", "--from", files.at("none")}, 3, "none");
}

TEST_CASE("samples during training are logged and change no bit of it") {
  for (const char* precision : {"fp32", "bf16", "e4m3"}) {
    TinyFiles files;
    write_text(files.at("prompts.jsonl"), "[1]\n[2, 3]\n[4]\n");
    Overrides common{std::string("precision.id=") + precision, "train.accumulation=2", "checkpoint.export=false"};
    auto with = [&](Overrides more) {
      more.insert(more.begin(), common.begin(), common.end());
      return more;
    };
    SessionResult plain = train_here(files, with({files.run("plain")}));
    Overrides sampling{"sample.every=2", "sample.max_tokens=5",
                       "sample.prompts=[\"5,6\", \"" + files.at("prompts.jsonl") + "\"]"};
    sampling.push_back(files.run("sampled"));
    SessionResult sampled = train_here(files, with(sampling));
    CHECK(sampled.losses == plain.losses);
    CHECK(newest_tensors(files.at("sampled")) == newest_tensors(files.at("plain")));
    std::vector<nlohmann::json> samples = events(files.at("sampled"), "sample");
    REQUIRE(samples.size() == 4 * 4);
    for (std::size_t i = 0; i < samples.size(); ++i) {
      CHECK(samples[i].at("step") == 2 * (i / 4 + 1));
      CHECK(samples[i].at("prompt") == i % 4);
      CHECK(parse_tokens(samples[i].at("tokens"), "x").size() == 5);
    }
    CHECK(samples[0].at("prompt_tokens") == "5,6");
    CHECK(samples[2].at("prompt_tokens") == "2,3");
  }
}

TEST_CASE("samples that cannot be had are refused at the start") {
  TinyFiles files;
  auto fails = [&](Overrides more, int code, const std::string& part) {
    more.push_back("sample.every=2");
    Outcome outcome = quern_train(files, more);
    CHECK(outcome.code == code);
    CAPTURE(outcome.err);
    CHECK(outcome.err.find(part) != std::string::npos);
    CHECK_FALSE(std::filesystem::exists(files.at("run") + "/log.jsonl"));
  };
  fails({}, 2, "sample.prompts");
  fails({"sample.prompts=\"64\""}, 3, "found 64");
  fails({"sample.prompts=\"1\"", "sample.max_tokens=16"}, 3, "longer than train.sequence: found 1 + 16");
}
