#include "log/log_sinks.h"

#include <fstream>

#include <unistd.h>

#include <doctest/doctest.h>

using namespace quern;
namespace fs = std::filesystem;

TEST_CASE("sinks are made by id, with sound defaults") {
  for (const Factory& factory : log_sink_factories()) {
    CAPTURE(factory.id);
    CHECK(factory.kind == "log");
    for (const OptionSpec& spec : factory.options) {
      OptionValue value = spec.default_value;
      CHECK(!check_option(spec, value));
    }
    OptionValues values = default_values(factory.options);
    fs::path path = fs::temp_directory_path() / ("quern_sink_" + std::to_string(::getpid()));
    if (factory.id == "jsonl") values.set("path", path.string());
    std::unique_ptr<LogSink> sink(static_cast<LogSink*>(factory.create(values)));
    REQUIRE(sink);
    if (factory.id == "jsonl") {
      sink->open({});
      sink->write({"end", {}});
      std::string line;
      std::getline(std::ifstream(path) >> std::ws, line);
      CHECK(line == "{\"event\":\"end\"}");
      fs::remove(path);
    }
  }
}
