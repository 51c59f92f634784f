#include "run/ranks/start_ranks.h"

#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <initializer_list>
#include <system_error>

#include "base/files/descriptor.h"
#include "checkpoint/checkpoint_store.h"
#include "config/resolve.h"
#include "launch/local_ranks.h"
#include "launch/mpirun_places.h"
#include "launch/rank_folder.h"
#include "quern/communicator.h"
#include "quern/device.h"
#include "quern/error.h"
#include "run/options/run_options.h"
#include "run/options/run_schemas.h"

namespace quern {

namespace {

constexpr const char* kRestarted = "QUERN_RESTARTED";  // of ranks that continue

/// What the user wrote for the key; null: nothing.
const ConfigNode* written(const ConfigDocument& document, std::initializer_list<const char*> path) {
  const ConfigNode* node = &document.root();
  for (const char* part : path) {
    const auto found = node->children.find(part);
    if (found == node->children.end()) return nullptr;
    node = &found->second;
  }
  return node;
}

/// None: a pipe, which can be read once.
std::optional<ConfigDocument> document_unless_pipe(const RunConfig& run) {
  std::error_code none;
  if (!run.text && std::filesystem::exists(run.file, none) && !std::filesystem::is_regular_file(run.file, none))
    return std::nullopt;
  return document_of(run);
}

int units_of(const ResolvedConfig& config, PluginHost& host) {
  return host.create<Device>(config.id("device"), config.factory_values("device"))->traits().units;
}

/// The program that has to start so many ranks; "": any will do. Throws a config error for more than they may be.
std::string launcher_of(const ResolvedConfig& config, PluginHost& host, int size) {
  std::string launcher;
  for (const std::string& id : config.ids("parallel")) {
    const CommunicatorTraits traits = host.create<Communicator>(id, config.factory_values("parallel", id))->traits();
    if (size > traits.most_ranks)
      throw Error(ErrorCode::config, {.where = config.where("parallel", "ranks"),
                                      .what = "more than communicator " + id + " takes",
                                      .found = std::to_string(size),
                                      .expected = std::to_string(traits.most_ranks) + " at most",
                                      .next = "choose another communicator"});
    if (launcher.empty()) launcher = traits.launcher;
  }
  return launcher;
}

RunEnd run_ranks(int size, const std::string& launcher, const std::vector<std::string>& words, bool again) {
  auto warn = [](const std::string& line) { write_if_taken(STDERR_FILENO, line, std::chrono::milliseconds(0)); };
  std::vector<RankProcess> ranks = local_ranks(size, words);
  if (again)
    for (RankProcess& rank : ranks) rank.environment.emplace_back(kRestarted, "1");
  if (launcher.empty()) return supervise(ranks, warn);
  if (launcher != "mpirun")
    throw Error(ErrorCode::config, {.where = "parallel.communicator",
                                    .what = "its ranks have to be started by " + launcher,
                                    .next = "start this program by " + launcher});
  const WaitingSignals waiting;  // one that comes while mpirun starts leaves nothing of it
  const RankFolder folder;
  MpirunPlaces places(folder.path(), size);
  if (const int signal = waiting_stop()) return {.code = 128 + signal, .stopped = true};
  for (int rank = 0; rank < size; ++rank) {
    auto& environment = ranks[static_cast<std::size_t>(rank)].environment;
    for (auto& variable : mpirun_place(folder.path(), rank)) environment.push_back(std::move(variable));
  }
  RunEnd end = supervise(ranks, warn);
  if (end.unexplained) end.output += places.last_lines();
  return end;
}

}  // namespace

void take_place(const RankPlace& place, RunConfig& run) {
  if (std::getenv(kRestarted)) run.overrides.emplace_back("checkpoint.resume=auto");
  const std::optional<ConfigDocument> document = document_unless_pipe(run);
  const ConfigNode* const ranks = document ? written(*document, {"parallel", "ranks"}) : nullptr;
  const std::string size = std::to_string(place.size);
  // mpirun gives rank 0 a terminal of its own, wherever its output goes.
  if (place.source == "mpirun" && !(document && written(*document, {"log", "console", "style"})))
    run.overrides.push_back("log.console.style=plain");
  const std::string wanted = ranks && ranks->value ? to_string(*ranks->value) : size;
  if (!ranks || wanted == "0")
    run.overrides.push_back("parallel.ranks=" + size);
  else if (wanted != size)
    throw Error(ErrorCode::config, {.where = ranks->position.text() + ": parallel.ranks",
                                    .what = "not the number of ranks that " + place.source + " started",
                                    .found = ranks->found,
                                    .expected = size,
                                    .next = "correct one of them, or leave out parallel.ranks"});
}

std::optional<int> start_ranks(const RunConfig& run, const std::vector<std::string>& words,
                               const std::function<void(const std::string&)>& say) {
  const std::optional<ConfigDocument> document = document_unless_pipe(run);
  if (!document || (!written(*document, {"parallel", "ranks"}) && !written(*document, {"parallel", "restarts"})))
    return std::nullopt;
  PluginHost host = run_host(run.components);
  const ResolvedConfig config = resolve(*document, run_schemas(), host);
  const ParallelOptions parallel = parallel_options().bind(config.section("parallel"));
  const int size = parallel.ranks > 0 ? static_cast<int>(parallel.ranks) : units_of(config, host);
  if (size == 1 && parallel.restarts == 0) return std::nullopt;
  if (words.empty())
    throw Error(ErrorCode::config, {.where = config.where("parallel", "ranks"),
                                    .what = "nothing here can be started again as ranks",
                                    .found = std::to_string(size) + " ranks",
                                    .next = "write a script, and run that"});
  const std::string launcher = launcher_of(config, host, size);
  const CheckpointOptions checkpoint = checkpoint_options().bind(config.section("checkpoint"));
  const std::string directory = log_options().bind(config.section("log")).directory;
  for (std::int64_t restart = 0;; ++restart) {
    const RunEnd end = run_ranks(size, launcher, words, restart > 0);
    RankFolder::remove_left();  // a rank 0 that was killed leaves one
    if (end.cause.empty()) return end.code;
    const bool again = restart < parallel.restarts && !end.stopped && end.code != static_cast<int>(ErrorCode::config) &&
                       find_newest(directory).checkpoint;
    // Faults of config and input before the first step, and numbers that are not finite, would only come again.
    const bool lost = end.code == static_cast<int>(ErrorCode::communication) ||
                      (end.trained && end.code != static_cast<int>(ErrorCode::numerics));
    say(end.output + (again ? "quern: warning: " : "quern: error: ") + end.cause +
        (lost && !again ? "; " + how_to_continue(directory, checkpoint.resume) : ""));
    if (!again) return end.code;
    say("quern: warning: restarting from the last checkpoint, restart " + std::to_string(restart + 1) + " of " +
        std::to_string(parallel.restarts));
  }
}

}  // namespace quern
