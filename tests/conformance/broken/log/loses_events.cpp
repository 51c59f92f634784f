// Fault: a file that cannot be opened is no error, and its events are lost.
#include <fstream>

#include "quern/plugin.h"

namespace {

class LosesEvents final : public quern::LogSink {
 public:
  void open(const quern::RunPlace& place) override {
    file_.open(place.directory + "/events.txt", place.resumed ? std::ios::app : std::ios::trunc);
  }
  void write(const quern::LogEvent& event) override {
    file_ << event.kind;
    for (const auto& [name, value] : event.fields) file_ << " " << name;
    file_ << std::endl;
  }

 private:
  std::ofstream file_;
};

}  // namespace

QUERN_PLUGIN("log", "loses_events", manifest) {
  manifest.version = "1.0";
  manifest.licence = "Apache-2.0";
  manifest.add<quern::LogSink>("loses_events", "names of fields in events.txt", {},
                               [](const quern::OptionValues&) { return std::make_unique<LosesEvents>(); });
}
