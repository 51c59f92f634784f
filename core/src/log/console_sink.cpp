#include "log/console_sink.h"

#include <algorithm>
#include <cstdio>
#include <optional>
#include <utility>

#include "base/format.h"
#include "base/shorten.h"

namespace quern {

namespace {

// Control characters from file names and the like must not reach a terminal.
std::string printable(std::string text) {
  for (char& c : text)
    if ((static_cast<unsigned char>(c) < 0x20 && c != '\n') || c == 0x7f) c = '?';
  return text;
}

std::string padded(std::string text, std::size_t width) {
  if (text.size() < width) text.append(width - text.size(), ' ');
  return text;
}

std::string right_aligned(const std::string& text, std::size_t width) {
  return text.size() < width ? std::string(width - text.size(), ' ') + text : text;
}

// Builds a line out of the fields that are there.
class Line {
 public:
  explicit Line(const LogEvent& event) : event_(event) {}

  std::optional<double> number(const char* key) const {
    const auto* value = find(key);
    if (!value) return std::nullopt;
    if (const auto* integer = std::get_if<std::int64_t>(value)) return static_cast<double>(*integer);
    if (const auto* real = std::get_if<double>(value)) return *real;
    return std::nullopt;
  }
  /// The field as it is: whole numbers in full, texts without control characters.
  std::string plain(const char* key) const {
    const auto* value = find(key);
    if (!value) return "";
    if (const auto* integer = std::get_if<std::int64_t>(value)) return std::to_string(*integer);
    if (const auto* real = std::get_if<double>(value)) return significant(*real);
    return printable(std::get<std::string>(*value));
  }
  std::string fixed(const char* key, int digits) const {
    const std::optional<double> value = number(key);
    return value ? format_fixed(*value, digits) : plain(key);
  }
  static std::string significant(double value) {
    char text[32];
    std::snprintf(text, sizeof text, "%.6g", value);
    return text;
  }

  Line& add(const std::string& text) {
    if (!text.empty()) text_ += (text_.empty() ? "" : "  ") + text;
    return *this;
  }
  /// "before value after", when the field is there.
  template <class Format>
  Line& add(const char* key, const char* before, Format format, const char* after = "") {
    if (auto value = number(key)) add(before + format(*value) + after);
    return *this;
  }
  Line& add_plain(const char* key, const char* before = "", const char* after = "") {
    if (find(key)) add(before + plain(key) + after);
    return *this;
  }
  std::string take() {
    text_.erase(text_.find_last_not_of(' ') + 1);
    return std::move(text_);
  }

 private:
  const std::variant<std::int64_t, double, std::string>* find(const char* key) const {
    for (const auto& [name, value] : event_.fields)
      if (name == key) return &value;
    return nullptr;
  }

