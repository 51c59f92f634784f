#include "shared/pinned_store/available_memory.h"

#include <algorithm>
#include <fstream>

namespace quern {

namespace {

/// The number behind `key` in a file of lines "key 12" or "key: 12 kB"; of a file that is one number, with no key.
std::optional<std::size_t> number_in(const std::string& path, const std::string& key = "") {
  std::ifstream file(path);
  std::size_t number = 0;
  if (key.empty()) return file >> number ? std::optional(number) : std::nullopt;
  for (std::string word; file >> word;)
    if (word == key) return file >> number ? std::optional(number) : std::nullopt;
  return std::nullopt;
}

/// Files of a control group, by version.
struct GroupFiles {
  const char *folder, *limit, *used, *reclaimable;
};
constexpr GroupFiles kVersion1{"/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes",
                               "total_inactive_file"};
constexpr GroupFiles kVersion2{"/sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"};

/// Bytes that a group and its enclosing groups leave. A container may not see the enclosing groups' folders.
std::optional<std::size_t> left_in_groups(const std::string& root, const GroupFiles& files, std::string group) {
  std::optional<std::size_t> least;
  while (true) {
    const std::string folder = root + files.folder + group + "/";
    const std::optional<std::size_t> limit = number_in(folder + files.limit), used = number_in(folder + files.used);
    if (limit && used) {
      const std::size_t kept =
          *used - std::min(*used, number_in(folder + "memory.stat", files.reclaimable).value_or(0));
      const std::size_t left = *limit - std::min(*limit, kept);
      least = std::min(least.value_or(left), left);
    }
    if (group.empty()) return least;
    group.resize(group.rfind('/'));
  }
}

}  // namespace

std::optional<std::size_t> available_memory(const std::string& root) {
  std::optional<std::size_t> least;
  if (const auto kib = number_in(root + "/proc/meminfo", "MemAvailable:")) least = *kib << 10;
  std::ifstream groups(root + "/proc/self/cgroup");
  for (std::string line; std::getline(groups, line);) {
    const std::size_t first = line.find(':'), second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    const std::string controllers = "," + line.substr(first + 1, second - first - 1) + ",";
    std::string group = line.substr(second + 1);
    if (group == "/") group.clear();
    if (!group.empty() && group[0] != '/') continue;
    std::optional<std::size_t> left;
    if (controllers == ",,") left = left_in_groups(root, kVersion2, group);
    if (controllers.find(",memory,") != std::string::npos) left = left_in_groups(root, kVersion1, group);
    if (left) least = std::min(least.value_or(*left), *left);
  }
  return least;
}

}  // namespace quern
