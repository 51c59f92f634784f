#include "timed_choices.h"

#include <cublasLt.h>
#include <cudnn.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>

#include <nlohmann/json.hpp>

namespace quern::cuda {

namespace {

using nlohmann::json;

/// An object whose values are objects of texts; anything else becomes an empty one.
json parse(std::string_view text) {
  json root = json::parse(text, nullptr, false);
  return root.is_object() ? root : json::object();
}

std::string contents_of(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

}  // namespace

TimedChoices::TimedChoices(const std::string& gpu, std::string cache_file)
    : owner_(gpu + ", cuBLASLt " + std::to_string(cublasLtGetVersion()) + ", cuDNN " +
             std::to_string(cudnnGetVersion())),
      cache_file_(std::move(cache_file)) {
  if (!cache_file_.empty()) known_ = mine(contents_of(cache_file_));
}

std::optional<std::string> TimedChoices::find(const std::string& what, const std::string& mark) const {
  if (auto it = taken_.find(what); it != taken_.end()) return it->second;
  auto it = known_.find(what + mark);
  return it == known_.end() ? std::nullopt : std::optional(it->second);
}

void TimedChoices::take(const std::string& what, const std::string& choice) { taken_[what] = choice; }

void TimedChoices::measure(const std::string& what, const std::string& choice, const std::string& mark) {
  taken_[what] = measured_[what + mark] = choice;
  if (!cache_file_.empty()) write_file();
}

std::string TimedChoices::save() const { return json{{owner_, taken_}}.dump(); }

void TimedChoices::load(std::string_view text) {
  for (const auto& [what, choice] : mine(text)) taken_[what] = choice;
}

TimedChoices::Choices TimedChoices::mine(std::string_view text) const {
  Choices choices;
  const json root = parse(text);
  auto mine = root.find(owner_);
  if (mine == root.end() || !mine->is_object()) return choices;
  for (const auto& [what, choice] : mine->items())
    if (choice.is_string()) choices[what] = choice;
  return choices;
}

/// Merges what this process measured into the file, which is replaced as a whole: what it knows from elsewhere may be
/// older than what others have written since. A cache: faults are ignored.
void TimedChoices::write_file() const noexcept {
  try {
    std::filesystem::create_directories(std::filesystem::path(cache_file_).parent_path());
    json root = parse(contents_of(cache_file_));
    json& mine = root[owner_];
    if (!mine.is_object()) mine = json::object();
    for (const auto& [what, choice] : measured_) mine[what] = choice;
    std::string fresh = cache_file_ + "." + std::to_string(getpid());
    std::ofstream file(fresh, std::ios::binary);
    file << root.dump(1) << "\n";
    file.close();
    if (file)
      std::filesystem::rename(fresh, cache_file_);
    else
      std::filesystem::remove(fresh);
  } catch (...) {  // the next run times again
  }
}

std::string TimedChoices::cache_file() {
  const char* cache = std::getenv("XDG_CACHE_HOME");
  if (cache != nullptr && cache[0] == '/') return std::string(cache) + "/quern/cuda.json";
  const char* home = std::getenv("HOME");
  return home != nullptr && home[0] == '/' ? std::string(home) + "/.cache/quern/cuda.json" : std::string();
}

}  // namespace quern::cuda
