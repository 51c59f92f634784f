#include "log/jsonl_sink.h"

#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmath>
#include <csignal>
#include <limits>
#include <memory>

#include <doctest/doctest.h>
#include <nlohmann/json.hpp>

#include "base/files/test_directory.h"
#include "quern/error.h"
#include "quern/testkit/refusal.h"

using namespace quern;
namespace fs = std::filesystem;

namespace {

struct File {
  TestDirectory folder;
  fs::path path = folder / "log.jsonl";
  std::string text() const { return read_text(path); }
  void set(const std::string& text) const { write_text(path, text); }
};

LogEvent step(std::int64_t number) { return {"step", {{"step", number}}}; }

std::unique_ptr<JsonlSink> opened(const std::filesystem::path& path, bool resumed) {
  auto sink = std::make_unique<JsonlSink>(path);
  sink->open({"", resumed, 1});
  return sink;
}

}  // namespace

TEST_CASE("fields keep their order and types") {
  LogEvent event{"step",
                 {{"step", std::int64_t{120}},
                  {"loss", 4.5},
                  {"lr", 3e-4},
                  {"note", std::string("a \"b\"\n\\")},
                  {"big", std::numeric_limits<std::int64_t>::max()}}};
  CHECK(to_json_line(event) ==
        R"({"event":"step","step":120,"loss":4.5,"lr":0.0003,"note":"a \"b\"\n\\","big":9223372036854775807})");
}

TEST_CASE("numbers survive, and a number that is not finite is null with its name") {
  for (double value : {0.1, 1e-300, 12345678.9, -0.0, 5e-324})
    CHECK(nlohmann::json::parse(to_json_line({"x", {{"v", value}}}))["v"].get<double>() == value);
  double infinity = std::numeric_limits<double>::infinity();
  CHECK(to_json_line({"x", {{"a", std::nan("")}, {"b", infinity}, {"c", -infinity}}}) ==
        R"({"event":"x","a":null,"a_text":"nan","b":null,"b_text":"inf","c":null,"c_text":"-inf"})");
}

TEST_CASE("any text gives one line of valid JSON") {
  for (const std::string& text :
       {std::string("\xff\xfe"), std::string("a\0b", 3), std::string("\x1b[31m\r\n"), std::string("\xc3\xa4")}) {
    std::string line = to_json_line({"warning", {{"text", text}}});
    CHECK(line.find('\n') == std::string::npos);
    CHECK(nlohmann::json::accept(line));
  }
}

TEST_CASE("each event is in the file as soon as it is written, a new run replaces the log, a resumed one goes on") {
  File file;
  auto sink = opened(file.path, false);
  sink->write(step(1));
  CHECK(file.text() == "{\"event\":\"step\",\"step\":1}\n");
  sink->write(step(2));
  CHECK_THROWS_WITH_AS(opened(file.path, true), doctest::Contains("another run writes this log"), Error);
  sink.reset();
  opened(file.path, true)->write(step(3));
  CHECK(file.text() ==
        "{\"event\":\"step\",\"step\":1}\n{\"event\":\"step\",\"step\":2}\n{\"event\":\"step\",\"step\":3}\n");
  opened(file.path, false)->write(step(4));
  CHECK(file.text() == "{\"event\":\"step\",\"step\":4}\n");
}

TEST_CASE("appending removes an unfinished last line, however long") {
  File file;
  const std::string kept = "{\"event\":\"step\",\"step\":1}\n", added = "{\"event\":\"step\",\"step\":9}\n";
  for (std::size_t tail : {0, 1, 40, 4095, 4096, 4097, 10000}) {
    CAPTURE(tail);
    const std::string unfinished = added.substr(0, 10) + std::string(tail, '{');
    file.set(kept + unfinished);
    opened(file.path, true)->write(step(9));
    CHECK(file.text() == kept + added);
    file.set(unfinished);  // no finished line at all
    opened(file.path, true)->write(step(9));
    CHECK(file.text() == added);
  }
}

TEST_CASE("a log that cannot be opened is a resources error that names it, and what to choose instead") {
  const fs::path folder = fs::temp_directory_path() / "quern_no_such_folder";
  for (bool resumed : {false, true}) {
    JsonlSink chosen(folder / "a.jsonl"), relative("quern_no_such_folder/a.jsonl"), standard;
    for (auto [sink, next] : {std::pair(&chosen, "choose another log.jsonl.path"),
                              {&relative, "choose another log.jsonl.path; it starts at "},
                              {&standard, "choose another log.directory"}}) {
      const Error error = testkit::error_of([&] { sink->open({folder, resumed, 1}); });
      CHECK(error.code() == ErrorCode::resources);
      testkit::check_holds(error.what(), {".jsonl: the log cannot be opened: found No such file"});
      CHECK(error.detail().next.starts_with(next));
    }
  }
}

TEST_CASE("a file that is no log is left as it is, by new runs and resumed ones") {
  File file;
  const fs::path link = file.path.string() + ".link";
  fs::create_symlink(file.path, link);
  for (const std::string& text :
       {std::string("QUERNTOK\0\1", 10), std::string("[model]\nid = 1\n"), std::string("{}\n")})
    for (const fs::path& path : {file.path, link})
      for (bool resumed : {false, true}) {
        file.set(text);
        CHECK_THROWS_WITH_AS(opened(path, resumed), doctest::Contains("is not a log of quern"), Error);
        CHECK(file.text() == text);
      }
  fs::remove(link);
  fs::remove(file.path);
  REQUIRE(::mkfifo(file.path.c_str(), 0600) == 0);
  CHECK_THROWS_WITH_AS(opened(file.path, false), doctest::Contains("found no regular file"), Error);
}

TEST_CASE("an event that finds no room leaves no part of itself, and later ones are written once there is room") {
  File file;
  auto sink = opened(file.path, false);
  sink->write(step(1));
  const std::string one = file.text();
  ::signal(SIGXFSZ, SIG_IGN);
  rlimit old{};
  ::getrlimit(RLIMIT_FSIZE, &old);
  const rlimit small{one.size() + 5, old.rlim_max};
  ::setrlimit(RLIMIT_FSIZE, &small);
  CHECK_THROWS_WITH_AS(sink->write(step(2)), doctest::Contains("the log cannot be written: found File too large"),
                       Error);
  ::setrlimit(RLIMIT_FSIZE, &old);
  CHECK(file.text() == one);
  sink->write(step(3));
  CHECK(file.text() == one + "{\"event\":\"step\",\"step\":3}\n");
}

TEST_CASE("a log that is removed is begun anew") {
  File file;
  auto sink = opened(file.path, false);
  sink->write(step(1));
  fs::remove(file.path);
  sink->write(step(2));
  CHECK(file.text() == "{\"event\":\"step\",\"step\":2}\n");
  fs::remove(file.path);
  file.set("notes\n");
  CHECK_THROWS_WITH_AS(sink->write(step(3)), doctest::Contains("is not a log of quern"), Error);
  CHECK_THROWS_AS(sink->write(step(4)), Error);
  CHECK(file.text() == "notes\n");
}
