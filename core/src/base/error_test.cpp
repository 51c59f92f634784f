// Messages quote files that others wrote; none of their bytes may steer a terminal or break a log.
#include "quern/error.h"

#include <string>

#include <doctest/doctest.h>

#include "base/shorten.h"

using namespace quern;

TEST_CASE("a message has its parts in order, without those that are empty") {
  CHECK(std::string(Error(ErrorCode::input, {"f", "w", "x", "y", "n"}).what()) == "f: w: found x, expected y; n");
  CHECK(std::string(Error(ErrorCode::input, {"f", "w", "", "y", ""}).what()) == "f: w: expected y");
}

TEST_CASE("control characters and bytes that are no UTF-8 do not reach a message") {
  const Error error(ErrorCode::input, {"\x1b[2Jfile", "line\nline", std::string("a\0b", 3), "\xff|\xc2\x9b", ""});
  CHECK(std::string(error.what()) == "?[2Jfile: line\nline: found a?b, expected ?|??");
  CHECK(error.detail().found.size() == 3);  // the parts stay as they were
  for (const char* good : {"model.a", "\u00e4 \u2264 \U0001f600", "\u00a0", ""}) CHECK(without_control(good) == good);
  CHECK(without_control("\x80|\xc3|\xc0\xaf|\xed\xa0\x80|\xf4\x90\x80\x80|\xf5\x80\x80\x80") == "?|?|??|???|????|????");
}
