#include "tensorboard_sink.h"

#include <fcntl.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <optional>
#include <string_view>

#include "event_file.h"
#include "quern/error.h"

namespace quern::tensorboard {

namespace {

// Seconds since 1970.
double wall_time() {
  return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

[[noreturn]] void fail(const std::string& path, const std::string& what, int error_number) {
  throw Error(ErrorCode::resources, {.where = path,
                                     .what = what,
                                     .found = std::strerror(error_number),
                                     .next = "choose another log.directory, or free space there"});
}

// TensorBoard reads a run's files in the order of their names: the seconds lead.
std::string file_name() {
  std::array<char, 256> host{};
  if (::gethostname(host.data(), host.size() - 1) != 0 || host[0] == 0) std::strcpy(host.data(), "localhost");
  return "events.out.tfevents." + std::to_string(static_cast<std::int64_t>(wall_time())) + "." + host.data() + "." +
         std::to_string(::getpid()) + ".quern";
}

bool names_no_scalar(std::string_view key) {
  return key == "step" || key == "steps" || key == "tokens" || key == "time" || key == "eta" || key == "layer";
}

std::optional<std::int64_t> step_of(const LogEvent& event) {
  for (const auto& [key, value] : event.fields)
    if (key == "step" && std::holds_alternative<std::int64_t>(value)) return std::get<std::int64_t>(value);
  return std::nullopt;
}

// "train/", "eval/"; "scale/ffn_norm.e4m3/3/" for a tensor of a layer.
std::string group_of(const LogEvent& event) {
  std::string group = (event.kind == "step" ? "train" : event.kind) + "/";
  for (const auto& [key, value] : event.fields) {
    if (key == "tensor" && std::holds_alternative<std::string>(value)) group += std::get<std::string>(value) + "/";
    if (key == "layer" && std::holds_alternative<std::int64_t>(value))
      group += std::to_string(std::get<std::int64_t>(value)) + "/";
  }
  return group;
}

std::vector<std::pair<std::string, float>> scalars_of(const LogEvent& event) {
  const std::string group = group_of(event);
  std::vector<std::pair<std::string, float>> scalars;
  for (const auto& [key, value] : event.fields) {
    if (names_no_scalar(key)) continue;
    if (const auto* real = std::get_if<double>(&value))
      scalars.emplace_back(group + key, static_cast<float>(*real));
    else if (const auto* integer = std::get_if<std::int64_t>(&value))
      scalars.emplace_back(group + key, static_cast<float>(*integer));
  }
  return scalars;
}

}  // namespace

TensorboardSink::~TensorboardSink() {
  if (file_ >= 0) ::close(file_);
}

void TensorboardSink::open(const RunPlace& place) {
  path_ = place.directory + "/" + file_name();
  file_ = ::open(path_.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
  if (file_ < 0) fail(path_, "the event file cannot be opened", errno);
  append(version_event(wall_time()));
}

void TensorboardSink::append(const std::string& message) {
  const std::string bytes = record(message);
  const off_t end = ::lseek(file_, 0, SEEK_END);
  const ssize_t written = ::write(file_, bytes.data(), bytes.size());
  if (written == static_cast<ssize_t>(bytes.size())) return;
  const int reason = written < 0 ? errno : ENOSPC;  // a disk that took a part of it
  [[maybe_unused]] int ignored = ::ftruncate(file_, end);
  fail(path_, "the event file cannot be written", reason);
}

void TensorboardSink::write(const LogEvent& event) {
  std::optional<std::int64_t> step = step_of(event);
  if (!step || event.kind == "checkpoint" || event.kind == "warning" || event.kind == "sample" || event.kind == "end")
    return;
  if (event.kind == "run") return append(start_event(wall_time(), *step + 1));  // what an earlier start did after it
  auto scalars = scalars_of(event);
  if (!scalars.empty()) append(scalars_event(wall_time(), *step, scalars));
}

}  // namespace quern::tensorboard
