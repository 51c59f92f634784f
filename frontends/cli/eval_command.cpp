// `quern eval FILE`: loss and perplexity of a run's weights over token files.
#include <cmath>
#include <iostream>
#include <sstream>

#include <fmt/format.h>
#include <boost/program_options/value_semantic.hpp>
#include <nlohmann/json.hpp>

#include "base/format.h"
#include "commands.h"
#include "quern/error.h"
#include "quern/run.h"

namespace quern::cli {

namespace {

namespace po = boost::program_options;
using Json = nlohmann::ordered_json;

constexpr FileKind kEvalFile{"a file of quern eval", "{\n \"weights\": \""};

std::vector<std::string> files_in(const po::variables_map& values) {
  std::vector<std::string> files;
  if (!values.count("data")) return files;
  for (const std::string& list : values["data"].as<std::vector<std::string>>()) {
    std::istringstream text(list + ",");
    for (std::string file; std::getline(text, file, ',');) {
      if (file.empty())
        throw Error(ErrorCode::config, {.where = "--data",
                                        .what = "an entry is empty",
                                        .found = "\"" + list + "\"",
                                        .expected = "paths of token files, with commas between"});
      files.push_back(file);
    }
  }
  return files;
}

std::string line_of(const DataLoss& loss) {
  return fmt::format("{:>10}{:>13}{:>15}{:>12}  {}\n", format_fixed(loss.loss(), 6), format_fixed(loss.perplexity(), 3),
                     static_cast<std::int64_t>(loss.targets), format_count(loss.tokens_per_second()), loss.name);
}

Json json_of(const DataLoss& loss) {
  Json json = {{"name", loss.name},
               {"loss", loss.loss()},
               {"perplexity", loss.perplexity()},
               {"targets", static_cast<std::int64_t>(loss.targets)},
               {"tokens", loss.tokens},
               {"seconds", loss.seconds},
               {"tokens_per_second", loss.tokens_per_second()}};
  if (!std::isnan(loss.correct)) json["accuracy"] = loss.correct / loss.targets;
  return json;
}

}  // namespace

int eval_command(const Arguments& arguments) {
  po::options_description options("options");
  options.add_options()("from", po::value<std::string>()->value_name("PATH")->default_value("", "from log.directory"),
                        "weights: a checkpoint, a run's directory for its newest, or a Hugging Face model")(
      "data", po::value<std::vector<std::string>>()->composing()->value_name("A.tok,B.tok"),
      "token files or patterns of them; may be repeated; default: the config's validation split")(
      "json", po::value<std::string>()->value_name("OUT"), "write the figures to this file too");
  std::optional<RunArguments> run = parse_run(
      "quern eval FILE [--from PATH] [--data A.tok,B.tok]... [--json OUT] [--set a.b=v]...", options, arguments);
  if (!run) return 0;
  const std::vector<std::string> files = files_in(run->values);
  const std::string path = output_of(*run, "json", kEvalFile);
  TrainingRun weights(run->file, run->overrides);
  const OpenedWeights opened = weights.open_for_evaluation(weight_source(run->values["from"].as<std::string>()));
  for (const std::string& note : opened.notes) std::cerr << "quern: " << note << "\n";
  const std::vector<DataLoss> losses = weights.evaluate(files);
  const DataLoss total = total_of(losses);
  std::cout << fmt::format("{:>10}{:>13}{:>15}{:>12}\n", "loss", "perplexity", "targets", "tok/s");
  for (const DataLoss& loss : losses) std::cout << line_of(loss);
  if (losses.size() > 1) std::cout << line_of(total);
  if (!std::isnan(total.correct))
    std::cout << fmt::format("accuracy {}%\n", format_fixed(100 * total.correct / total.targets, 2));
  if (path.empty()) return 0;
  Json json = {{"weights", opened.path}, {"device", weights.device().name}, {"quern", QUERN_VERSION}};
  for (const DataLoss& loss : losses) json["files"].push_back(json_of(loss));
  json["total"] = json_of(total);
  write_output(path, json.dump(1) + "\n");
  return 0;
}

}  // namespace quern::cli
