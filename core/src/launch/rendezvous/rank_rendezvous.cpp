#include "launch/rendezvous/rank_rendezvous.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <fstream>
#include <system_error>

#include "base/files/durable_file.h"

namespace quern {

namespace {

/// Equal for processes that see the same files and devices: containers of one machine have different names.
std::string this_machine() {
  std::string boot;
  std::getline(std::ifstream("/proc/sys/kernel/random/boot_id"), boot);
  char name[256] = {};
  ::gethostname(name, sizeof name - 1);
  return boot + ' ' + name;
}

std::string private_folder() {
  std::string path = std::filesystem::temp_directory_path() / "quern-ranks-XXXXXX";
  if (!::mkdtemp(path.data())) fail_resources(path, "rank 0 cannot make a folder for the ranks", errno);
  return path;
}

}  // namespace

RankRendezvous::RankRendezvous(HostGroup& group) : group_(group) {
  const std::vector<std::string> machines = group.exchange(this_machine());
  if (std::count(machines.begin(), machines.end(), machines[0]) != group.size()) return;
  if (group.rank() == 0) folder_ = private_folder();
  folder_ = group.exchange(folder_)[0];
}

RankRendezvous::~RankRendezvous() {
  std::error_code ignored;
  if (group_.rank() == 0 && !folder_.empty()) std::filesystem::remove_all(folder_, ignored);
}

Rendezvous RankRendezvous::get(const std::string& communicator) const {
  return {.rank = group_.rank(),
          .size = group_.size(),
          .address = folder_.empty() ? "" : "file:" + (folder_ / communicator).string(),
          .timeout = group_.timeout(),
          .exchange = [&group = group_](std::string own) { return group.exchange(std::move(own)); }};
}

}  // namespace quern
