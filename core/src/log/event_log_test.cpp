#include "log/event_log.h"

#include <stdexcept>

#include <doctest/doctest.h>

#include "quern/error.h"

using namespace quern;

namespace {

struct Taken {
  std::vector<std::string> texts;  ///< of an event, its kind or its warning
  int fails = 0;                   ///< how many events from now on; each in another way
};

struct Sink final : LogSink {
  explicit Sink(Taken& where) : taken(where) {}
  void open(const RunPlace& place) override {
    if (place.directory == "/error") throw Error(ErrorCode::resources, {.where = "/error/log", .what = "is full"});
    if (place.directory == "/exception") throw std::runtime_error("no socket");
    if (place.directory == "/int") throw 5;
  }
  void write(const LogEvent& event) override {
    switch (taken.fails > 0 ? taken.fails-- : 0) {
      case 0: break;
      case 1: throw 5;
      case 2: throw std::runtime_error("the socket closed");
      default: throw Error(ErrorCode::resources, {.where = "/a/log", .what = "the disk is full"});
    }
    taken.texts.push_back(event.kind == "warning" ? std::get<std::string>(event.fields.at(0).second) : event.kind);
  }
  Taken& taken;
};

void add(EventLog& log, const std::string& id, Taken& taken, const std::string& directory = "") {
  log.add(id, std::make_unique<Sink>(taken), {directory, false, 1});
}

using Texts = std::vector<std::string>;

}  // namespace

TEST_CASE("a sink that fails is named to the others once, is tried again, and its missing events are counted") {
  EventLog log;
  Taken good, bad;
  add(log, "good", good);
  add(log, "bad", bad);
  log.write({"run", {}});
  bad.fails = 4;  // of a step, the warning and two more steps
  for (const char* kind : {"one", "two", "three", "four"}) log.write({kind, {}});
  CHECK(log.end() == Texts{});
  const std::string missing = "log sink \"bad\": 4 events are missing: /a/log: the disk is full";
  CHECK(good.texts == Texts{"run", "one",
                            "log sink \"bad\" fails, and the run continues without it: /a/log: the disk is full", "two",
                            "three", "four", missing});
  CHECK(bad.texts == Texts{"run", "four", missing});
}

TEST_CASE("what no sink takes is returned at the end") {
  EventLog log;
  Taken bad;
  add(log, "bad", bad);
  log.write({"run", {}});
  CHECK(log.end() == Texts{});
  bad.fails = 100;
  log.write({"step", {}});
  const Texts untold = log.end();
  REQUIRE(untold.size() == 2);
  CHECK(untold[0].starts_with("log sink \"bad\" fails"));
  CHECK(untold[1] == "log sink \"bad\": 2 events are missing: /a/log: the disk is full");
}

TEST_CASE("all sinks may fail at once") {
  EventLog log;
  Taken first, second;
  add(log, "first", first);
  add(log, "second", second);
  first.fails = second.fails = 100;
  for (int i = 0; i < 10; ++i) log.write({"step", {}});
  CHECK(log.end().size() == 4);
}

TEST_CASE("a sink that cannot be opened is an error with its name") {
  EventLog log;
  Taken taken;
  CHECK_THROWS_WITH_AS(add(log, "x", taken, "/error"), "log sink \"x\": /error/log: is full", Error);
  CHECK_THROWS_WITH_AS(add(log, "x", taken, "/exception"), doctest::Contains("log sink \"x\": no socket"), Error);
  CHECK_THROWS_WITH_AS(add(log, "x", taken, "/int"), doctest::Contains("log sink \"x\": an exception"), Error);
}
