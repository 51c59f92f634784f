// Reading: positions, overrides, and text that is hostile.
#include "config/document.h"

#include <filesystem>
#include <string>

#include <doctest/doctest.h>

#include "base/files/test_directory.h"
#include "quern/error.h"
#include "quern/testkit/refusal.h"
#include "test_paths.h"

using namespace quern;
using testkit::check_refused;
using testkit::refusal;

namespace {

const ConfigNode& at(const ConfigDocument& document, std::initializer_list<const char*> path) {
  const ConfigNode* node = &document.root();
  for (const char* name : path) {
    REQUIRE(node->children.contains(name));
    node = &node->children.find(name)->second;
  }
  return *node;
}

std::string repeated(std::string_view text, int times) {
  std::string out;
  for (int i = 0; i < times; ++i) out += text;
  return out;
}

std::string parse_error(std::string_view text) {
  return refusal(ErrorCode::config, [&] { ConfigDocument::parse(text, "run.toml"); });
}

std::string set_error(std::string_view assignment) {
  ConfigDocument document = ConfigDocument::parse("[a]\nb = 1\n", "run.toml");
  return refusal(ErrorCode::config, [&] { document.set(assignment); });
}

}  // namespace

TEST_CASE("every value knows its type and place") {
  ConfigDocument document = ConfigDocument::parse(
      "[a]\nint = 3\nreal = 1.5\n  flag = true\ntext = \"x\"\nlist = [\"p\", \"q\"]\nreals = [1, 2.5]\nnone = []\n"
      "mixed = [1, \"a\"]\nday = 2020-01-01\nx.y = 4\nsub = { z = 5 }\n",
      "run.toml");
  CHECK(at(document, {"a"}).is_table);
  CHECK(at(document, {"a", "int"}).value == OptionValue(std::int64_t{3}));
  CHECK(at(document, {"a", "real"}).value == OptionValue(1.5));
  CHECK(at(document, {"a", "flag"}).position.text() == "run.toml:4:3");
  CHECK(at(document, {"a", "text"}).found == "\"x\"");
  CHECK(at(document, {"a", "list"}).value == OptionValue(std::vector<std::string>{"p", "q"}));
  CHECK(at(document, {"a", "reals"}).value == OptionValue(std::vector<double>{1, 2.5}));
  CHECK(at(document, {"a", "none"}).value == OptionValue(std::vector<std::string>{}));
  CHECK_FALSE(at(document, {"a", "mixed"}).value);
  CHECK(at(document, {"a", "day"}).found == "a date or time");
  CHECK(at(document, {"a", "x", "y"}).position.text() == "run.toml:11:3");
  CHECK(at(document, {"a", "sub", "z"}).value == OptionValue(std::int64_t{5}));
}

TEST_CASE("a syntax error has its place and toml++'s description") {
  CHECK(parse_error("[a]\nb = \n").starts_with("run.toml:2:"));
  CHECK(parse_error("[a]\nb = \n").find("not valid TOML: ") != std::string::npos);
  CHECK(parse_error("[a]\nb = 1\nb = 2\n").starts_with("run.toml:3:"));
  CHECK(parse_error("a = \"\xff\"").starts_with("run.toml:1:"));
  for (const std::string_view bytes : {std::string_view("\xff\xfe[\0a\0]\0", 8), std::string_view("[\0a\0]\0", 6)})
    CHECK(parse_error(bytes).ends_with("; save the file as text in UTF-8"));
  CHECK(parse_error(std::string_view("a = \0", 5)).starts_with("run.toml:1:"));
  CHECK(parse_error("a = 99999999999999999999").starts_with("run.toml:1:"));
}

TEST_CASE("overrides replace, add, and say where they are from") {
  ConfigDocument document = ConfigDocument::parse("[a]\nb = 1\n[a.t]\nk = 1\n", "run.toml");
  for (const char* assignment :
       {"a.b=2", " a.c = 16GiB", "d.e.f=data/x=y.bin", "a.q=\"7\"", "a.l=[1, 2]", "a.t={ m = 1 }", "a.s=true", "a.e= "})
    document.set(assignment);
  CHECK(at(document, {"a", "b"}).value == OptionValue(std::int64_t{2}));
  CHECK(at(document, {"a", "b"}).position.text() == "--set a.b");
  CHECK(at(document, {"a", "c"}).value == OptionValue(std::string("16GiB")));
  CHECK(at(document, {"d", "e", "f"}).value == OptionValue(std::string("data/x=y.bin")));
  CHECK(at(document, {"a", "q"}).value == OptionValue(std::string("7")));
  CHECK(at(document, {"a", "l"}).value == OptionValue(std::vector<double>{1, 2}));
  CHECK(at(document, {"a", "s"}).value == OptionValue(true));
  CHECK(at(document, {"a", "e"}).value == OptionValue(std::string()));
  CHECK(at(document, {"a", "t"}).children.size() == 1);
  CHECK(at(document, {"a", "t", "m"}).position.text() == "--set a.t");
  document.set("a.b=3");
  CHECK(at(document, {"a", "b"}).value == OptionValue(std::int64_t{3}));
}

