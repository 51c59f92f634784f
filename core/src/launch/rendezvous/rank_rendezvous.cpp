#include "launch/rendezvous/rank_rendezvous.h"

#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <utility>
#include <vector>

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

}  // namespace

RankRendezvous::RankRendezvous(Rendezvous ranks) : ranks_(std::move(ranks)) {
  const std::vector<std::string> machines = ranks_.exchange(this_machine());
  const bool on_one = std::count(machines.begin(), machines.end(), machines[0]) == ranks_.size;
  if (on_one && ranks_.rank == 0) own_.emplace();
  folder_ = ranks_.exchange(own_ ? own_->path().string() : "")[0];
}

Rendezvous RankRendezvous::get(const std::string& communicator) const {
  Rendezvous found = ranks_;
  if (!folder_.empty()) found.address = "file:" + folder_ + "/" + communicator;
  return found;
}

}  // namespace quern
