#include "runtime/timed_choices.h"

#include <cublasLt.h>
#include <cudnn.h>

#include <cstdlib>

#include <nlohmann/json.hpp>

namespace quern::cuda {

TimedChoices::TimedChoices(const std::string& gpu, const std::string& cache_file)
    : owner_(gpu + ", cuBLASLt " + std::to_string(cublasLtGetVersion()) + ", cuDNN " +
             std::to_string(cudnnGetVersion())),
      file_(cache_file),
      filed_(file_.read(owner_)) {}

std::optional<std::string> TimedChoices::taken(const std::string& what) const {
  auto it = taken_.find(what);
  return it == taken_.end() ? std::nullopt : std::optional(it->second);
}

std::optional<std::string> TimedChoices::known(const std::string& what, const std::string& mark, const Usable& usable) {
  if (std::optional<std::string> choice = taken(what); choice && usable(*choice)) return choice;
  auto it = filed_.find(what + mark);
  if (it == filed_.end() || !usable(it->second)) return std::nullopt;
  take(what, it->second);
  return it->second;
}

std::optional<std::string> TimedChoices::known_or_timed(const std::string& what, const std::string& mark,
                                                        const Usable& usable,
                                                        const std::function<std::optional<Found>()>& time) {
  if (std::optional<std::string> choice = known(what, mark, usable)) return choice;
  const ChoiceFile::Lock lock = file_.lock();
  filed_ = file_.read(owner_);
  if (std::optional<std::string> choice = known(what, mark, usable)) return choice;
  const std::optional<Found> found = time();
  if (!found) return std::nullopt;
  take(what, found->choice);
  if (found->lasting) {
    filed_[what + mark] = found->choice;
    file_.add(owner_, what + mark, found->choice);
  }
  return found->choice;
}

std::string TimedChoices::save() const { return nlohmann::json{{owner_, taken_}}.dump(); }

void TimedChoices::load(std::string_view text) {
  const nlohmann::json root = nlohmann::json::parse(text, nullptr, false);
  if (!root.is_object()) return;
  auto mine = root.find(owner_);
  if (mine == root.end() || !mine->is_object()) return;
  for (const auto& [what, choice] : mine->items())
    if (choice.is_string()) take(what, choice);
}

std::string TimedChoices::cache_file() {
  const char* cache = std::getenv("XDG_CACHE_HOME");
  if (cache != nullptr && cache[0] == '/') return std::string(cache) + "/quern/cuda.json";
  const char* home = std::getenv("HOME");
  return home != nullptr && home[0] == '/' ? std::string(home) + "/.cache/quern/cuda.json" : std::string();
}

}  // namespace quern::cuda
