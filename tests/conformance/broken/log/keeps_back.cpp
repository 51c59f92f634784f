// Faults: events are written when the sink ends, so that a crash loses them; an option has no help.
#include <fstream>

#include "quern/plugin.h"

namespace {

class KeepsBack final : public quern::LogSink {
 public:
  ~KeepsBack() override { std::ofstream(path_, std::ios::app) << text_; }
  void open(const quern::RunPlace& place) override { path_ = place.directory + "/events.txt"; }
  void write(const quern::LogEvent& event) override {
    text_ += event.kind;
    for (const auto& [name, value] : event.fields) text_ += " " + name;
    text_ += "\n";
  }

 private:
  std::string path_, text_;
};

}  // namespace

QUERN_PLUGIN("log", "keeps_back", manifest) {
  manifest.version = "1.0";
  manifest.licence = "Apache-2.0";
  quern::OptionSpec spec;
  spec.key = "unused";
  spec.default_value = std::int64_t{0};
  manifest.add<quern::LogSink>("keeps_back", "writes late", {spec},
                               [](const quern::OptionValues&) { return std::make_unique<KeepsBack>(); });
}
