#include "base/phases.h"

#include <algorithm>

#include "base/clock.h"
#include "base/format.h"

namespace quern {

void Phases::enter(std::string_view phase) {
  leave();
  current_ = phase;
  seconds_of(phase);
}

void Phases::leave() {
  const double time = now();
  if (!current_.empty()) seconds_of(current_) += time - since_;
  current_.clear();
  since_ = time;
}

void Phases::split(std::string_view phase, double seconds) {
  seconds_of(phase) += seconds;
  since_ += seconds;
}

double& Phases::seconds_of(std::string_view phase) {
  const auto known = std::find_if(all_.begin(), all_.end(), [phase](const auto& one) { return one.first == phase; });
  return known != all_.end() ? known->second : all_.emplace_back(phase, 0).second;
}

double Phases::total() const {
  double total = 0;
  for (const auto& [name, seconds] : all_) total += seconds;
  return total;
}

std::string Phases::text() const {
  std::vector<std::string> texts;
  for (const auto& [name, seconds] : all_) texts.push_back(name + " " + format_fixed(seconds, 1));
  return format_duration(total()) + ": " + format_list(texts);
}

}  // namespace quern
