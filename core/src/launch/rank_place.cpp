#include "launch/rank_place.h"

#include <charconv>
#include <cstdlib>
#include <cstring>
#include <string_view>
#include <vector>

#include "quern/error.h"

namespace quern {

namespace {

/// The variables of one way to start ranks.
struct Variables {
  const char* source;
  const char *rank, *size, *local_rank, *local_size;
  std::vector<const char*> launch;
};

const Variables kQuern = {"quern",         "QUERN_RANK", "QUERN_RANKS", "QUERN_LOCAL_RANK", "QUERN_LOCAL_RANKS",
                          {"QUERN_LAUNCH"}};
const Variables kTorchrun = {"torchrun",         "RANK",
                             "WORLD_SIZE",       "LOCAL_RANK",
                             "LOCAL_WORLD_SIZE", {"TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"}};
const Variables kMpirun = {"mpirun",
                           "OMPI_COMM_WORLD_RANK",
                           "OMPI_COMM_WORLD_SIZE",
                           "OMPI_COMM_WORLD_LOCAL_RANK",
                           "OMPI_COMM_WORLD_LOCAL_SIZE",
                           {"PMIX_NAMESPACE"}};

[[noreturn]] void refuse(const char* variable, std::string what, std::string found, std::string expected,
                         const char* source) {
  throw Error(ErrorCode::config,
              {.where = std::string("environment variable ") + variable,
               .what = std::move(what),
               .found = std::move(found),
               .expected = std::move(expected),
               .next = std::string("start the ranks with ") + source + ", or unset its variables to run without"});
}

int number(const char* variable, const char* text, int low, int high, const char* source) {
  const std::string expected = "a number from " + std::to_string(low) + " to " + std::to_string(high);
  if (!text)
    refuse(variable, "is not set, and other variables of " + std::string(source) + " are", {}, expected, source);
  int value = 0;
  const char* end = text + std::strlen(text);
  const auto [stop, error] = std::from_chars(text, end, value);
  if (error != std::errc() || stop != end || value < low || value > high)
    refuse(variable, "does not fit a group of ranks", text, expected, source);
  return value;
}

std::string launch_name(const std::vector<const char*>& variables, const Environment& environment) {
  std::string name;
  for (const char* variable : variables)
    if (const char* text = environment(variable); text && *text)
      for (const char c : (name.empty() ? "" : "-") + std::string(text).substr(0, 80))
        name += std::isalnum(static_cast<unsigned char>(c)) ? c : '-';
  return name;
}

std::optional<RankPlace> from(const Variables& names, const Environment& environment) {
  bool any = false;
  for (const char* name : {names.rank, names.size, names.local_rank, names.local_size})
    any = any || environment(name) != nullptr;
  if (!any) return std::nullopt;
  auto value = [&](const char* name, int low, int high) {
    return number(name, environment(name), low, high, names.source);
  };
  RankPlace place{.source = names.source, .launch = launch_name(names.launch, environment)};
  place.size = value(names.size, 1, kMostRanks);
  place.rank = value(names.rank, 0, place.size - 1);
  const bool counted = environment(names.local_size) != nullptr;
  const int most = counted ? value(names.local_size, 1, place.size) : place.size;
  place.local_rank = value(names.local_rank, 0, most - 1);
  place.local_size = counted ? most : place.local_rank + 1;
  return place;
}

/// Of "4(x2),3" and node 2: 3. Zero: not there.
int tasks_of_node(std::string_view list, int node) {
  while (!list.empty()) {
    const std::string_view item = list.substr(0, list.find(','));
    list.remove_prefix(std::min(list.size(), item.size() + 1));
    int tasks = 0, times = 1;
    std::from_chars(item.data(), item.data() + item.size(), tasks);
    if (const std::size_t x = item.find("(x"); x != std::string_view::npos)
      std::from_chars(item.data() + x + 2, item.data() + item.size(), times);
    if (node < times) return tasks;
    node -= times;
  }
  return 0;
}

/// In a step that srun started; the variables of a whole job are in its batch script too, which is no rank.
std::optional<RankPlace> from_slurm(const Environment& environment) {
  constexpr const char* kSource = "srun";
  const char* const step_size = environment("SLURM_STEP_NUM_TASKS");
  const char* const size_name = step_size ? "SLURM_STEP_NUM_TASKS" : "SLURM_NTASKS";
  if (!environment("SLURM_STEP_ID") || !environment(size_name)) return std::nullopt;
  auto value = [&](const char* name, int low, int high) { return number(name, environment(name), low, high, kSource); };
  RankPlace place{.source = kSource,
                  .launch = launch_name({"SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"}, environment)};
  place.size = value(size_name, 1, kMostRanks);
  if (place.size == 1) return std::nullopt;
  place.rank = value("SLURM_PROCID", 0, place.size - 1);
  const int node = value("SLURM_NODEID", 0, kMostRanks);
  const char* const list_name = "SLURM_STEP_TASKS_PER_NODE";
  const char* const list = environment(list_name);
  place.local_size = list ? tasks_of_node(list, node) : 0;
  if (place.local_size < 1 || place.local_size > place.size)
    refuse(list_name, "does not say how many tasks node " + std::to_string(node) + " has", list ? list : "nothing",
           "a list such as 4(x2),3", kSource);
  place.local_rank = value("SLURM_LOCALID", 0, place.local_size - 1);
  return place;
}

}  // namespace

std::optional<RankPlace> rank_place(const Environment& environment) {
  for (const Variables& names : {kQuern, kTorchrun, kMpirun})
    if (std::optional<RankPlace> place = from(names, environment)) return place;
  return from_slurm(environment);
}

std::optional<RankPlace> rank_place() {
  return rank_place([](const char* name) { return std::getenv(name); });
}

}  // namespace quern
