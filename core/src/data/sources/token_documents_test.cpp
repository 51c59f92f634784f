// Packed documents out of token files: offsets, positions and targets against a plain reading of the file, and the loss
// mask's alignment with the shifted target in every format.
#include <fstream>
#include <map>

#include <doctest/doctest.h>

#include "base/files/test_directory.h"
#include "data/sources/token_source.h"
#include "quern/random.h"
#include "quern/testkit/refusal.h"

using namespace quern;
using testkit::check_refused;

namespace {

constexpr std::int32_t kSeparator = 3;

std::uint32_t draw(std::uint32_t object, std::uint64_t index) {
  return random_word({17, RandomPurpose::sample, object}, 0, index);
}

// Documents of lengths 1 to 30, separators included; runs of empty ones too.
TokenFileContent content_of(std::size_t count, bool masked) {
  TokenFileContent content{.tokens = {}, .mask = {}, .vocabulary = 50, .separator = kSeparator};
  for (std::uint32_t document = 0; content.tokens.size() < count; ++document) {
    std::uint32_t length = draw(1, document) % 3 == 0 ? 1 : 1 + draw(2, document) % 30;
    for (std::uint32_t i = 1; i < length; ++i)
      content.tokens.push_back(kSeparator + 1 + static_cast<std::int32_t>(draw(3, content.tokens.size()) % 46));
    content.tokens.push_back(kSeparator);
  }
  content.tokens.resize(count);
  if (masked)
    for (std::size_t i = 0; i < count; ++i) content.mask.push_back(draw(4, i) % 3 != 0);
  return content;
}

TokenFileOptions options_for(const std::string& path, bool documents, bool shuffle = false) {
  TokenFileOptions options{.entries = {{path}}, .shuffle = shuffle, .documents = documents, .where = "data"};
  return options;
}

template <class T>
void append(std::string& text, T value) {
  text.append(reinterpret_cast<const char*>(&value), sizeof value);
}

// One batch in the file's order, from window `first` on, against the definition.
void check_batch(const Batch& batch, const TokenFileContent& content, Geometry geometry, std::size_t first,
                 bool documents) {
  auto sequence = static_cast<std::size_t>(geometry.sequence);
  std::vector<std::int32_t> starts;
  std::int32_t position = 0;
  for (std::size_t i = 0; i < batch.tokens.size(); ++i) {
    std::size_t t = first * sequence + i;  // windows in order are one run of the file
    bool after_separator = t > 0 && content.tokens[t - 1] == kSeparator;
    if (i % sequence == 0 || (documents && after_separator)) {
      position = 0;
      starts.push_back(static_cast<std::int32_t>(i));
    }
    CAPTURE(t);
    CHECK(batch.tokens[i] == content.tokens[t]);
    CHECK(batch.positions[i] == position++);
    bool counts = content.mask.empty() || content.mask[t + 1];
    if (documents && content.tokens[t] == kSeparator) counts = false;  // the next token is another document's
    CHECK(batch.targets[i] == (counts ? content.tokens[t + 1] : -1));
  }
  starts.push_back(static_cast<std::int32_t>(batch.tokens.size()));
  CHECK(batch.documents == (documents ? starts : std::vector<std::int32_t>{}));
}

}  // namespace

TEST_CASE("batches are the file's, with documents joined and masked, at odd sizes") {
  TestDirectory directory;
  std::string path = directory / "tokens";
  for (bool masked : {false, true}) {
    TokenFileContent content = content_of(1000, masked);
    write_token_file(path, content);
    for (Geometry geometry : {Geometry{1, 1}, Geometry{3, 7}, Geometry{2, 16}, Geometry{1, 333}, Geometry{1, 999}})
      for (bool documents : {false, true}) {
        CAPTURE(geometry.sequence);
        CAPTURE(documents);
        TokenFileSource source(options_for(path, documents), geometry, 1);
        std::size_t whole = static_cast<std::size_t>(source.windows() / geometry.batch);
        Batch batch;
        for (std::size_t i = 0; i < whole; ++i) {
          source.next(batch);
          check_batch(batch, content, geometry, i * static_cast<std::size_t>(geometry.batch), documents);
        }
      }
  }
}

