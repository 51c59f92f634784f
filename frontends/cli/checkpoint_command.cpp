// `quern checkpoint info DIR`: the contents of a checkpoint, verified on request; needs neither device nor config.
#include <filesystem>
#include <iostream>

#include <fmt/format.h>
#include <boost/program_options/value_semantic.hpp>
#include <nlohmann/json.hpp>

#include "base/format.h"
#include "base/shorten.h"
#include "checkpoint/checkpoint_store.h"
#include "checkpoint/summary.h"
#include "commands.h"

namespace quern::cli {

namespace {

namespace po = boost::program_options;
using Json = nlohmann::ordered_json;

/// Keys that say most about a run.
constexpr const char* kSettings[] = {"model.id",
                                     "precision.id",
                                     "optimizer.id",
                                     "optimizer.master",
                                     "optimizer.gradient",
                                     "parallel.ranks",
                                     "parallel.shard_optimizer",
                                     "parallel.shard_gradients",
                                     "parallel.shard_weights"};

Json json_of(const Checkpoint& checkpoint, const CheckpointSummary& summary, bool verified) {
  const CheckpointMeta& meta = checkpoint.meta;
  Json json = {{"checkpoint", checkpoint.path}, {"step", meta.step}, {"updates", meta.updates}};
  if (meta.tokens) json["tokens"] = *meta.tokens;
  json["evaluated"] = meta.evaluated;
  json["ranks"] = summary.files.size();
  json["quern"] = meta.quern_version;
  json["settings"] = summary.settings;
  for (const auto& [name, kind] : summary.kinds)
    json["kinds"][name] = {
        {"tensors", kind.tensors}, {"elements", kind.elements}, {"bytes", kind.bytes}, {"types", kind.types}};
  json["data_state"] = meta.data_state;
  for (const LibraryIdentity& library : meta.libraries)
    json["libraries"].push_back({{"name", library.name}, {"version", library.version}, {"xxh3", library.hash}});
  for (const CheckpointSummary::File& file : summary.files)
    json["files"].push_back({{"name", file.name}, {"bytes", file.bytes}, {"xxh3", file.checksum}});
  json["other_files"] = summary.strangers;
  json["verified"] = verified;
  return json;
}

void print_line(const std::string& name, const std::string& text) {
  std::cout << fmt::format("{:<16}{}\n", name, printable(text, 400));
}

void print(const Checkpoint& checkpoint, const CheckpointSummary& summary, bool verified) {
  const CheckpointMeta& meta = checkpoint.meta;
  print_line("checkpoint", checkpoint.path);
  print_line("step", std::to_string(meta.step) + ", " + std::to_string(meta.updates) + " updates" +
                         (meta.tokens ? ", " + format_count(static_cast<double>(*meta.tokens)) + " tokens" : "") +
                         (meta.evaluated ? "" : ", its evaluation is due"));
  print_line("written by", std::to_string(summary.files.size()) + (summary.files.size() == 1 ? " rank" : " ranks") +
                               " of quern " + meta.quern_version);
  if (summary.settings.empty()) print_line("config", "cannot be read");
  for (const char* key : kSettings)
    if (const auto found = summary.settings.find(key); found != summary.settings.end())
      print_line(found == summary.settings.find(kSettings[0]) ? "config" : "",
                 std::string(key) + " = " + found->second);
  print_line("data", meta.data_state);
  for (bool first = true; const auto& [name, kind] : summary.kinds)
    print_line(std::exchange(first, false) ? "tensors" : "",
               fmt::format("{:<12}{:>6} of {:>8} elements, {:>9}, {}", name, kind.tensors,
                           format_count(static_cast<double>(kind.elements)), format_bytes(kind.bytes), kind.types));
  for (bool first = true; const CheckpointSummary::File& file : summary.files)
    print_line(std::exchange(first, false) ? "files" : "",
               file.name + ", " + format_bytes(file.bytes) + ", xxh3 " + file.checksum);
  for (const std::string& name : summary.strangers) print_line("not of it", name);
  for (bool first = true; const LibraryIdentity& library : meta.libraries)
    print_line(std::exchange(first, false) ? "compared" : "",
               library.name + " " + library.version + " " + library.hash);
  print_line("", "parameters, optimizer state, states of the precision, config, device");
  print_line("verified",
             verified ? "every file has its checksum" : "sizes and the checksum of state.json; more by --verify");
}

int info(const Arguments& arguments) {
  po::options_description options("options");
  options.add_options()("verify", "read every file, and compare its checksum")("json", "print JSON instead of text");
  po::variables_map values;
  if (!parse("quern checkpoint info DIR [--verify] [--json]", options, {"DIR"}, arguments, values)) return 0;
  const std::filesystem::path path = values["DIR"].as<std::string>();
  const bool verify = values.count("verify") > 0;
  std::vector<std::string> notes;
  const bool is_run = !std::filesystem::exists(path / "state.json");
  const Checkpoint checkpoint = is_run ? checkpoint_at(path, notes) : open_checkpoint(path);
  for (const std::string& note : notes) std::cerr << "quern: " << note << "\n";
  for (std::size_t file = 0; verify && !is_run && file < checkpoint.checksums.size(); ++file)
    verify_file(checkpoint, file);
  const CheckpointSummary summary = summary_of(checkpoint);
  if (values.count("json"))
    std::cout << json_of(checkpoint, summary, verify || is_run).dump(1, ' ', false, Json::error_handler_t::replace)
              << "\n";
  else
    print(checkpoint, summary, verify || is_run);
  return 0;
}

constexpr Command kCommands[] = {
    {"info", "show a checkpoint, or a run's newest, and verify its files", info},
};

}  // namespace

int checkpoint_command(const Arguments& arguments) { return dispatch("quern checkpoint", kCommands, arguments); }

}  // namespace quern::cli
