// `quern data`: what a run's data are, as training sees them.
#include <iostream>
#include <memory>

#include <boost/program_options/value_semantic.hpp>

#include "commands.h"
#include "data/batch_text.h"
#include "quern/error.h"
#include "quern/run.h"
#include "quern/skipping_source.h"

namespace quern::cli {

namespace {

Split split_named(const std::string& name) {
  if (name == "train") return Split::train;
  if (name == "validation") return Split::validation;
  throw Error(
      ErrorCode::config,
      {.where = "--split", .what = "no such split", .found = "\"" + name + "\"", .expected = "train or validation"});
}

int show(const Arguments& arguments) {
  namespace po = boost::program_options;
  po::options_description options("options");
  options.add_options()("batch", po::value<std::int64_t>()->default_value(0), "which micro-batch, from 0")(
      "split", po::value<std::string>()->default_value("train"), "train or validation")(
      "tokenizer", po::value<std::string>()->value_name("PATH"),
      "tokenizer.json, or its folder, to show text; default: checkpoint.tokenizer, or else token numbers");
  std::optional<RunArguments> run = parse_run(
      "quern data show FILE [--batch N] [--split NAME] [--tokenizer PATH] [--set a.b=v]...", options, arguments);
  if (!run) return 0;
  const auto number = run->values["batch"].as<std::int64_t>();
  if (number < 0)
    throw Error(
        ErrorCode::config,
        {.where = "--batch", .what = "number of a batch", .found = std::to_string(number), .expected = "at least 0"});
  const std::string split = run->values["split"].as<std::string>();
  const TrainingRun training(run->file, run->overrides);
  std::string tokenizer = training.tokenizer();
  if (run->values.count("tokenizer")) tokenizer = run->values["tokenizer"].as<std::string>();
  std::unique_ptr<TokenText> text;
  if (!tokenizer.empty()) text = std::make_unique<TokenText>(tokenizer);
  std::unique_ptr<DataSource> source = training.open_data(split_named(split));
  Batch batch;
  skip(*source, number);
  source->next(batch);
  std::cout << split << ", batch " << number << ": " << batch_text(batch, training.geometry(), text.get());
  return 0;
}

constexpr Command kCommands[] = {
    {"show", "print a micro-batch: its documents, and which tokens are learned", show},
};

}  // namespace

int data_command(const Arguments& arguments) { return dispatch("quern data", kCommands, arguments); }

}  // namespace quern::cli
