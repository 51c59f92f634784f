#include "launch/local_ranks.h"

#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <sstream>
#include <system_error>

#include "launch/rank_place.h"
#include "launch/rendezvous/secret.h"
#include "quern/error.h"

namespace quern {

namespace {

constexpr const char* kStarter = "QUERN_STARTER";

/// This program, as mpirun finds it too.
std::string own_program() {
  std::error_code ignored;
  return std::filesystem::read_symlink("/proc/self/exe", ignored);
}

std::vector<std::string> with_arguments(std::vector<std::string> words, const std::vector<std::string>& arguments) {
  words.insert(words.end(), arguments.begin(), arguments.end());
  return words;
}

bool installed(const std::string& program) {
  const char* const path = std::getenv("PATH");
  std::istringstream folders(path ? path : "");
  for (std::string folder; std::getline(folders, folder, ':');)
    if (::access((folder + "/" + program).c_str(), X_OK) == 0) return true;
  return false;
}

}  // namespace

std::vector<RankProcess> local_ranks(int size, const std::vector<std::string>& arguments) {
  std::vector<RankProcess> ranks;
  const std::string launch = hex_of(fresh_secret()).substr(0, 16), count = std::to_string(size);
  for (int i = 0; i < size; ++i) {
    const std::string rank = std::to_string(i);
    ranks.push_back({.name = "rank " + rank,
                     .words = with_arguments({"/proc/self/exe"}, arguments),
                     .environment = {{"QUERN_RANK", rank},
                                     {"QUERN_RANKS", count},
                                     {"QUERN_LOCAL_RANK", rank},
                                     {"QUERN_LOCAL_RANKS", count},
                                     {"QUERN_LAUNCH", launch},
                                     {kStarter, std::to_string(::getpid())}},
                     .shows_output = i == 0});
  }
  return ranks;
}

std::vector<RankProcess> mpirun_ranks(int size, const std::vector<std::string>& arguments) {
  if (!installed("mpirun"))
    throw Error(ErrorCode::config, {.where = "parallel.communicator",
                                    .what = "its ranks are started by mpirun",
                                    .found = "no mpirun in PATH",
                                    .expected = "an installed MPI",
                                    .next = "install openmpi-bin, or choose another communicator"});
  // Ranks that wait give up the processor, and may use all of them.
  std::vector<std::string> words = {"mpirun", "-n", std::to_string(size), "--oversubscribe", "--bind-to", "none"};
  words.insert(words.end(), {"--mca", "mpi_yield_when_idle", "1"});
  if (::geteuid() == 0) words.emplace_back("--allow-run-as-root");
  words.push_back(own_program());
  words = with_arguments(std::move(words), arguments);
  return {{.name = "mpirun", .words = words, .shows_output = true, .shows_errors = true, .is_launcher = true}};
}

int starter_of_this_rank() {
  const char* const text = std::getenv(kStarter);
  const int starter = text ? std::atoi(text) : 0;
  return starter == ::getppid() ? starter : 0;
}

std::string rank_prefix() {
  try {
    const std::optional<RankPlace> place = rank_place();
    if (place && place->size > 1 && starter_of_this_rank() == 0) return "rank " + std::to_string(place->rank) + ": ";
  } catch (const Error&) {  // then that is what is reported
  }
  return "";
}

}  // namespace quern
