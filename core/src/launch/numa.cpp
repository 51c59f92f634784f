#include "launch/numa.h"

#include <sched.h>

#include <algorithm>
#include <charconv>
#include <fstream>

namespace quern {

namespace {

/// Of "0-3,8,10-11".
cpu_set_t processors_in(std::string_view list) {
  cpu_set_t set;
  CPU_ZERO(&set);
  while (!list.empty()) {
    const std::string_view item = list.substr(0, list.find(','));
    list.remove_prefix(std::min(list.size(), item.size() + 1));
    unsigned first = 0, last = 0;
    const char* const end = item.data() + item.size();
    const auto [stop, error] = std::from_chars(item.data(), end, first);
    if (error != std::errc()) continue;
    last = first;
    if (stop != end && *stop == '-') std::from_chars(stop + 1, end, last);
    for (unsigned cpu = first; cpu <= last && cpu < CPU_SETSIZE; ++cpu) CPU_SET(cpu, &set);
  }
  return set;
}

}  // namespace

bool pin_to_numa_node(int node, const std::string& nodes) {
  if (node < 0) return false;
  std::string list;
  std::getline(std::ifstream(nodes + "/node" + std::to_string(node) + "/cpulist"), list);
  cpu_set_t wanted = processors_in(list), allowed;
  if (::sched_getaffinity(0, sizeof allowed, &allowed) != 0) return false;
  CPU_AND(&wanted, &wanted, &allowed);  // a container or a launcher may have taken some away
  return CPU_COUNT(&wanted) > 0 && ::sched_setaffinity(0, sizeof wanted, &wanted) == 0;
}

}  // namespace quern
