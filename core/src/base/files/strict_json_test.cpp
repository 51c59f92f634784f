// That the time of parsing grows with the text and not with its square, and what the reader adds to JSON's own rules.
#include "base/files/strict_json.h"

#include <functional>
#include <string>

#include <doctest/doctest.h>

#include "base/test_time.h"
#include "quern/testkit/refusal.h"

using namespace quern;
using testkit::check_holds;

namespace {

/// The text of an input error, or "accepted".
std::string refusal(std::string_view text) {
  return testkit::refusal(ErrorCode::input, [&] { parse_strict_json("x", text, 3); });
}

}  // namespace

TEST_CASE("a pointer of git-lfs is called that") {
  check_holds(refusal("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"), {"a git-lfs pointer"});
}

TEST_CASE("eight times the text takes about eight times as long") {
  constexpr int kFew = 2000, kFactor = 8;
  auto check = [](const char* what, const std::function<void(int)>& parse) {
    CAPTURE(what);
    const double few = seconds_of([&] { parse(kFew); }), many = seconds_of([&] { parse(kFew * kFactor); });
    CAPTURE(few);
    CAPTURE(many);
    CHECK(many < 4 * kFactor * few);  // the square would be 8 * kFactor times
  };
  check("objects", [](int count) {
    std::string text;
    for (int i = 0; i < count; ++i)
      text += (i == 0 ? "{\"" : ",\"") + std::to_string(i) + R"(":{"dtype":"U8","shape":[1],"offset":3})";
    parse_strict_json("x", text + "}", 3);
  });
  check("arrays", [](int count) {
    std::string text;
    for (int i = 0; i < count; ++i) text += (i == 0 ? "[" : ",") + std::string("[1,[2]]");
    parse_strict_json("x", text + "]", 3);
  });
  check("names", [](int count) {
    std::string text;
    for (int i = 0; i < count; ++i) text += (i == 0 ? "{\"" : ",\"") + std::to_string(i) + "\":[]";
    parse_strict_json("x", text + "}", 3);
  });
}

TEST_CASE("values of all kinds are read as the library reads them") {
  const std::string text =
      R"({"a": [1, -2, 2.5, 1e300, 18446744073709551615, true, false, null, "\u00e4\n", [], {}], "b": {"a": {"a": 0}}})";
  CHECK(parse_strict_json("x", text, 3) == nlohmann::json::parse(text));
  for (const char* alone : {"1", "\"a\"", "null", "[]", "{}"})
    CHECK(parse_strict_json("x", alone, 1) == nlohmann::json::parse(alone));
}

TEST_CASE("a name twice, a zero byte and too many levels are refused") {
  check_holds(refusal(R"({"a":1,"b":2,"a":3})"), {"x: a name stands twice in JSON: found 'a'"});
  check_holds(refusal(R"([{"a":{"b":1,"b":1}}])"), {"twice"});
  CHECK(refusal(R"([{"a":1},{"a":2}])") == "accepted");
  check_holds(refusal(std::string_view("[\0]", 3)), {"zero byte at offset 1"});
  CHECK(refusal("[[[1]]]") == "accepted");
  check_holds(refusal("[[[[1]]]]"), {"nested too deep: found more than 3 levels"});
  for (const char* text : {"[1e999]", "", "[1] 2"}) check_holds(refusal(text), {"not valid JSON"});
}