TEST_CASE("a pass counts each target that the mask and the documents leave once") {
  TestDirectory directory;
  std::string path = directory / "tokens";
  TokenFileContent content = content_of(16 * 40 + 1, true);
  write_token_file(path, content);
  for (bool documents : {false, true}) {
    std::map<std::int32_t, std::int64_t> want, got;
    for (std::size_t t = 1; t < content.tokens.size(); ++t)
      if (content.mask[t] && !(documents && content.tokens[t - 1] == kSeparator)) ++want[content.tokens[t]];
    TokenFileSource source(options_for(path, documents, true), {5, 16}, 1);
    Batch batch;
    for (int i = 0; i < 8; ++i) {
      source.next(batch);
      for (std::int32_t target : batch.targets)
        if (target >= 0) ++got[target];
    }
    CHECK(got == want);
  }
}

TEST_CASE("resuming anywhere continues packed batches, and joined and masked are not mixed") {
  TestDirectory directory;
  std::string path = directory / "tokens";
  write_token_file(path, content_of(500, true));
  TokenFileSource straight(options_for(path, true, true), {3, 16}, 5);
  for (int point = 0; point < 12; ++point) {
    TokenFileSource resumed(options_for(path, true, true), {3, 16}, 5);
    resumed.load_state(straight.save_state());
    Batch want, got;
    straight.next(want);
    resumed.next(got);
    CHECK(got.tokens == want.tokens);
    CHECK(got.targets == want.targets);
    CHECK(got.positions == want.positions);
    CHECK(got.documents == want.documents);
  }
  TokenFileSource joined(options_for(path, false, true), {3, 16}, 5);
  check_refused(ErrorCode::input, {"data.documents"}, [&] { joined.load_state(straight.save_state()); });
  check_refused(ErrorCode::input, {"data.documents"}, [&] { straight.load_state(joined.save_state()); });
}

TEST_CASE("documents need a separator, from the file or the config") {
  TestDirectory directory;
  std::string path = directory / "tokens";
  TokenFileContent content = content_of(100, false);
  content.separator = -1;
  write_token_file(path, content);
  TokenFileOptions options = options_for(path, true);
  check_refused(ErrorCode::input, {"set data.tokens.separator"}, [&] { TokenFileSource(options, {1, 16}, 1); });
  options.reading.separator = 50;
  check_refused(ErrorCode::input, {"not in its vocabulary: found 50"}, [&] { TokenFileSource(options, {1, 16}, 1); });
  options.reading.separator = kSeparator;
  Batch batch;
  TokenFileSource(options, {6, 16}, 1).next(batch);
  check_batch(batch, content, {6, 16}, 0, true);

  // Documents of one token have nothing to predict.
  content.tokens.assign(100, kSeparator);
  write_token_file(path, content);
  check_refused(ErrorCode::input, {"no token of any whole sequence counts"}, [&] {
    TokenFileSource(options, {1, 16}, 1);
  });
  options.documents = false;
  TokenFileSource(options, {1, 16}, 1);
}

TEST_CASE("LLMQ's mask says of a token whether it is learned, not of the one before") {
  TestDirectory directory;
  std::string path = directory / "tokens";
  TokenFileContent content = content_of(501, true);
  std::string text = "BIN.TOK\n";
  for (std::int32_t field : {2, 4, 501, 50, 1}) append(text, field);
  text.resize(1024, '*');
  for (std::int32_t token : content.tokens) append(text, token);
  std::string mask((501 + 7) / 8, '\0');
  for (std::size_t i = 0; i < 501; ++i)
    if (content.mask[i]) mask[i / 8] = static_cast<char>(mask[i / 8] | (1 << i % 8));
  std::ofstream(path, std::ios::binary) << text + mask;
  for (bool documents : {false, true}) {
    TokenFileOptions options = options_for(path, documents);
    options.reading.separator = kSeparator;
    TokenFileSource source(options, {2, 10}, 1);
    Batch batch;
    for (std::size_t i = 0; i < 25; ++i) {
      source.next(batch);
      check_batch(batch, content, {2, 10}, i * 2, documents);
    }
  }
}
