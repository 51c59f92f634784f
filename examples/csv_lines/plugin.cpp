// A table for spreadsheets: events.csv in the run's folder, a line for each field of each event: event, field, value.
#include <cmath>
#include <fstream>

#include "quern/error.h"
#include "quern/plugin.h"

namespace {

using namespace quern;

/// Quoted as RFC 4180 says, where it has to be. Line ends become spaces, so that an event stays on its lines.
std::string quoted(std::string text) {
  for (char& c : text)
    if (c == '\n' || c == '\r') c = ' ';
  if (text.find_first_of(",\"") == std::string::npos) return text;
  std::string out = "\"";
  for (char c : text) out += c == '"' ? std::string("\"\"") : std::string(1, c);
  return out + "\"";
}

std::string value_of(const std::variant<std::int64_t, double, std::string>& value) {
  if (const auto* text = std::get_if<std::string>(&value)) return quoted(*text);
  if (const auto* integer = std::get_if<std::int64_t>(&value)) return std::to_string(*integer);
  const double number = std::get<double>(value);
  if (!std::isfinite(number)) return std::isnan(number) ? "nan" : number > 0 ? "inf" : "-inf";
  char text[32];
  std::snprintf(text, sizeof text, "%.17g", number);
  return text;
}

class CsvLines final : public LogSink {
 public:
  void open(const RunPlace& place) override {
    const std::string path = place.directory + "/events.csv";
    file_.open(path, place.resumed ? std::ios::app : std::ios::trunc);
    if (!place.resumed) file_ << "event,field,value\n" << std::flush;
    if (!file_)
      throw Error(ErrorCode::resources,
                  {.where = path, .what = "cannot be written", .next = "choose another log.directory"});
  }
  // Flushed: a crash loses no event.
  void write(const LogEvent& event) override {
    std::string lines;
    for (const auto& [field, value] : event.fields)
      lines += quoted(event.kind) + "," + quoted(field) + "," + value_of(value) + "\n";
    file_ << lines << std::flush;
    if (!file_) throw Error(ErrorCode::resources, {.where = "events.csv", .what = "an event could not be written"});
  }

 private:
  std::ofstream file_;
};

}  // namespace

QUERN_PLUGIN("log", "csv_lines", manifest) {
  manifest.version = "0.1.0";
  manifest.licence = "Apache-2.0";
  manifest.add<LogSink>("csv_lines", "events.csv in the run's folder, a line for each field", {},
                        [](const OptionValues&) { return std::make_unique<CsvLines>(); });
}