TEST_CASE("a bad override is refused by its name") {
  CHECK(set_error("a.b").starts_with("--set: not an assignment: found \"a.b\", expected section.key=value"));
  CHECK(set_error("a..b=1").starts_with("--set a..b: not a key"));
  CHECK(set_error("=1").find("not a key") != std::string::npos);
  CHECK(set_error("a.b.c=1").starts_with("--set a.b.c: inside a key that is no table: found 1, expected a table"));
  CHECK(set_error("a.b=[1,").starts_with("--set a.b: not valid TOML"));
  CHECK(set_error("a.b=1\nc=2").starts_with("--set a.b: bad value: found a line break"));
  for (const char* bytes : {"a.b=run\xff", "a.b=\xc3", "a.b=\x1b[2J"})
    CHECK(set_error(bytes).starts_with("--set a.b: control characters, or bytes that are no UTF-8: found "));
  CHECK(set_error("a.b=\u00e4") == "accepted");
  CHECK(set_error(repeated("a.", 40) + "a=1").find("nested too deeply") != std::string::npos);
  CHECK(set_error(std::string("x=") + repeated("[", 100000)).starts_with("--set x: "));
}

TEST_CASE("size and nesting are capped, however they are written") {
  CHECK(parse_error(std::string(ConfigDocument::kLargestFile + 1, '#')).find("too large") != std::string::npos);
  CHECK(parse_error(std::string("#") + std::string(ConfigDocument::kLargestFile - 1, 'x')) == "accepted");
  CHECK(parse_error(repeated("a.", 500000) + "a = 1").find("may nest too deeply") != std::string::npos);
  for (const char* part : {"1.", "1 . ", "'a'.", R"("\"".)", "1.e-1.", "a = \"\"\"\n\"\"\"\"\"\n1.2."}) {
    CAPTURE(part);
    CHECK(parse_error(repeated(part, 5000) + "a = 1").find("may nest too deeply") != std::string::npos);
  }
  for (const char* item :
       {"0.5, ", R"("a.b", )", "'...', ", "1.5e-3, ", "\"\"\"a.\n\\\"\"\".b\"\"\"\", ", "-1.0 , # a.b\n"}) {
    CAPTURE(item);
    CHECK_NOTHROW(ConfigDocument::parse("a = [" + repeated(item, 5000) + "]", "flat"));
  }
  CHECK(parse_error(repeated("a.", 4000) + "a = 1").find("nested too deeply") != std::string::npos);
  CHECK(parse_error(std::string("[") + repeated("a.", 4000) + "a]").find("nested too deeply") != std::string::npos);
  CHECK(parse_error(std::string("a = ") + repeated("[", 500000)) != "accepted");
  CHECK(parse_error(std::string("a = ") + repeated("{a=", 300000)) != "accepted");
  CHECK(parse_error(repeated("a.", 15) + "a = 1") == "accepted");
  CHECK(parse_error(repeated("a.", 17) + "a = 1").starts_with("run.toml:1:"));
}

TEST_CASE("truncations and mutations of a config never do worse than an Error") {
  const std::string text =
      "[a]\nb = 1 # c\n\"q.r\" = 'x'\n[a.t]\nk = [1.5, 2]\ns = { z = \"\"\"m\n\"\"\" }\n[[w]]\nd = 1979-05-27\n";
  auto survive = [](const std::string& mutated) {
    try {
      ConfigDocument::parse(mutated, "run.toml");
    } catch (const Error&) {
    }
  };
  for (std::size_t size = 0; size < text.size(); ++size) survive(text.substr(0, size));
  for (std::size_t i = 0; i < text.size(); ++i)
    for (char c : std::string("\"'[]{}=.#\n\\\0\xff"
                              "0",
                              14)) {
      std::string mutated = text;
      mutated[i] = c;
      survive(mutated);
    }
}

TEST_CASE("files are read with the same caps") {
  namespace fs = std::filesystem;
  const TestDirectory directory;
  const std::string path = write_text(directory / "document.toml", "[a]\nb = 1\n");
  CHECK(at(ConfigDocument::read(path), {"a", "b"}).position.text() == path + ":2:1");
  fs::resize_file(path, ConfigDocument::kLargestFile + 5);
  CHECK_THROWS_AS(ConfigDocument::read(path), const Error&);
  fs::remove(path);
  check_refused(ErrorCode::input, {}, [&] { ConfigDocument::read(path); });
  CHECK_THROWS_AS(ConfigDocument::read(QUERN_BUILD_DIR), const Error&);  // a folder
}
