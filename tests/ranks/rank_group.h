#pragma once
// Ranks for end-to-end tests.

#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <memory>
#include <string>
#include <system_error>
#include <vector>

#include <doctest/doctest.h>

#include "end_to_end.h"
#include "test_paths.h"

namespace quern::testing {

inline Overrides of_ranks(int ranks, const std::string& sharding) {
  return {"parallel.ranks=" + std::to_string(ranks), "parallel.communicator=memcpy",
          "parallel.shard_optimizer=" + sharding};
}

/// Whether mpi ranks can be started; says why not.
inline bool has_mpi() {
  const bool here = std::filesystem::exists(QUERN_BUILD_DIR "/plugins/communicator/libquern_mpi.so") &&
                    std::system("command -v mpirun >/dev/null") == 0;
  if (!here) MESSAGE("skipped: no mpirun, or built without mpi");
  return here;
}

/// The processes that it started, those that they did, and so on.
inline std::vector<pid_t> descendants(pid_t process) {
  std::vector<pid_t> all;
  std::error_code gone;
  for (const auto& thread : std::filesystem::directory_iterator("/proc/" + std::to_string(process) + "/task", gone)) {
    std::ifstream children(thread.path() / "children");
    for (pid_t child = 0; children >> child;) {
      all.push_back(child);
      const std::vector<pid_t> more = descendants(child);
      all.insert(all.end(), more.begin(), more.end());
    }
  }
  return all;
}

/// The one of the processes that is this rank of quern; 0: none.
inline pid_t rank_among(const std::vector<pid_t>& processes, int rank) {
  const std::string end = "RANK=" + std::to_string(rank) + '\0';
  for (const pid_t process : processes) {
    const std::string entry = "/proc/" + std::to_string(process);
    std::error_code gone;
    if (std::filesystem::read_symlink(entry + "/exe", gone).filename() != "quern") continue;
    const std::string variables = read_text(entry + "/environ");
    if (has(variables, "QUERN_" + end) || has(variables, "OMPI_COMM_WORLD_" + end)) return process;
  }
  return 0;
}

/// Whether the process still does something: one that nobody waited for keeps its number.
inline bool runs(pid_t process) {
  std::string stat;
  std::getline(std::ifstream("/proc/" + std::to_string(process) + "/stat"), stat);
  return !stat.empty() && stat[stat.rfind(')') + 2] != 'Z';
}

/// The file that is a rank's own arena, of so many bytes.
inline std::filesystem::path arena_of(const Child& rank, std::int64_t bytes) {
  std::vector<std::filesystem::path> found;
  const std::string process = "/proc/" + std::to_string(rank.process());
  for (const auto& entry : std::filesystem::directory_iterator(process + "/fd"))
    if (std::error_code none; std::filesystem::read_symlink(entry, none).string().starts_with("/memfd:quern") &&
                              std::filesystem::file_size(entry, none) == static_cast<std::uintmax_t>(bytes))
      found.push_back(entry);
  REQUIRE(found.size() == 1);
  return found[0];
}

inline void flip_bit(const std::filesystem::path& path, std::streamoff at) {
  std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
  file.seekg(at);
  const int byte = file.get();
  file.seekp(at);
  file.put(static_cast<char>(byte ^ 64));
  REQUIRE(file.flush());
}

/// Ranks that somebody else started, as torchrun does.
class Group {
 public:
  /// `others`: what all but rank 0 have besides. `prepare` runs in a rank's process before the program.
  Group(int size, const TinyFiles& files, const Overrides& overrides, const Overrides& others = {},
        const std::function<void(int rank)>& prepare = {}) {
    static int launches = 0;
    const std::string id = std::to_string(::getpid()) + "-" + std::to_string(++launches);
    for (int rank = 0; rank < size; ++rank)
      ranks_.push_back(
          std::make_unique<Child>(train_arguments(files, rank == 0 ? overrides : with(overrides, others)), [=] {
            const std::string number = std::to_string(rank), all = std::to_string(size);
            for (const char* name : {"RANK", "LOCAL_RANK"}) ::setenv(name, number.c_str(), 1);
            for (const char* name : {"WORLD_SIZE", "LOCAL_WORLD_SIZE"}) ::setenv(name, all.c_str(), 1);
            ::setenv("MASTER_ADDR", "127.0.0.1", 1);
            ::setenv("MASTER_PORT", "29500", 1);
            ::setenv("TORCHELASTIC_RUN_ID", id.c_str(), 1);
            if (prepare) prepare(rank);
          }));
  }
  Child& operator[](int rank) { return *ranks_[static_cast<std::size_t>(rank)]; }
  bool running() {
    bool all = true;
    for (auto& rank : ranks_) all = rank->running() && all;
    return all;
  }
  /// Exit codes.
  std::vector<int> wait() {
    std::vector<int> codes;
    for (auto& rank : ranks_) codes.push_back(rank->wait());
    return codes;
  }
  std::vector<int> all(int code) const { return std::vector<int>(ranks_.size(), code); }
  std::string messages() const {
    std::string text;
    for (const auto& rank : ranks_) text += rank->err();
    return text;
  }

 private:
  std::vector<std::unique_ptr<Child>> ranks_;
};

}  // namespace quern::testing
