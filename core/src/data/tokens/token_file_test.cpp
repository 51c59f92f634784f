// Round trip of token files, and one damaged file for every fault a reader must refuse.
#include "data/tokens/token_file.h"

#include <algorithm>
#include <cstring>

#include <doctest/doctest.h>

#include "base/checksum.h"
#include "base/files/test_directory.h"
#include "quern/error.h"
#include "quern/random.h"
#include "quern/testkit/refusal.h"

using namespace quern;

namespace {

TokenFileContent random_content(std::size_t count, std::int64_t vocabulary, bool masked) {
  TokenFileContent content;
  content.vocabulary = vocabulary;
  for (std::size_t i = 0; i < count; ++i) {
    std::uint32_t word = random_word({11}, 0, i);
    content.tokens.push_back(static_cast<std::int32_t>(word % static_cast<std::uint64_t>(vocabulary)));
    if (masked) content.mask.push_back((word >> 30) == 0);
  }
  return content;
}

template <class T>
void put(std::string& text, std::size_t at, T value) {
  std::memcpy(text.data() + at, &value, sizeof(T));
}

/// Expects an input error that names the file and holds `words`.
template <class Action>
void check_refused(const std::string& path, const std::string& words, Action action) {
  const Error error = testkit::error_of(action);
  CHECK(error.code() == ErrorCode::input);
  CHECK(error.detail().where == path);
  testkit::check_holds(error.what(), {words});
}

}  // namespace

TEST_CASE("written tokens are read, at every size and both widths") {
  TestDirectory directory;
  for (std::int64_t vocabulary : {7, 65536, 65537, 151936})
    for (std::size_t count : {1, 2, 3, 4, 5, 63, 64, 65, 127, 1000})
      for (bool masked : {false, true}) {
        CAPTURE(vocabulary);
        CAPTURE(count);
        TokenFileContent content = random_content(count, vocabulary, masked);
        content.separator = 3;
        write_token_file(directory / "tokens", content);
        TokenFile file(directory / "tokens");
        file.verify();
        CHECK(file.count() == static_cast<std::int64_t>(count));
        CHECK(file.vocabulary() == vocabulary);
        CHECK(file.separator() == 3);
        CHECK(file.has_mask() == masked);
        std::vector<std::int32_t> tokens(count, -5);
        file.read(0, tokens);
        CHECK(tokens == content.tokens);
        std::optional<std::int64_t> first;
        std::vector<std::uint8_t> counts(count, 7);
        file.read_targets(0, counts);
        for (std::size_t from : {count / 3, count / 2}) {  // at any bit of a byte
          std::vector<std::uint8_t> some(count - from - count / 5, 7);
          file.read_targets(static_cast<std::int64_t>(from), some);
          CHECK(std::equal(some.begin(), some.end(), counts.begin() + static_cast<std::ptrdiff_t>(from)));
        }
        for (std::size_t i = 0; i < count; ++i) {
          bool target = i > 0 && (!masked || content.mask[i]);
          CHECK(counts[i] == target);
          if (target && !first) first = i;
        }
        CHECK(file.first_target() == first);
      }
}

TEST_CASE("the first target is found behind long masked stretches") {
  TestDirectory directory;
  for (std::size_t at : {1, 63, 64, 65, 128, 191, 700, 999}) {
    TokenFileContent content{std::vector<std::int32_t>(1000, 1), std::vector<bool>(1000), 2};
    content.mask[0] = true;  // the first token is never predicted
    content.mask[at] = true;
    write_token_file(directory / "tokens", content);
    CHECK(TokenFile(directory / "tokens").first_target() == static_cast<std::int64_t>(at));
  }
}

TEST_CASE("every header fault is refused with what was found") {
  TestDirectory directory;
  write_token_file(directory / "good", random_content(101, 50, true));
  const std::string good = read_text(directory / "good");
  std::string path = directory / "bad";
  auto refused = [&](const std::string& words, std::string text) {
    write_text(path, text);
    check_refused(path, words, [&] { TokenFile file(path); });
  };
  auto with = [&](std::size_t at, auto value) {
    std::string text = good;
    put(text, at, value);
    return text;
  };
  refused("0 bytes", "");
  refused("63 bytes", good.substr(0, 63));
  refused("truncated", good.substr(0, 64));
  refused("truncated", good.substr(0, good.size() - 1));
  refused("too long", good + '\0');
  refused("not a token file", with(0, 'q'));
  refused("version: found 2, expected 1", with(8, std::uint32_t{2}));
  refused("unknown flags", with(12, std::uint32_t{3}));
  refused("too long", with(12, std::uint32_t{0}));
  refused("token_count: found 0", with(16, std::uint64_t{0}));
  refused("truncated", with(16, std::uint64_t{1000}));
  for (std::uint64_t huge : {~std::uint64_t{0}, std::uint64_t{1} << 63, (std::uint64_t{1} << 63) + 101,
                             std::uint64_t{1} << 57, (std::uint64_t{1} << 56) + 1})
    refused("token_count", with(16, huge));
  refused("truncated", with(16, std::uint64_t{1} << 56));
  refused("vocab_size", with(24, std::uint32_t{0}));
  refused("vocab_size", with(24, ~std::uint32_t{0}));
  refused("token_bytes: found 3", with(28, std::uint32_t{3}));
  refused("truncated", with(28, std::uint32_t{4}));
  refused("separator_token", with(40, std::int32_t{50}));
  refused("separator_token", with(40, std::int32_t{-2}));
  refused("reserved", with(63, '\1'));
}

TEST_CASE("payload faults are found by verify, and bad tokens when they are read") {
  TestDirectory directory;
  std::string path = directory / "tokens";
  write_token_file(path, random_content(101, 50, false));
  std::string text = read_text(path);
  put(text, 64 + 2 * 77, std::uint16_t{50});
  write_text(path, text);
  check_refused(path, "checksum", [&] { TokenFile(path).verify(); });
  // With a checksum that agrees, the token itself is found.
  put(text, 32, checksum_of(std::as_bytes(std::span(text)).subspan(64)));
  write_text(path, text);
  TokenFile file(path);
  file.verify();
  std::vector<std::int32_t> row(10);
  file.read(67, row);
  check_refused(path, "token 77 is not in the vocabulary: found 50, expected below 50", [&] { file.read(68, row); });
  CHECK_THROWS_AS(file.read(92, row), Error);
}
