// `quern generate FILE`: continues prompts of tokens with a run's weights; `quern-tools generate` does it with text.
#include <algorithm>
#include <iostream>

#include <boost/program_options/value_semantic.hpp>

#include "commands.h"
#include "generate/prompts.h"
#include "quern/error.h"
#include "quern/run.h"

namespace quern::cli {

namespace {

namespace po = boost::program_options;

constexpr const char* kUsage =
    "quern generate FILE [--checkpoint PATH | --from DIR] (--prompt-tokens 1,2,3 | --prompts FILE.jsonl)... "
    "[--max-tokens N] [--temperature T] [--top-p P] [--greedy] [--seed S] [--set a.b=v]...";

po::options_description generate_options() {
  using Texts = std::vector<std::string>;
  po::options_description options("options");
  auto add = options.add_options();
  add("checkpoint", po::value<std::string>()->value_name("PATH"),
      "a checkpoint, or a run's directory for its newest; default: log.directory");
  add("from", po::value<std::string>()->value_name("DIR"), "weights of a Hugging Face model directory instead");
  add("prompt-tokens", po::value<Texts>()->composing()->value_name("1,2,3"), "a prompt; may be repeated");
  add("prompts", po::value<Texts>()->composing()->value_name("FILE"),
      "a .jsonl file of prompts, [1,2,3] or {\"tokens\": [1,2,3]} a line; may be repeated");
  add("max-tokens", po::value<std::int64_t>()->default_value(64), "longest continuation");
  add("temperature", po::value<double>()->default_value(1, "1"), "logits are divided by it; 0: as --greedy");
  add("top-p", po::value<double>()->default_value(1, "1"),
      "draw among the most likely tokens that together have this probability");
  add("greedy", "always the most likely token");
  add("seed", po::value<std::int64_t>()->default_value(1), "of the draws");
  add("stop", po::value<std::string>()->value_name("1,2"),
      "tokens that end a text; default: eos_token_id of the model or tokenizer; \"none\": none");
  add("batch", po::value<std::int64_t>()->value_name("N"), "texts to work on at once; default: train.micro_batch");
  add("stream", "print each token as it is drawn, before the results");
  return options;
}

std::vector<Prompt> prompts_in(const po::variables_map& values) {
  std::vector<Prompt> prompts;
  auto texts = [&](const char* name) {
    return values.count(name) ? values[name].as<std::vector<std::string>>() : std::vector<std::string>{};
  };
  for (const std::string& text : texts("prompt-tokens"))
    prompts.push_back({"--prompt-tokens " + text, parse_tokens(text, "--prompt-tokens")});
  for (const std::string& path : texts("prompts"))
    for (Prompt& prompt : read_prompts(path)) prompts.push_back(std::move(prompt));
  if (prompts.empty())
    throw Error(ErrorCode::config, {.where = "quern generate",
                                    .what = "no prompt",
                                    .found = {},
                                    .expected = "--prompt-tokens or --prompts",
                                    .next = "see --help"});
  return prompts;
}

GenerateSettings settings_in(const po::variables_map& values, const TrainingRun& run, const std::string& from) {
  GenerateSettings settings;
  settings.max_tokens = values["max-tokens"].as<std::int64_t>();
  settings.sampling = {values["temperature"].as<double>(), values["top-p"].as<double>(),
                       static_cast<std::uint64_t>(values["seed"].as<std::int64_t>())};
  const std::string stop = values.count("stop") ? values["stop"].as<std::string>() : "none";
  if (stop != "none") settings.stop = parse_tokens(stop, "--stop");
  check_settings(settings, run.model().vocabulary, {"--max-tokens", "--temperature", "--top-p", "--seed", "--stop"});
  if (values.count("greedy")) settings.sampling.temperature = 0;
  if (!values.count("stop")) settings.stop = run.end_tokens(from);
  return settings;
}

Geometry geometry_for(const po::variables_map& values, std::int64_t micro_batch, const std::vector<Prompt>& prompts,
                      std::int64_t max_tokens) {
  Geometry geometry{micro_batch, 0};
  if (values.count("batch")) geometry.batch = values["batch"].as<std::int64_t>();
  if (geometry.batch < 1)
    throw Error(ErrorCode::config, {.where = "--batch",
                                    .what = "out of range",
                                    .found = std::to_string(geometry.batch),
                                    .expected = "at least 1",
                                    .next = {}});
  geometry.batch = std::min(geometry.batch, static_cast<std::int64_t>(prompts.size()));
  for (const Prompt& prompt : prompts)
    geometry.sequence = std::max(geometry.sequence, static_cast<std::int64_t>(prompt.tokens.size()) + max_tokens);
  return geometry;
}

// {"prompt":0,"tokens":[4,8],"finish":"length"}
void print(std::size_t number, const Continuation& text) {
  std::cout << "{\"prompt\":" << number << ",\"tokens\":[" << tokens_text(text.tokens) << "],\"finish\":\""
            << (text.finish == Finish::stop ? "stop" : "length") << "\"}\n";
}

}  // namespace

int generate_command(const Arguments& arguments) {
  std::optional<RunArguments> run = parse_run(kUsage, generate_options(), arguments);
  if (!run) return 0;
  const po::variables_map& values = run->values;
  auto text = [&](const char* name) { return values.count(name) ? values[name].as<std::string>() : std::string(); };
  const WeightSource source{text("checkpoint"), text("from")};
  if (!source.checkpoint.empty() && !source.from.empty())
    throw Error(ErrorCode::config, {.where = "quern generate",
                                    .what = "two sources of weights",
                                    .found = "--checkpoint and --from",
                                    .expected = "one of them",
                                    .next = {}});
  const std::vector<Prompt> prompts = prompts_in(values);
  TrainingRun weights(run->file, run->overrides);
  const GenerateSettings settings = settings_in(values, weights, source.from);
  const ModelTraits model = weights.model();
  check_prompts(prompts, model.vocabulary, settings.max_tokens, model.max_positions, "the model's positions");
  const Geometry geometry = geometry_for(values, weights.geometry().batch, prompts, settings.max_tokens);
  for (const std::string& note : weights.open_for_generation(source, geometry.batch, geometry.sequence).notes)
    std::cerr << "quern: " << note << "\n";
  TokenHandler on_token;
  if (values.count("stream"))
    on_token = [](std::size_t prompt, std::int32_t token) {
      std::cout << "{\"prompt\":" << prompt << ",\"token\":" << token << "}" << std::endl;
    };
  const std::vector<Continuation> made = weights.generate(prompts, settings, on_token);
  for (std::size_t i = 0; i < made.size(); ++i) print(i, made[i]);
  return 0;
}

}  // namespace quern::cli
