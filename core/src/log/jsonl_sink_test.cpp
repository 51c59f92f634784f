#include "log/jsonl_sink.h"

#include <cmath>
#include <fstream>
#include <limits>
#include <sstream>

#include <unistd.h>

#include <doctest/doctest.h>
#include <nlohmann/json.hpp>

#include "quern/error.h"

using namespace quern;
namespace fs = std::filesystem;

namespace {

struct File {
  fs::path path = fs::temp_directory_path() / ("quern_log_" + std::to_string(::getpid()) + ".jsonl");
  ~File() { fs::remove(path); }
  std::string text() const {
    std::ifstream stream(path, std::ios::binary);
    std::ostringstream all;
    all << stream.rdbuf();
    return all.str();
  }
  void set(const std::string& text) const { std::ofstream(path, std::ios::binary) << text; }
};

LogEvent step(std::int64_t number) { return {"step", {{"step", number}}}; }

JsonlSink opened(const std::filesystem::path& path, bool resumed) {
  JsonlSink sink(path);
  sink.open({"", resumed, 1});
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

TEST_CASE("numbers survive, and what is not finite is null with its name") {
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
  JsonlSink first = opened(file.path, false);
  first.write(step(1));
  CHECK(file.text() == "{\"event\":\"step\",\"step\":1}\n");
  first.write(step(2));
  opened(file.path, true).write(step(3));
  CHECK(file.text() ==
        "{\"event\":\"step\",\"step\":1}\n{\"event\":\"step\",\"step\":2}\n{\"event\":\"step\",\"step\":3}\n");
  opened(file.path, false).write(step(4));
  CHECK(file.text() == "{\"event\":\"step\",\"step\":4}\n");
}

TEST_CASE("appending removes an unfinished last line, however long") {
  File file;
  const std::string kept = "{\"event\":\"step\",\"step\":1}\n", added = "{\"event\":\"step\",\"step\":9}\n";
  for (std::size_t tail : {0, 1, 40, 4095, 4096, 4097, 10000}) {
    CAPTURE(tail);
    file.set(kept + std::string(tail, '{'));
    opened(file.path, true).write(step(9));
    CHECK(file.text() == kept + added);
    file.set(std::string(tail, '{'));  // no finished line at all
    opened(file.path, true).write(step(9));
    CHECK(file.text() == added);
  }
}

TEST_CASE("a log that cannot be written is a resources error that names it") {
  fs::path missing = fs::temp_directory_path() / "quern_no_such_folder" / "log.jsonl";
  for (bool resumed : {false, true}) {
    try {
      JsonlSink sink = opened(missing, resumed);
      FAIL("opened");
    } catch (const Error& error) {
      CHECK(error.code() == ErrorCode::resources);
      CHECK(std::string(error.what()).find("log.jsonl: the log cannot be opened") != std::string::npos);
    }
  }
  if (fs::exists("/dev/full")) {
    JsonlSink sink = opened("/dev/full", false);
    CHECK_THROWS_WITH_AS(sink.write(step(1)), doctest::Contains("the log cannot be written"), Error);
  } else {
    MESSAGE("skipped the full disk: no /dev/full here");
  }
}
