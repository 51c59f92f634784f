// Every rule of option checking, at its edges; spelling must read back as the same value.
#include "quern/options.h"

#include <cmath>
#include <cstdlib>
#include <limits>

#include <doctest/doctest.h>

#include "quern/error.h"

using namespace quern;

namespace {

struct Sample {
  std::int64_t steps = 10;
  double rate = 3e-4;
  bool shuffle = true;
  std::string format = "bf16";
  std::string card = "auto";
  std::vector<std::string> names;
  std::vector<double> weights;
  std::string room = "1GiB";
};

OptionTable<Sample> sample_options() {
  OptionTable<Sample> t;
  t.add("steps", &Sample::steps, "how long").at_least(1).at_most(100);
  t.add("rate", &Sample::rate, "how fast").above(0).at_most(1);
  t.add("shuffle", &Sample::shuffle, "whether");
  t.add("format", &Sample::format, "in what").one_of({"fp32", "bf16", "e4m3"});
  t.add("card", &Sample::card, "on which")
      .one_of({"auto", "RTX-4090", "RTX-4090-Laptop", "L4-8GB", "L4-16GB"})
      .spelled({{"GeForce RTX 4090", "RTX-4090"}, {"L4", "L4-8GB"}, {"L4", "L4-16GB"}});
  t.add("names", &Sample::names, "of whom");
  t.add("mix.weights", &Sample::weights, "how much").at_least(0);
  t.add("room", &Sample::room, "how large").size();
  return t;
}

const OptionSpec& spec_of(const OptionTable<Sample>& table, std::string_view key) {
  for (const OptionSpec& spec : table.specs())
    if (spec.key == key) return spec;
  fail_internal("sample options", "no such spec");
}

std::string problem(std::string_view key, OptionValue value) {
  auto table = sample_options();
  return check_option(spec_of(table, key), value).value_or("");
}

}  // namespace

TEST_CASE("a spelling of a choice becomes that choice, and one that several have is none") {
  auto taken = [](const std::string& text) {
    OptionValue value = text;
    const auto table = sample_options();
    const auto problem = check_option(spec_of(table, "card"), value);
    return problem.value_or(std::get<std::string>(value));
  };
  for (const char* text : {"RTX-4090", "rtx 4090", "GeForce RTX 4090", "GEFORCE-RTX-4090"})
    CHECK(taken(text) == "RTX-4090");
  CHECK(taken("l4 16gb") == "L4-16GB");
  for (const char* text : {"L4", "4090", ""}) CHECK(taken(text).starts_with("not a choice, found "));
  CHECK(problem("format", std::string("E4M3")).starts_with("not a choice"));  // no spellings: as it is written
}

TEST_CASE("values inside their spec pass, edges included") {
  CHECK(problem("steps", std::int64_t{1}) == "");
  CHECK(problem("steps", std::int64_t{100}) == "");
  CHECK(problem("rate", 1.0) == "");
  CHECK(problem("rate", double{std::numeric_limits<float>::min()}) == "");
  CHECK(problem("format", std::string("e4m3")) == "");
  CHECK(problem("names", std::vector<std::string>{"a", ""}) == "");
  CHECK(problem("names", std::string("one")) == "");  // a text is a list of one
  CHECK(problem("mix.weights", std::vector<double>{0, 2}) == "");
}

TEST_CASE("a bad value is described with what was found and expected") {
  CHECK(problem("steps", std::int64_t{0}) == "out of range, found 0, expected an integer from 1 to 100");
  CHECK(problem("steps", std::numeric_limits<std::int64_t>::max()).find("out of range") == 0);
  CHECK(problem("steps", 5.0) == "wrong type, found 5.0, expected an integer from 1 to 100");
  CHECK(problem("steps", std::string("5")) == "wrong type, found \"5\", expected an integer from 1 to 100");
  CHECK(problem("rate", 0.0) == "out of range, found 0.0, expected a number above 0.0 and at most 1.0");
  CHECK(problem("rate", std::nan("")).find("not finite, found nan") == 0);
  CHECK(problem("rate", std::numeric_limits<double>::infinity()).find("not finite, found inf") == 0);
  CHECK(problem("rate", 1e-50) ==
        "beyond 32-bit numbers, found 1e-50, expected a number above 0.0 and at most 1.0 that is 0 or has a magnitude "
        "from 1.2e-38 to 3.4e+38");
  CHECK(problem("mix.weights", std::vector<double>{1, 1e39}).find("beyond 32-bit numbers, found 1e+39") == 0);
  CHECK(problem("shuffle", std::int64_t{1}) == "wrong type, found 1, expected true or false");
  CHECK(problem("format", std::string("bf61")) ==
        "not a choice, found \"bf61\", expected one of \"fp32\", \"bf16\", \"e4m3\"; nearest name `bf16`");
  CHECK(problem("format", true).find("wrong type") == 0);
  CHECK(problem("names", std::vector<double>{1}) == "wrong type, found [1.0], expected a list of texts");
  CHECK(problem("mix.weights", std::vector<double>{1, -1}) ==
        "out of range, found -1.0, expected a list of numbers, each of at least 0.0");
}

