#include "tensorboard_sink.h"

#include <sys/resource.h>

#include <cmath>
#include <csignal>
#include <filesystem>

#include <doctest/doctest.h>

#include "base/files/test_directory.h"
#include "event_file.h"
#include "quern/error.h"

using namespace quern;
using namespace quern::tensorboard;
namespace fs = std::filesystem;

namespace {

std::string only_file(const TestDirectory& directory) {
  REQUIRE(directory.entries() == 1);
  return read_text(fs::directory_iterator(directory.path())->path());
}

// Messages of the records; their frames are tests/tensorboard_test.py's to check, with a reader of its own.
std::vector<std::string> messages(const std::string& bytes) {
  std::vector<std::string> result;
  for (std::size_t at = 0; at < bytes.size();) {
    auto length = static_cast<unsigned char>(bytes[at]) + 256u * static_cast<unsigned char>(bytes[at + 1]);
    result.push_back(bytes.substr(at + 12, length));
    at += 16 + length;
  }
  return result;
}

}  // namespace

TEST_CASE("checksums follow RFC 3720, appendix B.4") {
  CHECK(crc32c("") == 0);
  CHECK(crc32c("123456789") == 0xe3069283);
  CHECK(crc32c(std::string(32, '\0')) == 0x8a9136aa);
  CHECK(crc32c(std::string(32, '\xff')) == 0x62a8ab43);
}

TEST_CASE("a record and its messages, byte for byte") {
  using namespace std::string_literals;
  CHECK(record("") == "\0\0\0\0\0\0\0\0\x29\x03\x98\x07\xd8\xea\x82\xa2"s);
  CHECK(version_event(1.0) == "\x09\0\0\0\0\0\0\xf0\x3f\x1a\x0d"s + "brain.Event:2");
  CHECK(start_event(1.0, 300) == "\x09\0\0\0\0\0\0\xf0\x3f\x10\xac\x02\x3a\x02\x08\x01"s);
  CHECK(scalars_event(1.0, 1, {{"a", 1.0f}}) ==
        "\x09\0\0\0\0\0\0\xf0\x3f\x10\x01\x2a\x0a\x0a\x08\x0a\x01\x61\x15\0\0\x80\x3f"s);
}

TEST_CASE("numbers of steps, evaluations and other events with a step are scalars, the rest is not") {
  TestDirectory directory;
  TensorboardSink sink;
  sink.open({directory.path(), false, 1});
  sink.write({"run", {{"name", std::string("a")}, {"step", std::int64_t{4}}}});
  sink.write({"step", {{"step", std::int64_t{5}}, {"tokens", std::int64_t{9}}, {"loss", 2.5}, {"lr", 1e-3}}});
  sink.write({"eval", {{"step", std::int64_t{5}}, {"loss", std::nan("")}}});
  sink.write({"telemetry", {{"step", std::int64_t{5}}, {"power_W", 300.0}, {"slowed_by", std::string("power limit")}}});
  sink.write({"scale",
              {{"step", std::int64_t{5}},
               {"tensor", std::string("ffn_norm.e4m3")},
               {"layer", std::int64_t{3}},
               {"amax", 2.5}}});
  sink.write({"checkpoint", {{"step", std::int64_t{5}}, {"path", std::string("p")}}});
  sink.write({"warning", {{"text", std::string("w")}}});
  sink.write({"end", {{"step", std::int64_t{5}}, {"loss", 2.5}}});
  auto events = messages(only_file(directory));  // each was flushed
  REQUIRE(events.size() == 6);
  CHECK(events[1].find("\x10\x05\x3a") != std::string::npos);  // TensorBoard drops step 5 and later
  CHECK(events[2].find("train/loss") != std::string::npos);
  CHECK(events[2].find("train/lr") != std::string::npos);
  CHECK(events[2].find("tokens") == std::string::npos);
  CHECK(events[3].find("eval/loss") != std::string::npos);
  CHECK(events[4].find("telemetry/power_W") != std::string::npos);
  CHECK(events[4].find("slowed_by") == std::string::npos);
  CHECK(events[5].find("scale/ffn_norm.e4m3/3/amax") != std::string::npos);
  CHECK(events[5].find("layer") == std::string::npos);
}

TEST_CASE("a directory that cannot be written is a resources error that names the file") {
  TensorboardSink sink;
  CHECK_THROWS_WITH_AS(sink.open({"/nowhere", false, 1}), doctest::Contains("/nowhere/events.out.tfevents."), Error);
}

TEST_CASE("an event that finds no room leaves no part of its record") {
  TestDirectory directory;
  TensorboardSink sink;
  sink.open({directory.path(), false, 1});
  const auto size = only_file(directory).size();
  ::signal(SIGXFSZ, SIG_IGN);
  rlimit old{};
  ::getrlimit(RLIMIT_FSIZE, &old);
  const rlimit small{size + 5, old.rlim_max};
  ::setrlimit(RLIMIT_FSIZE, &small);
  const LogEvent step{"step", {{"step", std::int64_t{5}}, {"loss", 2.5}}};
  CHECK_THROWS_WITH_AS(sink.write(step), doctest::Contains("the event file cannot be written"), Error);
  ::setrlimit(RLIMIT_FSIZE, &old);
  CHECK(only_file(directory).size() == size);
  sink.write(step);
  CHECK(messages(only_file(directory)).size() == 2);
}
