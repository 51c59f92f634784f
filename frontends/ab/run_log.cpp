#include "ab/run_log.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <fstream>
#include <limits>

#include <nlohmann/json.hpp>

#include "quern/error.h"

namespace quern::ab {

namespace {

using Json = nlohmann::json;

// A number that is not finite is null in the log.
double number(const Json& record, const char* key) {
  auto it = record.find(key);
  return it != record.end() && it->is_number() ? it->get<double>() : std::numeric_limits<double>::quiet_NaN();
}

std::int64_t integer(const Json& record, const char* key) {
  auto it = record.find(key);
  return it != record.end() && it->is_number_integer() ? it->get<std::int64_t>() : 0;
}

void take(RunLog& log, const Json& record) {
  auto event = record.is_object() ? record.find("event") : record.end();
  const std::string kind = event != record.end() && event->is_string() ? event->get<std::string>() : "";
  if (kind == "run") {
    log.tokens_per_step = integer(record, "tokens_per_step");
    log.device_bytes = integer(record, "device_bytes");
  } else if (kind == "step") {
    StepRecord step{integer(record, "step"), number(record, "loss"), number(record, "grad_norm"),
                    number(record, "tokens_per_second"), number(record, "waited")};
    while (!log.steps.empty() && log.steps.back().step >= step.step) log.steps.pop_back();  // repeated after a resume
    log.steps.push_back(step);
  } else if (kind == "eval") {
    log.validation_loss = number(record, "loss");
  } else if (kind == "end") {
    log.ended = true;
  }
}

bool same_bits(double a, double b) {
  return std::bit_cast<std::uint64_t>(a) == std::bit_cast<std::uint64_t>(b) || (std::isnan(a) && std::isnan(b));
}

}  // namespace

RunLog read_run_log(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw Error(ErrorCode::input, {.where = path, .what = "the run's log cannot be read"});
  RunLog log;
  std::string line;
  for (std::int64_t number = 1; std::getline(file, line) && !file.eof(); ++number) {
    Json record = Json::parse(line, nullptr, false);
    if (record.is_discarded())
      throw Error(ErrorCode::input, {.where = path + ":" + std::to_string(number), .what = "not JSON"});
    take(log, record);
  }
  return log;
}

std::optional<std::int64_t> first_difference(const RunLog& a, const RunLog& b) {
  for (std::size_t i = 0; i < std::max(a.steps.size(), b.steps.size()); ++i) {
    if (i >= a.steps.size()) return b.steps[i].step;
    if (i >= b.steps.size()) return a.steps[i].step;
    if (a.steps[i].step != b.steps[i].step) return std::min(a.steps[i].step, b.steps[i].step);
    if (!same_bits(a.steps[i].loss, b.steps[i].loss)) return a.steps[i].step;
  }
  return std::nullopt;
}

}  // namespace quern::ab
