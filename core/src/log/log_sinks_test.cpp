#include "log/log_sinks.h"

#include <doctest/doctest.h>

#include "base/files/test_directory.h"

using namespace quern;

TEST_CASE("sinks are made by id, with sound defaults") {
  for (const Factory& factory : log_sink_factories()) {
    CAPTURE(factory.id);
    CHECK(factory.kind == "log");
    for (const OptionSpec& spec : factory.options) {
      OptionValue value = spec.default_value;
      CHECK(!check_option(spec, value));
    }
    OptionValues values = default_values(factory.options);
    const TestDirectory directory;
    if (factory.id == "jsonl") values.set("path", directory / "log.jsonl");
    std::unique_ptr<LogSink> sink(static_cast<LogSink*>(factory.create(values)));
    REQUIRE(sink);
    if (factory.id == "jsonl") {
      sink->open({});
      sink->write({"end", {}});
      CHECK(read_text(directory / "log.jsonl") == "{\"event\":\"end\"}\n");
    }
  }
}
