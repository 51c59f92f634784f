#include "conformance/launched_ranks.h"

#include <fcntl.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdlib>
#include <fstream>
#include <thread>

#include "conformance/report.h"
#include "quern/communicator.h"

namespace quern::conformance {

namespace {

constexpr int kPatience = 60;  // s

/// Leaves its environment in a file, and stays until the folder is gone.
constexpr const char* kPlace =
    "own=$0/place.$OMPI_COMM_WORLD_RANK; env -0 > \"$own.part\" && mv \"$own.part\" \"$own\";"
    "while [ -d \"$0\" ]; do sleep 0.05; done";

std::string place(const std::string& folder, int rank) { return folder + "/place." + std::to_string(rank); }

/// As root, on machines with fewer cores than ranks and without ssh; ranks that end badly leave the others alone.
[[noreturn]] void be_mpirun(const std::string& folder, int size) {
  ::prctl(PR_SET_PDEATHSIG, SIGTERM);
  const int nowhere = ::open("/dev/null", O_RDWR);
  for (const int descriptor : {0, 1, 2}) ::dup2(nowhere, descriptor);
  ::execlp("mpirun", "mpirun", "-n", std::to_string(size).c_str(), "--allow-run-as-root", "--oversubscribe",
           "--enable-recovery", "--mca", "plm", "isolated", "sh", "-c", kPlace, folder.c_str(), nullptr);
  ::_exit(127);
}

}  // namespace

RankDirectory::RankDirectory(const Subject& subject, int size) {
  const std::string launcher = subject.make<Communicator>()->traits().launcher;
  if (launcher.empty() || size == 1) return;
  if (launcher != "mpirun") throw Skipped{"the kit does not know how to use the launcher " + launcher};
  launcher_ = ::fork();
  if (launcher_ == 0) be_mpirun(path(), size);
  const auto begin = std::chrono::steady_clock::now();
  for (int rank = 0; rank < size;) {
    if (std::filesystem::exists(place(path(), rank))) {
      ++rank;
      continue;
    }
    if (::waitpid(launcher_, nullptr, WNOHANG) != 0) throw Skipped{"no mpirun that can start ranks"};
    need(std::chrono::steady_clock::now() - begin < std::chrono::seconds(kPatience), "mpirun",
         "no rank " + std::to_string(rank) + " within " + std::to_string(kPatience) + " s", "ranks");
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
}

RankDirectory::~RankDirectory() {
  if (launcher_ <= 0) return;
  std::error_code ignored;
  std::filesystem::remove_all(path(), ignored);  // at which its processes end
  ::waitpid(launcher_, nullptr, 0);
}

void take_place(const std::string& folder, int rank) {
  std::ifstream file(place(folder, rank));
  for (std::string variable; std::getline(file, variable, '\0');)
    if (const std::size_t equal = variable.find('='); equal != std::string::npos)
      ::setenv(variable.substr(0, equal).c_str(), variable.substr(equal + 1).c_str(), 1);
}

}  // namespace quern::conformance
