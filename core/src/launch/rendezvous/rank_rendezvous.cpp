#include "launch/rendezvous/rank_rendezvous.h"

#include <unistd.h>

#include <algorithm>
#include <fstream>

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

RankRendezvous::RankRendezvous(HostGroup& group) : group_(group) {
  const std::vector<std::string> machines = group.exchange(this_machine());
  if (std::count(machines.begin(), machines.end(), machines[0]) != group.size()) return;
  if (group.rank() == 0) own_.emplace();
  folder_ = group.exchange(own_ ? own_->path().string() : "")[0];
}

Rendezvous RankRendezvous::get(const std::string& communicator) const {
  return {.rank = group_.rank(),
          .size = group_.size(),
          .address = folder_.empty() ? "" : "file:" + folder_ + "/" + communicator,
          .timeout = group_.timeout(),
          .exchange = [&group = group_](std::string own) { return group.exchange(std::move(own)); }};
}

}  // namespace quern
