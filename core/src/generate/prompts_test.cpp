// Prompts as words and files, and what is wrong with bad ones.
#include "generate/prompts.h"

#include <fstream>

#include <doctest/doctest.h>

#include "base/files/test_directory.h"
#include "quern/testkit/refusal.h"

using namespace quern;
using testkit::check_refused;

TEST_CASE("tokens as text, there and back") {
  CHECK(parse_tokens("1,2,3", "x") == std::vector<std::int32_t>{1, 2, 3});
  CHECK(parse_tokens(" 7 , 0", "x") == std::vector<std::int32_t>{7, 0});
  CHECK(tokens_text({1, 2, 300}) == "1,2,300");
  CHECK(tokens_text({}) == "");
  for (const char* bad : {"", ",", "1,", "1,,2", "a", "1 2", "1.5", "0x1", "4294967296"}) {
    CAPTURE(bad);
    check_refused(ErrorCode::input, {"here: not a list of tokens"}, [&] { parse_tokens(bad, "here"); });
  }
}

TEST_CASE("prompt files: lists or objects, a line each") {
  TestDirectory directory;
  const std::string path = directory / "prompts.jsonl";
  auto write = [&](const std::string& text) { std::ofstream(path, std::ios::binary) << text; };
  write("[1, 2]\n\n{\"text\": \"b\", \"tokens\": [3]}\r\n[]");
  std::vector<Prompt> prompts = prompts_of(path, "x");
  REQUIRE(prompts.size() == 3);
  CHECK(prompts[0].tokens == std::vector<std::int32_t>{1, 2});
  CHECK(prompts[1].tokens == std::vector<std::int32_t>{3});
  CHECK(prompts[1].where == path + ":3");
  CHECK(prompts[2].tokens.empty());
  CHECK(prompts_of("4, 5", "x")[0].tokens == std::vector<std::int32_t>{4, 5});

  for (const char* bad : {"{\"token\": [1]}", "\"1\"", "[1.5]", "[\"1\"]", "[true]", "[[1]]", "[4294967296]", "{", "[1",
                          "{\"tokens\": 1}", "[1] [2]"}) {
    CAPTURE(bad);
    write(std::string("[1]\n") + bad + "\n");
    check_refused(ErrorCode::input, {path + ":2: "}, [&] { read_prompts(path); });
  }
  write("\n \n");
  check_refused(ErrorCode::input, {"no prompt"}, [&] { read_prompts(path); });
  check_refused(ErrorCode::input, {"none.jsonl: cannot be read: found No such file or directory"},
                [&] { prompts_of(directory / "none.jsonl", "x"); });
  check_refused(ErrorCode::input, {"cannot be read: found Is a directory"}, [&] { prompts_of(directory.path(), "x"); });
  check_refused(ErrorCode::input, {"/dev/zero: too large for a file of prompts"},
                [&] { prompts_of("/dev/zero", "x"); });
}

TEST_CASE("prompts that a model cannot take are refused by name") {
  auto check = [](std::vector<std::int32_t> tokens, std::int64_t max_tokens) {
    check_prompts({{"p", std::move(tokens)}}, 10, max_tokens, 8, "the model's positions");
  };
  CHECK_NOTHROW(check({0, 9, 5, 5}, 4));
  check_refused(ErrorCode::input, {"p: empty prompt"}, [&] { check({}, 4); });
  check_refused(ErrorCode::input, {"p: token outside of the vocabulary: found 10, expected from 0 to 9"}, [&] {
    check({1, 10}, 4);
  });
  check_refused(ErrorCode::input, {"found -1"}, [&] { check({-1}, 4); });
  check_refused(ErrorCode::input, {"longer than the model's positions: found 4 + 5 tokens, expected at most 8"}, [&] {
    check({1, 2, 3, 4}, 5);
  });
}