  const LogEvent& event_;
  std::string text_;
};

std::string loss(double value) { return format_fixed(value, 4); }

std::string rate(double value) {
  char text[32];
  std::snprintf(text, sizeof text, "%.1e", value);
  return text;
}

std::string step_line(const LogEvent& event) {
  Line line(event);
  std::string steps = line.plain("steps");
  line.add("step  " + right_aligned(line.plain("step"), steps.size()) + (steps.empty() ? "" : "/" + steps));
  line.add("loss", "loss ", [](double v) { return padded(loss(v), 7); });  // up to 99.9999
  line.add("lr", "lr ", rate);
  line.add("grad_norm", "norm ", [](double v) { return padded(format_fixed(v, 2), 5); });
  line.add(
      "tokens_per_second", "", [](double v) { return right_aligned(format_count(v), 5); }, " tok/s");
  return line.add("eta", "eta ", format_duration).take();
}

std::string run_line(const LogEvent& event) {
  Line line(event);
  line.add("run  ")
      .add_plain("name")
      .add_plain("model")
      .add("parameters", "", format_count, " parameters")
      .add_plain("device")
      .add_plain("precision");
  std::string steps = line.plain("steps");
  if (auto tokens = line.number("tokens_per_step"))
    return line.add(steps + " steps of " + format_count(*tokens) + " tokens").take();
  return line.add_plain("steps", "", " steps").take();
}

std::string start_line(const LogEvent& event) {
  Line line(event);
  std::string parts;
  for (const auto& [key, value] : event.fields) {
    if (key == "seconds") continue;
    std::string name = printable(key);
    std::replace(name.begin(), name.end(), '_', ' ');
    parts += (parts.empty() ? ": " : ", ") + name + " " + line.fixed(key.c_str(), 1);
  }
  return line.add("start").add("seconds", "", format_duration).take() + parts;
}

std::string end_line(const LogEvent& event) {
  Line line(event);
  line.add("end  ").add_plain("step", "", " steps").add("tokens", "", format_count, " tokens");
  line.add("loss", "loss ", loss).add("val_loss", "val loss ", loss).add("time", "", format_duration);
  return line.add("tokens_per_second", "", format_count, " tok/s").add_plain("export", "exported to ").take();
}

std::string spike_line(const LogEvent& event) {
  Line line(event);
  line.add("spike").add_plain("step", "step ");
  return line.add("value", (line.plain("what") + " ").c_str(), loss)
      .add("mean", "mean ", loss)
      .add("z", "z ", [](double z) { return format_fixed(z, 1); })
      .take();
}

std::string other_line(const LogEvent& event) {
  Line line(event);
  line.add(printable(event.kind));
  for (const auto& [key, value] : event.fields)
    if (key == "data")  // of a step: as many names as it had rows, for files
      line.add("data " + shortened(line.plain("data")));
    else
      line.add_plain(key.c_str(), (printable(key) + " ").c_str());
  return line.take();
}

// Colours only what should catch the eye.
std::string coloured(const std::string& kind, const std::string& text) {
  const char* colour = kind == "warning" ? "\x1b[33m" : kind == "eval" || kind == "end" ? "\x1b[1m" : "";
  return *colour ? colour + text + "\x1b[0m" : text;
}

}  // namespace

std::string to_console_line(const LogEvent& event) {
  if (event.kind == "run") return run_line(event);
  if (event.kind == "step") return step_line(event);
  if (event.kind == "end") return end_line(event);
  if (event.kind == "start") return start_line(event);
  if (event.kind == "eval")
    return Line(event)
        .add("eval ")
        .add_plain("step", "step ")
        .add("tokens", "", format_count, " tokens")
        .add("loss", "loss ", loss)
        .add(
            "accuracy", "accuracy ", [](double share) { return format_fixed(100 * share, 2); }, "%")
        .take();
  if (event.kind == "checkpoint") return Line(event).add("saved").add_plain("step", "step ").add_plain("path").take();
  if (event.kind == "spike") return spike_line(event);
  if (event.kind == "warning") return Line(event).add("warning:").take() + " " + Line(event).add_plain("text").take();
  return other_line(event);
}

ConsoleSink::~ConsoleSink() { end_progress(); }

// A step that a reader of plain lines is not shown: neither the first, nor the last, nor every n-th.
static bool is_between(const LogEvent& event, std::int64_t every) {
  Line line(event);
  auto step = line.number("step"), steps = line.number("steps");
  if (!step) return false;
  auto number = static_cast<std::int64_t>(*step);
  return number % every != 0 && number != 1 && step != steps;
}

void ConsoleSink::end_progress() {
  if (in_progress_) out_ << "\n" << std::flush;
  in_progress_ = false;
}

// Telemetry is for files; the console says when clocks are held down, and when the reason changes.
bool ConsoleSink::newly_slowed(const LogEvent& event) {
  const std::string reason = Line(event).plain("slowed_by");
  return std::exchange(slowed_by_, reason) != reason && !reason.empty();
}

void ConsoleSink::write(const LogEvent& event) {
  if (event.kind == "scale") return;  // for files: one for each tensor
  if (event.kind == "telemetry" && !newly_slowed(event)) return;
  if (style_ == ConsoleStyle::plain && event.kind == "step" && is_between(event, step_every_)) return;
  const std::string line = to_console_line(event);
  if (style_ == ConsoleStyle::plain) {
    out_ << line << "\n" << std::flush;
  } else if (event.kind == "step") {
    // Erased and rewritten in place, without wrapping: a wrapped line could not be erased.
    out_ << "\r\x1b[K\x1b[?7l" << line << "\x1b[?7h" << std::flush;
    in_progress_ = true;
  } else {
    end_progress();
    out_ << coloured(event.kind, line) << "\n" << std::flush;
  }
}

}  // namespace quern
