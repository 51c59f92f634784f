// `quern export CHECKPOINT PLACE`: the weights of a checkpoint for other programs, without a device. GGUF is written by
// quern-tools, in the place of this process.
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <iostream>

#include <boost/program_options/value_semantic.hpp>

#include "checkpoint/checkpoint_store.h"
#include "commands.h"
#include "quern/error.h"
#include "quern/options.h"
#include "run/export/model_export.h"

namespace quern::cli {

namespace {

/// quern-tools: $QUERN_TOOLS (a wheel's), beside this program, or on the path.
std::string tools_beside(const std::filesystem::path& program) {
  if (const char* given = std::getenv("QUERN_TOOLS"); given && *given) return given;
  std::error_code ignored;
  const std::filesystem::path beside = program.parent_path() / "quern-tools";
  return std::filesystem::exists(beside, ignored) ? beside.string() : "quern-tools";
}

/// "{step}" in a path is the checkpoint's step.
std::string with_step(std::string path, const std::string& checkpoint) {
  constexpr std::string_view kStep = "{step}";
  std::vector<std::string> notes;
  if (const std::size_t at = path.find(kStep); at != path.npos)
    path.replace(at, kStep.size(), std::to_string(checkpoint_at(checkpoint, notes).meta.step));
  return path;
}

[[noreturn]] void become_tool(Arguments words) {
  std::error_code ignored;
  const std::filesystem::path program = std::filesystem::read_symlink("/proc/self/exe", ignored);
  words.insert(words.begin(), {tools_beside(program), "export-gguf"});
  words.insert(words.end(), {"--quern", program.string()});
  std::vector<char*> arguments;
  for (std::string& word : words) arguments.push_back(word.data());
  arguments.push_back(nullptr);
  ::execvp(arguments[0], arguments.data());
  throw Error(ErrorCode::resources, {.where = words[0],
                                     .what = "GGUF is written by this program, which cannot be started",
                                     .found = std::strerror(errno),
                                     .next = "install quern's wheel with the extra gguf, or set QUERN_TOOLS"});
}

}  // namespace

int export_command(const Arguments& arguments) {
  namespace po = boost::program_options;
  po::options_description options("options");
  options.add_options()("to", po::value<std::string>()->default_value("hf")->value_name("FORMAT"),
                        "hf: a Hugging Face model directory, an adapter merged into it; peft: the adapter alone, as "
                        "PEFT's directory; gguf: one file for llama.cpp")(
      "dtype", po::value<std::string>()->value_name("NAME"),
      "format of the weights, bf16 or fp32; default: checkpoint.export_dtype of the checkpoint's config")(
      "set", po::value<std::vector<std::string>>()->composing()->value_name("a.b=v"),
      "override a key of that config, such as checkpoint.tokenizer; may be repeated");
  po::variables_map values;
  if (!parse("quern export CHECKPOINT PLACE [--to hf|gguf|peft] [--dtype bf16|fp32] [--set a.b=v]...", options,
             {"CHECKPOINT", "PLACE"}, arguments, values))
    return 0;
  const auto &format = values["to"].as<std::string>(), &checkpoint = values["CHECKPOINT"].as<std::string>();
  const std::string place = with_step(values["PLACE"].as<std::string>(), checkpoint);
  std::vector<std::string> overrides;
  if (values.count("set")) overrides = values["set"].as<std::vector<std::string>>();
  if (format == "gguf") {
    Arguments words{checkpoint, place};
    for (const std::string& assignment : overrides) words.insert(words.end(), {"--set", assignment});
    if (values.count("dtype")) words.insert(words.end(), {"--dtype", values["dtype"].as<std::string>()});
    become_tool(std::move(words));
  }
  if (format != "hf" && format != "peft")
    throw Error(ErrorCode::config, {.where = "--to",
                                    .what = "no such format",
                                    .found = to_string(OptionValue(format)),
                                    .expected = "hf, gguf or peft"});
  for (const std::string& assignment : overrides)
    if (assignment.starts_with("adapter.merge"))
      throw Error(ErrorCode::config, {.where = "--set adapter.merge",
                                      .what = "the format says whether an adapter is merged",
                                      .found = "--to " + format,
                                      .next = "leave it out: --to hf merges, --to peft does not"});
  overrides.push_back(std::string("adapter.merge=") + (format == "hf" ? "true" : "false"));
  if (values.count("dtype")) overrides.push_back("checkpoint.export_dtype=" + values["dtype"].as<std::string>());
  for (const std::string& note : export_checkpoint(checkpoint, place, overrides))
    std::cerr << "quern: " << note << "\n";
  std::cout << place << "\n";
  return 0;
}

}  // namespace quern::cli
