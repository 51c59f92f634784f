// Of log sinks: every event is taken, in order, whole on disk when write() returns, and a resumed run continues the
// files on disk. A sink's printed output is kept apart and checked likewise.
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <fstream>
#include <iostream>
#include <iterator>
#include <limits>
#include <map>
#include <set>
#include <utility>

#include "base/files/test_directory.h"
#include "conformance/contracts.h"
#include "conformance/harness/growth.h"

namespace quern::conformance {

namespace {

namespace fs = std::filesystem;

/// Standard output goes to a file for as long as this lives.
class Redirected {
 public:
  explicit Redirected(const fs::path& file) {
    std::cout.flush();
    std::fflush(stdout);
    kept_ = ::dup(STDOUT_FILENO);
    const int to = ::open(file.c_str(), O_WRONLY | O_CREAT | O_APPEND, 0600);
    if (kept_ < 0 || to < 0 || ::dup2(to, STDOUT_FILENO) < 0)
      throw Error(ErrorCode::resources, {.where = "standard output", .what = "cannot be redirected"});
    ::close(to);
  }
  ~Redirected() {
    std::cout.flush();
    std::fflush(stdout);
    ::dup2(kept_, STDOUT_FILENO);
    ::close(kept_);
  }
  Redirected(const Redirected&) = delete;
  Redirected& operator=(const Redirected&) = delete;

 private:
  int kept_ = -1;
};

std::map<std::string, std::string> contents(const fs::path& folder) {
  std::map<std::string, std::string> files;
  for (const auto& entry : fs::recursive_directory_iterator(folder)) {
    if (!entry.is_regular_file()) continue;
    std::ifstream file(entry.path(), std::ios::binary);
    files[entry.path().lexically_relative(folder).string()] = {std::istreambuf_iterator<char>(file), {}};
  }
  return files;
}

/// In every event that has fields: whether a file has the event.
std::string marker(std::size_t event) { return "marker-" + std::to_string(event) + "-"; }

std::vector<LogEvent> events() {
  using std::string;
  const double nan = std::nan(""), infinity = std::numeric_limits<double>::infinity();
  auto step = [](std::int64_t number, double loss) {
    return LogEvent{"step",
                    {{"step", number},
                     {"steps", std::int64_t{40}},
                     {"tokens", number * 512},
                     {"loss", loss},
                     {"lr", 1e-3},
                     {"norm", 0.5},
                     {"tokens_per_second", 3400.5},
                     {"eta", 12.5}}};
  };
  std::vector<LogEvent> all = {
      {"run", {{"step", std::int64_t{0}}}},
      step(1, 4.5),
      step(2, nan),
      step(3, -infinity),
      {"eval", {{"step", std::int64_t{3}}, {"loss", infinity}}},
      {"telemetry", {{"step", std::int64_t{3}}, {"power_W", 301.5}, {"slowed_by", string("power limit")}}},
      {"scale", {{"step", std::int64_t{3}}, {"tensor", string("x.e4m3")}, {"layer", std::int64_t{0}}, {"amax", 2.5}}},
      {"checkpoint", {{"step", std::int64_t{3}}, {"path", string("a \"quoted\" path\r\n\ttwo\rlines \xc3\xa9 \xff")}}},
      {"warning", {{"text", string()}}},
      {"of a kind that nobody knows", {{"most", std::numeric_limits<std::int64_t>::max()}, {"empty", string()}}},
      {"step", {}},
      {"end", {{"step", std::int64_t{40}}, {"loss", 2.5}}}};
  for (std::size_t i = 0; i < all.size(); ++i)
    if (!all[i].fields.empty()) all[i].fields.emplace_back("mark", marker(i));
  return all;
}

/// What a sink left: files when the last write had returned and when the sink was gone, and which of them it had
/// written anew meanwhile, as one keeps a current state.
struct Left {
  std::map<std::string, std::string> before, after;
  std::set<std::string> rewritten;
};

struct Sinking {
  TestDirectory scratch;
  fs::path run = scratch / "run";
  Sinking() { fs::create_directory(run); }

