// Messages quote files that others wrote; none of their bytes may steer a terminal or break a log.
#include "quern/error.h"

#include <functional>
#include <limits>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include "base/shorten.h"
#include "quern/shape.h"
#include "quern/testkit/refusal.h"

using namespace quern;

TEST_CASE("a message has its parts in order, without those that are empty") {
  CHECK(std::string(Error(ErrorCode::input, {"f", "w", "x", "y", "n"}).what()) == "f: w: found x, expected y; n");
  CHECK(std::string(Error(ErrorCode::input, {"f", "w", "", "y", ""}).what()) == "f: w: expected y");
}

TEST_CASE("a message is of bounded length, whatever is quoted in it") {
  const std::string huge(3000000, 'x');
  for (const ErrorDetail& detail : {ErrorDetail{huge, "w", "", "", ""}, ErrorDetail{"f", "w", huge, "", ""},
                                    ErrorDetail{"f", "w", "x", huge, ""}, ErrorDetail{"f", "w", "x", "y", huge}}) {
    const std::string message = Error(ErrorCode::input, detail).what();
    CHECK(message.size() < 1000);
    CHECK(message.find("xxx...xxx") != std::string::npos);
  }
  CHECK(std::string(Error(ErrorCode::input, {huge, huge, huge, huge, huge}).what()).size() < 20000);
  CHECK(bounded("/a/long/path/to/file.tok", 14) == "/a/long...ile.tok");
  CHECK(without_control(bounded("\u00e4\u00e4\u00e4\u00e4", 5)) == bounded("\u00e4\u00e4\u00e4\u00e4", 5));
}

TEST_CASE("sizes that 64 bits do not hold are refused instead of wrapped") {
  constexpr std::int64_t kMost = std::numeric_limits<std::int64_t>::max();
  CHECK(element_count({1 << 20, 1 << 20, 1 << 20}) == std::int64_t{1} << 60);
  CHECK(byte_count({1 << 20, 1 << 20, 1 << 20}, DType::f32) == std::int64_t{1} << 62);
  CHECK(rounded_up(257, 256) == 512);
  for (const std::function<std::int64_t()>& size : std::vector<std::function<std::int64_t()>>{
           [] {
             return element_count({1 << 30, 1 << 30, 1 << 30});
           },
           [] {
             return byte_count({1 << 20, 1 << 20, 1 << 20}, DType::f64);
           },
           [] {
             return Geometry{std::int64_t{1} << 60, 16}.tokens();
           },
           [] { return Dim::tokens(3, 2).at({1, kMost / 3}); }, [] { return rounded_up(kMost - 1, 256); }}) {
    CHECK(testkit::error_of(size).code() == ErrorCode::resources);
  }
}

TEST_CASE("control characters and bytes that are no UTF-8 do not reach a message") {
  const Error error(ErrorCode::input, {"\x1b[2Jfile", "line\nline", std::string("a\0b", 3), "\xff|\xc2\x9b", ""});
  CHECK(std::string(error.what()) == "?[2Jfile: line\nline: found a?b, expected ?|??");
  CHECK(error.detail().found.size() == 3);  // the parts stay as they were
  for (const char* good : {"model.a", "\u00e4 \u2264 \U0001f600", "\u00a0", ""}) CHECK(without_control(good) == good);
  CHECK(without_control("\x80|\xc3|\xc0\xaf|\xed\xa0\x80|\xf4\x90\x80\x80|\xf5\x80\x80\x80") == "?|?|??|???|????|????");
}
