// A batch as people see it, and tokens as text, from tokenizers of both spellings and from bad ones.
#include "data/batch_text.h"

#include <doctest/doctest.h>

#include "base/files/test_directory.h"
#include "quern/error.h"
#include "quern/testkit/refusal.h"

using namespace quern;

namespace {

constexpr const char* kByteLevel =
    R"({"model": {"type": "BPE", "vocab": {"a": 0, "Ġb": 1, "Ċ": 2, "Ã": 3, "©": 4, "ĠÃ©": 5}},
  "decoder": {"type": "ByteLevel"}, "added_tokens": [{"id": 6, "content": "<|é|>"}]})";

}  // namespace

TEST_CASE("byte-level tokens are their bytes, added ones themselves, unknown ones numbers") {
  TestDirectory directory;
  write_text(directory / "tokenizer.json", kByteLevel);
  for (const std::string& path : {directory.path(), directory / "tokenizer.json"}) {
    TokenText text(path);
    auto of = [&](std::vector<std::int32_t> tokens) { return text.of(tokens); };
    CHECK(of({0, 1, 2}) == "a b\n");
    CHECK(of({3, 4}) == "é");  // a letter of two tokens
    CHECK(of({5, 6}) == " é<|é|>");
    CHECK(of({3}) == "\xc3");
    CHECK(of({7, -1, 0}) == "<7><-1>a");
    CHECK(of({}) == "");
  }
}

TEST_CASE("SentencePiece spellings are spaces and bytes") {
  TestDirectory directory;
  std::string path = write_text(directory / "t", R"({"model": {"vocab": {"▁a▁b": 0, "<0x0A>": 1, "<0xZZ>": 2}},
    "decoder": {"type": "Sequence", "decoders": [{"type": "ByteFallback"}]}})");
  CHECK(TokenText(path).of(std::vector<std::int32_t>{0, 1, 2}) == " a b\n<0xZZ>");
  path = write_text(directory / "t", R"({"model": {"type": "Unigram", "vocab": [["▁x", -1.5], ["y", -2]]}})");
  CHECK(TokenText(path).of(std::vector<std::int32_t>{1, 0}) == "y x");
  path = write_text(directory / "t", R"({"model": {"vocab": {"Ġa": 0}},
    "decoder": {"type": "Sequence", "decoders": [{"type": "ByteLevel"}]}})");
  CHECK(TokenText(path).of(std::vector<std::int32_t>{0}) == " a");
}

TEST_CASE("a file that is no tokenizer is an input error that names it") {
  TestDirectory directory;
  for (const char* bad :
       {"", "[]", "{", "{}", R"({"model": 3})", R"({"model": {}})", R"({"model": {"vocab": {"a": -1}}})",
        R"({"model": {"vocab": {"a": 1e9}}})", R"({"model": {"vocab": {"a": 99999999999}}})",
        R"({"model": {"vocab": {"a": "b"}}})", R"({"model": {"vocab": [[]]}})", R"({"model": {"vocab": ["a"]}})",
        R"({"model": {"vocab": {}}, "added_tokens": [{"id": 1}]})",
        R"({"model": {"vocab": {}}, "added_tokens": [1]})"}) {
    std::string path = write_text(directory / "t", bad);
    CAPTURE(bad);
    const Error error = testkit::error_of([&] { TokenText text(path); });
    CHECK(error.code() == ErrorCode::input);
    CHECK(error.detail().where == path);
  }
  CHECK_THROWS_AS(TokenText(directory / "absent"), Error);
  CHECK_THROWS_AS(TokenText(directory.path()), Error);
}

TEST_CASE("quoted text cannot steer a terminal and shows every byte") {
  CHECK(quoted_text("a \"é\" \\ 🌾\n\t") == "\"a \\\"é\\\" \\\\ 🌾\\n\\t\"");
  CHECK(quoted_text("\x1b[2J\x7f\r") == "\"\\x1b[2J\\x7f\\x0d\"");
  CHECK(quoted_text(std::string(1, '\0')) == "\"\\x00\"");
  CHECK(quoted_text("\xc3") == "\"\\xc3\"");                    // cut short
  CHECK(quoted_text("\xc3(") == "\"\\xc3(\"");                  // no continuation
  CHECK(quoted_text("\xc0\x80") == "\"\\xc0\\x80\"");           // longer than it need be
  CHECK(quoted_text("\xed\xa0\x80") == "\"\\xed\\xa0\\x80\"");  // half of a surrogate pair
  CHECK(quoted_text("\xf4\x90\x80\x80") == "\"\\xf4\\x90\\x80\\x80\"");
  CHECK(quoted_text("\xc2\x9b") == "\"\\u009b\"");  // a control character
}

TEST_CASE("a batch shows documents, the learned part of each, and the target behind a row") {
  Batch batch{{10, 11, 12, 13, 20, 21, 22, 23}, {11, -1, 13, 14, -1, 22, -1, 24}, {}, {}};
  batch.documents = {0, 1, 4, 8};
  batch.targets[0] = -1;
  CHECK(batch_text(batch, {2, 4}, nullptr) ==
        "2 x 4 tokens, 3 documents, 4 of 8 targets count\n"
        "row 0\n"
        "  tokens 0 to 0\n"
        "    given    10\n"
        "  tokens 1 to 3\n"
        "    given    11 12\n"
        "    learned  13\n"
        "    learned  14, after the row\n"
        "row 1\n"
        "  tokens 0 to 3\n"
        "    given    20 21\n"
        "    learned  22\n"
        "    given    23\n"
        "    learned  24, after the row\n");
  TestDirectory directory;
  TokenText text(write_text(directory / "t", kByteLevel));
  Batch joined{{0, 1, 2}, {1, 2, -1}, {}, {}};
  CHECK(batch_text(joined, {1, 3}, &text) ==
        "1 x 3 tokens, documents joined, 2 of 3 targets count\n"
        "row 0\n"
        "  tokens 0 to 2\n"
        "    given    \"a\"\n"
        "    learned  \" b\\n\"\n");

  Batch filled{{5, 6, 2, 2, 2, 2, 2, 7}, {6, -1, -1, -1, -1, -1, -1, 8}, {}, {0, 2, 3, 4, 5, 6, 7, 8}};
  CHECK(batch_text(filled, {2, 4}, nullptr) ==
        "2 x 4 tokens, 7 documents, 2 of 8 targets count\n"
        "row 0\n"
        "  tokens 0 to 1\n"
        "    given    5\n"
        "    learned  6\n"
        "  tokens 2 to 3, each a document\n"
        "    given    2 2\n"
        "row 1\n"
        "  tokens 0 to 2, each a document\n"
        "    given    2 2 2\n"
        "  tokens 3 to 3\n"
        "    given    7\n"
        "    learned  8, after the row\n");
}