  /// Writes all events.
  Left write(const Subject& subject, bool resumed) {
    Redirected output(run / "standard output");
    auto sink = subject.make<LogSink>();
    sink->open({run.string(), resumed, 1});
    Left left;
    auto look = [&] {
      auto now = contents(run);
      for (const auto& [file, text] : left.after)
        if (!now.contains(file) || !now[file].starts_with(text)) left.rewritten.insert(file);
      left.before = std::exchange(left.after, std::move(now));
    };
    look();
    for (const LogEvent& event : events()) {
      sink->write(event);
      look();
    }
    sink.reset();
    look();
    return left;
  }
};

/// What a text shows of a field: its name, and a whole number or a text of plain letters as it is.
std::vector<std::string> shown_of(
    const std::pair<std::string, std::variant<std::int64_t, double, std::string>>& field) {
  std::vector<std::string> texts{field.first};
  if (const auto* integer = std::get_if<std::int64_t>(&field.second)) texts.push_back(std::to_string(*integer));
  if (const auto* real = std::get_if<double>(&field.second); real && *real == 3400.5) texts.emplace_back("3400.5");
  if (const auto* text = std::get_if<std::string>(&field.second); text && text->find('"') == std::string::npos)
    texts.push_back(*text);
  return texts;
}

/// A file that has all fields of the first step has all fields of all events.
void need_fields(const std::string& text, const std::string& file) {
  auto has = [&](const LogEvent& event, std::string* missing) {
    for (const auto& field : event.fields)
      for (const std::string& shown : shown_of(field))
        if (text.find(shown) == std::string::npos) return *missing = shown, false;
    return true;
  };
  std::string missing;
  if (!has(events()[1], &missing)) return;
  for (const LogEvent& event : events())
    need(has(event, &missing), "event \"" + event.kind + "\" in " + file, "without " + missing, "it");
}

std::string takes_events(const Subject& subject) {
  Sinking sinking;
  const Left left = sinking.write(subject, false);
  std::string shown;
  bool any_file = false, knows_loss = false;
  for (const auto& [file, text] : left.after) {
    if (text.empty()) continue;
    any_file = any_file || file != "standard output";
    knows_loss = knows_loss || text.find("loss") != std::string::npos;
    shown += (shown.empty() ? "" : ", ") + file + " " + std::to_string(text.size()) + " bytes";
    if (text.find(marker(0)) == std::string::npos) continue;  // it shows a choice of events
    for (std::size_t i = 0, at = 0; i < events().size(); ++i) {
      if (events()[i].fields.empty()) continue;
      const std::size_t found = text.find(marker(i), at);
      need(found != std::string::npos, "event " + std::to_string(i) + ", \"" + events()[i].kind + "\", in " + file,
           text.find(marker(i)) == std::string::npos ? "nothing" : "it before an earlier one",
           "it, for " + file + " has the first event; in the order in which they were written");
      at = found;
    }
    need_fields(text, file);
  }
  need(!any_file || knows_loss, "its files", "none of them has the loss of a step", "what the events have");
  return std::to_string(events().size()) + " events" + (shown.empty() ? "" : ": " + shown);
}

std::string flushes(const Subject& subject) {
  Sinking sinking;
  const Left left = sinking.write(subject, false);
  for (const auto& [file, text] : left.after) {
    if (file == "standard output") continue;  // its buffer is the program's
    if (left.rewritten.contains(file)) continue;
    const auto found = left.before.find(file);
    const std::size_t then = found == left.before.end() ? 0 : found->second.size();
    need(then >= text.size(), file + " when the last write has returned", std::to_string(then) + " bytes",
         std::to_string(text.size()) + ", as after its end: a crash must lose no event");
  }
  return "";
}

std::string goes_on(const Subject& subject) {
  Sinking sinking;
  const Left first = sinking.write(subject, false), resumed = sinking.write(subject, true);
  const auto& second = resumed.after;
  for (const auto& [file, text] : first.after) {
    if (first.rewritten.contains(file)) continue;
    auto found = second.find(file);
    const bool kept = found != second.end() && found->second.starts_with(text);
    need(kept, file + " after a resumed run", "other contents", "the previous contents, and more after them");
  }
  return "";
}

/// A folder that is not there, and one that is a file, which root cannot write to either.
std::string bad_directory(const Subject& subject) {
  Sinking sinking;
  const Left left = sinking.write(subject, false);
  const bool writes = std::any_of(left.after.begin(), left.after.end(),
                                  [](const auto& file) { return file.first != "standard output"; });
  std::ofstream(sinking.scratch / "file") << "no folder";
  for (const char* place : {"no such folder", "file"}) {
    Redirected output(sinking.scratch / "standard output");
    auto sink = subject.make<LogSink>();
    const std::string what = std::string("a run directory that ") + (*place == 'f' ? "is a file" : "is not there");
    try {
      sink->open({sinking.scratch / place, false, 1});
      for (const LogEvent& event : events()) sink->write(event);
    } catch (const Error& error) {
      need(error.code() == ErrorCode::resources, what, error.what(), "a resources error");
      continue;
    }
    need(!writes, what, "accepted, and its files are lost", "a resources error");
  }
  return writes ? "refused" : "needs no directory";
}

std::string grows(const Subject& subject) {
  Sinking sinking;
  Redirected output(sinking.run / "standard output");
  auto sink = subject.make<LogSink>();
  sink->open({sinking.run.string(), false, 1});
  return need_no_growth("an event written", [&, step = events()[1]] { sink->write(step); });
}

}  // namespace

std::map<std::string, std::string> written_log(const Subject& subject) {
  Sinking sinking;
  std::map<std::string, std::string> files = sinking.write(subject, false).after;
  files.erase("standard output");  // what a terminal shows
  return files;
}

void check_log_sink(Report& report, const Subject& subject) {
  report.contract("takes all events", [&] { return takes_events(subject); });
  report.contract("flushes", [&] { return flushes(subject); });
  report.contract("resumes", [&] { return goes_on(subject); });
  report.contract("no run directory", [&] { return bad_directory(subject); });
  report.contract("events leave nothing", [&] { return grows(subject); });
}

}  // namespace quern::conformance