TEST_CASE("an integer becomes a real, and an empty list any list") {
  auto table = sample_options();
  OptionValue one = std::int64_t{1};
  CHECK_FALSE(check_option(spec_of(table, "rate"), one));
  CHECK(std::get<double>(one) == 1.0);
  OptionValue texts = std::vector<std::string>{};
  CHECK_FALSE(check_option(spec_of(table, "mix.weights"), texts));
  CHECK(type_of(texts) == OptionType::real_list);
  OptionValue reals = std::vector<double>{};
  CHECK_FALSE(check_option(spec_of(table, "names"), reals));
  CHECK(type_of(reals) == OptionType::text_list);
}

TEST_CASE("integers beyond 2^53 are compared with their bound exactly") {
  OptionSpec spec;
  spec.key = "k";
  spec.maximum = 9007199254740992.0;  // 2^53: the next integer rounds to it as a double
  OptionValue at = std::int64_t{9007199254740992}, beyond = std::int64_t{9007199254740993};
  CHECK_FALSE(check_option(spec, at));
  CHECK(check_option(spec, beyond));
}

TEST_CASE("reals are spelled so that they read back") {
  for (double value : {0.1, 1.0, -3.0, 1e-300, 1e22, 123456789.125, 3e-4, -0.0}) {
    std::string text = to_string(OptionValue(value));
    CAPTURE(text);
    CHECK(std::strtod(text.c_str(), nullptr) == value);
    CHECK(text.find_first_of(".e") != std::string::npos);  // TOML would read an integer otherwise
  }
  CHECK(to_string(OptionValue(std::string("a\"b\\\n\x01"))) == "\"a\\\"b\\\\\\n\\u0001\"");
  CHECK(to_string(OptionValue(std::vector<std::string>{"a", "b"})) == "[\"a\", \"b\"]");
  CHECK(to_string(OptionValue(true)) == "true");
}

TEST_CASE("a table gives defaults, binds the keys that are set and keeps the rest") {
  auto table = sample_options();
  OptionValues defaults = default_values(table.specs());
  CHECK(defaults.all().size() == 8);
  CHECK(defaults.get<std::int64_t>("steps") == 10);
  OptionValues values;
  values.set("format", std::string("fp32"));
  Sample bound = table.bind(values);
  CHECK(bound.format == "fp32");
  CHECK(bound.rate == 3e-4);
  CHECK_THROWS_AS(values.get<bool>("shuffle"), const Error&);
  auto required = sample_options();
  required.add("more", &Sample::steps, "needed").required();
  CHECK(default_values(required.specs()).find("more") == nullptr);
}

TEST_CASE("the nearest name is near") {
  const std::vector<std::string> known = {"learning_rate", "warmup", "cpu", "cuda", "x"};
  CHECK(nearest_name("lerning_rate", known) == "learning_rate");
  CHECK(nearest_name("Learning-Rate", known) == "learning_rate");
  CHECK(nearest_name("cup", known) == "cpu");
  CHECK(nearest_name("cuad", known) == "cuda");
  CHECK(nearest_name("y", known) == "");
  CHECK(nearest_name("temperature", known) == "");
  CHECK(nearest_name("", known) == "");
  CHECK(nearest_name(std::string(100000, 'a'), known) == "");
  CHECK(nearest_name("cpu", {}) == "");
}

TEST_CASE("a size is bytes, or a number with a unit") {
  struct Size {
    const char* text;
    std::int64_t bytes;
  };
  for (const Size& size : {Size{"", 0},
                           {"0", 0},
                           {"0GiB", 0},
                           {"1", 1},
                           {"800000B", 800000},
                           {"2KiB", 2048},
                           {"1.5 MiB", 3 << 19},
                           {"16GiB", std::int64_t{16} << 30},
                           {"1TiB", std::int64_t{1} << 40},
                           {"3KB", 3000},
                           {"1e3MB", 1000000000},
                           {"2GB", 2000000000},
                           {"4194304TiB", std::int64_t{1} << 62}}) {
    CAPTURE(size.text);
    CHECK(size_in_bytes(size.text) == size.bytes);
    CHECK(problem("room", std::string(size.text)) == "");
  }
  for (const char* text : {"lots", "GiB", "1 GiBs", "1gib", "-1", "0.5", "nan", " 1"}) {
    CAPTURE(text);
    CHECK_FALSE(size_in_bytes(text));
    CHECK(problem("room", std::string(text)).starts_with("not a size, found \""));
  }
  for (const char* text : {"inf", "1e30", "4194305TiB", "9223372036854775807"}) {
    CAPTURE(text);
    CHECK_FALSE(size_in_bytes(text));
    CHECK(problem("room", std::string(text)) ==
          "out of range, found \"" + std::string(text) + "\", expected a size of at most 4194304 TiB");
  }
  CHECK(problem("names", std::string("a\0b", 3)).starts_with("a zero byte in it, found "));
  OptionValue bytes = std::int64_t{17179869184};
  CHECK(check_option(spec_of(sample_options(), "room"), bytes).value_or("") == "");
  CHECK(bytes == OptionValue(std::string("17179869184")));
  CHECK(problem("room", std::int64_t{-1}) ==
        "not a size, found \"-1\", expected a size: bytes, or a number with B, KiB, MiB, GiB, TiB, KB, MB, GB or TB");
  CHECK(problem("room", 1.5).starts_with("wrong type, found 1.5, expected a size"));
}
