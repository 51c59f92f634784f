#include "launch/mpirun_places.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <csignal>
#include <fstream>
#include <thread>

#include "base/files/durable_file.h"
#include "base/shorten.h"
#include "launch/supervisor.h"
#include "quern/error.h"

namespace quern {

namespace {

using Clock = std::chrono::steady_clock;

constexpr std::chrono::seconds kStart{60}, kEnd{5};
constexpr std::chrono::milliseconds kLook{5};
constexpr int kNotFound = 127;

/// Leaves its environment in a file, and stays until nobody holds the other end.
constexpr const char* kPlace =
    "exec 3< \"$0/hold\"; own=$0/place.$OMPI_COMM_WORLD_RANK;"
    "env -0 > \"$own.part\" && mv \"$own.part\" \"$own\" && read -r end <&3; exit 0";

std::string place_file(const std::string& folder, int rank) { return folder + "/place." + std::to_string(rank); }

std::string text_of(const OwnedDescriptor& file) {
  std::string text;
  char bytes[4096];
  for (ssize_t got = 0; (got = ::pread(file.get(), bytes, sizeof bytes, static_cast<off_t>(text.size()))) > 0;)
    text.append(bytes, static_cast<std::size_t>(got));
  return text;
}

/// For any number of ranks, as root, and without ssh; ranks that end badly leave the others alone.
[[noreturn]] void be_mpirun(const std::string& folder, int output, const std::string& size, pid_t parent) {
  ::prctl(PR_SET_PDEATHSIG, SIGTERM);
  if (::getppid() != parent) ::_exit(1);  // it died before that
  ::setpgid(0, 0);                        // a terminal's signals are not for it
  take_waiting_signals();
  ::dup2(::open("/dev/null", O_RDONLY | O_CLOEXEC), STDIN_FILENO);
  for (const int stream : {STDOUT_FILENO, STDERR_FILENO}) ::dup2(output, stream);
  ::execlp("mpirun", "mpirun", "-n", size.c_str(), "--allow-run-as-root", "--oversubscribe", "--bind-to", "none",
           "--enable-recovery", "--mca", "plm", "isolated", "sh", "-c", kPlace, folder.c_str(), nullptr);
  ::_exit(kNotFound);
}

[[noreturn]] void refuse(int status, const OwnedDescriptor& output) {
  if (WIFEXITED(status) && WEXITSTATUS(status) == kNotFound)
    throw Error(ErrorCode::config, {.where = "parallel.communicator",
                                    .what = "its ranks are started by mpirun",
                                    .found = "no mpirun in PATH",
                                    .expected = "an installed MPI",
                                    .next = "install openmpi-bin, or choose another communicator"});
  throw Error(ErrorCode::resources, {.where = "mpirun",
                                     .what = "it does not start processes for the ranks",
                                     .found = printable(text_of(output), 1000),
                                     .next = "see whether `mpirun -n 2 hostname` works"});
}

}  // namespace

MpirunPlaces::MpirunPlaces(std::string folder, int size) : folder_(std::move(folder)) {
  const std::string hold = folder_ + "/hold", count = std::to_string(size);
  if (::mkfifo(hold.c_str(), 0600) == 0) hold_ = OwnedDescriptor(::open(hold.c_str(), O_RDWR | O_CLOEXEC));
  if (!hold_) fail_resources(hold, "cannot be made", errno);
  output_ = OwnedDescriptor(::memfd_create("mpirun", MFD_CLOEXEC));  // a full disk keeps no word of it back
  if (!output_) fail_resources("mpirun", "no place for what it prints", errno);
  ::signal(SIGCHLD, SIG_DFL);  // where it is ignored, nobody learns that mpirun ended
  const pid_t parent = ::getpid();
  mpirun_ = ::fork();
  if (mpirun_ == 0) be_mpirun(folder_, output_.get(), count, parent);
  if (mpirun_ < 0) fail_resources("mpirun", "no process can be started", errno);
  const auto deadline = Clock::now() + kStart;
  for (int rank = 0, status = 0; rank < size;) {
    if (::access(place_file(folder_, rank).c_str(), F_OK) == 0) {
      ++rank;
      continue;
    }
    const bool ended = ::waitpid(mpirun_, &status, WNOHANG) != 0;
    if (ended) mpirun_ = -1;
    if (waiting_stop() != 0) {
      end();
      return;
    }
    if (!ended && Clock::now() > deadline) end();
    if (mpirun_ < 0) refuse(status, output_);
    std::this_thread::sleep_for(kLook);
  }
  there_ = true;
}

std::string MpirunPlaces::last_lines() {
  constexpr std::size_t kMost = 4096;
  end();
  std::string text = text_of(output_);
  if (text.size() > kMost) text.erase(0, text.find('\n', text.size() - kMost) + 1);
  return text;
}

void MpirunPlaces::end() noexcept {
  if (mpirun_ < 0) return;
  hold_.reset();
  for (const int signal : {0, SIGTERM, SIGKILL}) {
    if (signal == 0 && !there_) continue;  // nobody waits for that end yet
    if (signal != 0) ::kill(mpirun_, signal);
    for (const auto deadline = Clock::now() + kEnd; mpirun_ > 0 && Clock::now() < deadline;)
      if (::waitpid(mpirun_, nullptr, WNOHANG) != 0)
        mpirun_ = -1;
      else
        std::this_thread::sleep_for(kLook);
    if (mpirun_ < 0) return;
  }
}

PlaceEnvironment mpirun_place(const std::string& folder, int rank) {
  PlaceEnvironment environment;
  std::ifstream file(place_file(folder, rank));
  ::unlink(place_file(folder, rank).c_str());  // it may hold secrets, and is read once
  for (std::string variable; std::getline(file, variable, '\0');)
    if (const std::size_t equal = variable.find('='); equal != std::string::npos)
      environment.emplace_back(variable.substr(0, equal), variable.substr(equal + 1));
  return environment;
}

}  // namespace quern
