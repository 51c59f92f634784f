// That the time of parsing grows with the text and not with its square, and what the reader adds to JSON's own rules.
#include "checkpoint/strict_json.h"

#include <algorithm>
#include <ctime>

#include <doctest/doctest.h>

#include "checkpoint/stored_tensor.h"
#include "checkpoint/test_support.h"

using namespace quern;

namespace {

// Of this process's own time, the shortest of a few: what else the machine does counts little.
double seconds(const std::function<void()>& action) {
  double best = 1e9;
  for (int i = 0; i < 3; ++i) {
    const std::clock_t begin = std::clock();
    action();
    best = std::min(best, static_cast<double>(std::clock() - begin) / CLOCKS_PER_SEC);
  }
  return best;
}

std::string header_of(int tensors) {
  std::string text;
  for (int i = 0; i < tensors; ++i)
    text += (i == 0 ? "{" : ",") + ("\"layer." + std::to_string(i)) +
            ".weight\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[" + std::to_string(i) + "," +
            std::to_string(i + 1) + "]}";
  return text + "}";
}

}  // namespace

TEST_CASE("eight times the text takes about eight times as long") {
  constexpr int kFew = 2000, kFactor = 8;
  auto check = [](const char* what, const std::function<void(int)>& parse) {
    CAPTURE(what);
    const double few = seconds([&] { parse(kFew); }), many = seconds([&] { parse(kFew * kFactor); });
    CAPTURE(few);
    CAPTURE(many);
    CHECK(many < 4 * kFactor * few);  // the square would be 8 * kFactor times
  };
  check("objects",
        [](int count) { parse_safetensors_header("x", header_of(count), static_cast<std::uint64_t>(count)); });
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
  CHECK_REFUSED(input, "x: a name stands twice in JSON: found 'a'",
                parse_strict_json("x", R"({"a":1,"b":2,"a":3})", 3));
  CHECK_REFUSED(input, "twice", parse_strict_json("x", R"([{"a":{"b":1,"b":1}}])", 3));
  parse_strict_json("x", R"([{"a":1},{"a":2}])", 3);
  CHECK_REFUSED(input, "zero byte at offset 1", parse_strict_json("x", std::string_view("[\0]", 3), 3));
  parse_strict_json("x", "[[[1]]]", 3);
  CHECK_REFUSED(input, "nested too deep: found more than 3 levels", parse_strict_json("x", "[[[[1]]]]", 3));
  CHECK_REFUSED(input, "not valid JSON", parse_strict_json("x", "[1e999]", 3));
  CHECK_REFUSED(input, "not valid JSON", parse_strict_json("x", "", 3));
  CHECK_REFUSED(input, "not valid JSON", parse_strict_json("x", "[1] 2", 3));
}
