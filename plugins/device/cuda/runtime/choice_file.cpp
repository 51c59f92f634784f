#include "runtime/choice_file.h"

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <thread>

#include <nlohmann/json.hpp>

#define XXH_INLINE_ALL
#include <xxhash.h>

namespace quern::cuda {

namespace {

using nlohmann::json;
using Owners = std::map<std::string, ChoiceFile::Choices>;

constexpr std::uintmax_t kLargest = 16u << 20;  ///< bytes; a model's choices take some 10 KiB

std::string checksum_of(const std::string& owner, const std::string& what, const std::string& choice) {
  const std::string text = owner + '\n' + what + '\n' + choice;
  return std::to_string(XXH3_64bits(text.data(), text.size()));
}

struct Content {
  bool later = false;  ///< a schema that is not known here
  Owners owners;
};

Content content_of(const std::string& path) {
  std::error_code none;
  const std::uintmax_t size = std::filesystem::file_size(path, none);
  if (none || size > kLargest) return {};
  std::ifstream file(path, std::ios::binary);
  const json root = json::parse(std::string(std::istreambuf_iterator<char>(file), {}), nullptr, false);
  if (!root.is_object() || !root.contains("schema") || !root["schema"].is_number_integer()) return {};
  if (root["schema"] != ChoiceFile::kSchema) return {.later = root["schema"] > ChoiceFile::kSchema, .owners = {}};
  Content content;
  if (!root.contains("choices") || !root["choices"].is_object()) return content;
  for (const auto& [owner, entries] : root["choices"].items()) {
    if (!entries.is_object()) continue;
    for (const auto& [what, entry] : entries.items()) {
      if (!entry.is_array() || entry.size() != 2 || !entry[0].is_string() || !entry[1].is_string()) continue;
      const std::string choice = entry[0];
      if (entry[1] == checksum_of(owner, what, choice)) content.owners[owner][what] = choice;
    }
  }
  return content;
}

std::string text_of(const Owners& owners) {
  json choices = json::object();
  for (const auto& [owner, entries] : owners)
    for (const auto& [what, choice] : entries) choices[owner][what] = {choice, checksum_of(owner, what, choice)};
  return json{{"schema", ChoiceFile::kSchema}, {"choices", choices}}.dump(1) + "\n";
}

}  // namespace

ChoiceFile::Choices ChoiceFile::read(const std::string& owner) const {
  if (path_.empty()) return {};
  return content_of(path_).owners[owner];
}

void ChoiceFile::add(const std::string& owner, const std::string& what, const std::string& choice) const noexcept {
  if (path_.empty()) return;
  try {
    Content content = content_of(path_);
    if (content.later) return;
    content.owners[owner][what] = choice;
    std::filesystem::create_directories(std::filesystem::path(path_).parent_path());
    const std::string fresh = path_ + "." + std::to_string(getpid());
    std::ofstream file(fresh, std::ios::binary);
    file << text_of(content.owners);
    file.close();
    if (file)
      std::filesystem::rename(fresh, path_);
    else
      std::filesystem::remove(fresh);
  } catch (...) {  // the next run times again
  }
}

ChoiceFile::Lock ChoiceFile::lock() {
  if (path_.empty()) return Lock(-1);
  std::error_code none;
  std::filesystem::create_directories(std::filesystem::path(path_).parent_path(), none);
  const int descriptor = open((path_ + ".lock").c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0644);
  if (descriptor < 0) return Lock(-1);
  const auto end = std::chrono::steady_clock::now() + std::chrono::minutes(may_wait_ ? 1 : 0);
  while (flock(descriptor, LOCK_EX | LOCK_NB) != 0) {
    if (errno != EWOULDBLOCK || std::chrono::steady_clock::now() >= end) {
      may_wait_ = false;
      close(descriptor);
      return Lock(-1);
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
  return Lock(descriptor);
}

ChoiceFile::Lock::~Lock() {
  if (descriptor_ >= 0) close(descriptor_);
}

}  // namespace quern::cuda
