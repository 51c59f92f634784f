// `quern export CHECKPOINT DIRECTORY`: the weights of a checkpoint for other programs, without a device.
#include <iostream>

#include <boost/program_options/value_semantic.hpp>

#include "commands.h"
#include "quern/error.h"
#include "quern/options.h"
#include "run/export/model_export.h"

namespace quern::cli {

int export_command(const Arguments& arguments) {
  namespace po = boost::program_options;
  po::options_description options("options");
  options.add_options()("to", po::value<std::string>()->default_value("hf")->value_name("FORMAT"),
                        "hf: a Hugging Face model directory")(
      "dtype", po::value<std::string>()->value_name("NAME"),
      "format of the weights, bf16 or fp32; default: checkpoint.export_dtype of the checkpoint's config")(
      "set", po::value<std::vector<std::string>>()->composing()->value_name("a.b=v"),
      "override a key of that config, such as checkpoint.tokenizer; may be repeated");
  po::variables_map values;
  if (!parse("quern export CHECKPOINT DIRECTORY [--to hf] [--dtype bf16|fp32] [--set a.b=v]...", options,
             {"CHECKPOINT", "DIRECTORY"}, arguments, values))
    return 0;
  if (const auto& format = values["to"].as<std::string>(); format != "hf")
    throw Error(ErrorCode::config,
                {.where = "--to", .what = "no such format", .found = to_string(OptionValue(format)), .expected = "hf"});
  std::vector<std::string> overrides;
  if (values.count("set")) overrides = values["set"].as<std::vector<std::string>>();
  if (values.count("dtype")) overrides.push_back("checkpoint.export_dtype=" + values["dtype"].as<std::string>());
  const auto& directory = values["DIRECTORY"].as<std::string>();
  for (const std::string& note : export_checkpoint(values["CHECKPOINT"].as<std::string>(), directory, overrides))
    std::cerr << "quern: " << note << "\n";
  std::cout << directory << "\n";
  return 0;
}

}  // namespace quern::cli
