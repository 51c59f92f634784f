// Lists of token files: patterns, weights and positions over several files; and the files of other programs.
#include <sys/stat.h>

#include <algorithm>
#include <fstream>
#include <set>

#include <doctest/doctest.h>
#include <fcntl.h>
#include <unistd.h>

#include "base/files/test_directory.h"
#include "data/file_list.h"
#include "data/sources/token_source.h"
#include "data/token_dataset.h"
#include "data/tokens/token_header.h"
#include "quern/error.h"
#include "quern/options.h"
#include "quern/random.h"
#include "quern/testkit/refusal.h"

using namespace quern;
using testkit::check_refused;

namespace {

constexpr std::int64_t kVocabulary = 100000;
constexpr Geometry kGeometry{3, 10};

// Tokens first, first + 1, ...: a window names itself and its file.
std::string make_file(const std::string& path, std::int32_t first, std::int64_t windows,
                      std::int64_t vocabulary = kVocabulary) {
  TokenFileContent content{.tokens = {}, .mask = {}, .vocabulary = vocabulary};
  for (std::int64_t i = 0; i <= windows * 10 + 3; ++i)  // and a few that fill no window
    content.tokens.push_back(first + static_cast<std::int32_t>(i));
  write_token_file(path, content);
  return path;
}

std::unique_ptr<DataSource> open_training(TokenDatasetOptions options, std::int64_t vocabulary = kVocabulary) {
  DataRequest request;
  request.geometry = kGeometry;
  request.seed = 7;
  request.vocabulary = vocabulary;
  return TokenDataset(std::move(options)).open(request);
}

std::vector<std::int32_t> firsts(DataSource& source, int batches) {
  std::vector<std::int32_t> tokens;
  Batch batch;
  for (int i = 0; i < batches; ++i) {
    source.next(batch);
    for (std::size_t row = 0; row < batch.tokens.size(); row += 10) {
      tokens.push_back(batch.tokens[row]);
      for (std::size_t j = 0; j < 10; ++j) CHECK(batch.targets[row + j] == batch.tokens[row] + 1 + static_cast<int>(j));
    }
  }
  return tokens;
}

template <class T>
void append(std::string& text, T value) {
  text.append(reinterpret_cast<const char*>(&value), sizeof value);
}

std::string llmq_header(std::int32_t version, std::int32_t bytes, std::int32_t count, std::int32_t vocabulary = 0,
                        std::int32_t masked = 0) {
  std::string text = "BIN.TOK\n";
  for (std::int32_t field : {version, bytes, count}) append(text, field);
  if (version >= 2)
    for (std::int32_t field : {vocabulary, masked}) append(text, field);
  text.resize(1023, '*');
  return text + '\n';
}

std::string tokens_32(std::int32_t first, std::int32_t count) {
  std::string text;
  for (std::int32_t i = 0; i < count; ++i) append(text, first + i);
  return text;
}

/// A file of that size with a piece of text at an offset; the rest is a hole.
std::string write_sparse(const std::string& path, std::int64_t size,
                         const std::vector<std::pair<std::int64_t, std::string>>& pieces) {
  int file = ::open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0644);
  REQUIRE(file >= 0);
  REQUIRE(::ftruncate(file, size) == 0);
  for (const auto& [at, text] : pieces)
    REQUIRE(::pwrite(file, text.data(), text.size(), at) == static_cast<ssize_t>(text.size()));
  ::close(file);
  return path;
}

}  // namespace

TEST_CASE("patterns give their files in the order of their bytes, paths themselves") {
  TestDirectory directory;
  for (const char* name : {"b.tok", "a.tok", "B.tok", "a10.tok", "a9.tok", "other"}) write_text(directory / name, "x");
  write_text(directory / "a[1].tok", "x");
  auto names = [&](const std::string& pattern) {
    std::vector<std::string> found;
    for (const std::string& path : files_of(directory / pattern, "key"))
      found.push_back(path.substr(directory.path().size() + 1));
    return found;
  };
  CHECK(names("[ab]*.tok") == std::vector<std::string>{"a.tok", "a10.tok", "a9.tok", "a[1].tok", "b.tok"});
  CHECK(names("?.tok") == std::vector<std::string>{"B.tok", "a.tok", "b.tok"});
  CHECK(names("a[1].tok") == std::vector<std::string>{"a[1].tok"});  // a file of that name comes first
  CHECK(names("absent.tok") == std::vector<std::string>{"absent.tok"});
  check_refused(ErrorCode::input, {"key: no file matches", "*.nothing"}, [&] { names("*.nothing"); });
}

TEST_CASE("one path, a list and a pattern of the same files are the same data") {
  TestDirectory directory;
  std::string a = make_file(directory / "a.tok", 0, 20), b = make_file(directory / "b.tok", 1000, 11);
  auto listed = open_training({.train = {a, b}}), matched = open_training({.train = {directory / "*.tok"}});
  CHECK(listed->epoch_tokens() == 310);
  CHECK(listed->vocabulary() == kVocabulary);
  std::vector<std::int32_t> order = firsts(*listed, 31);
  CHECK(order == firsts(*matched, 31));
  CHECK(listed->save_state() == matched->save_state());
  // Three passes, each window once in each.
  for (int pass = 0; pass < 3; ++pass) {
    std::set<std::int32_t> seen(order.begin() + pass * 31, order.begin() + (pass + 1) * 31);
    CHECK(seen.size() == 31);
  }
  // A text is a list of one, an empty one an empty list.
  OptionSpec spec = token_dataset_options().specs()[0];
  OptionValue text = a, empty = std::string();
  CHECK_FALSE(check_option(spec, text));
  CHECK_FALSE(check_option(spec, empty));
  CHECK(std::get<std::vector<std::string>>(text) == std::vector<std::string>{a});
  CHECK(std::get<std::vector<std::string>>(empty).empty());
}

TEST_CASE("weights hold in every pass, and a place in any list is continued exactly") {
  TestDirectory directory;
  make_file(directory / "a-1.tok", 0, 6);
  make_file(directory / "a-2.tok", 1000, 14);
  std::string b = make_file(directory / "b.tok", 2000, 10);
  for (const std::vector<double>& weights : std::vector<std::vector<double>>{{}, {1, 4}, {9, 1}}) {
    TokenDatasetOptions options{.train = {directory / "a-*.tok", b}, .validation = {}, .weights = weights};
    auto straight = open_training(options);
    std::vector<std::int32_t> order = firsts(*straight, 40);
    for (int pass = 0; pass < 4 && !weights.empty(); ++pass) {
      auto of_b = std::count_if(order.begin() + pass * 30, order.begin() + (pass + 1) * 30,
                                [](std::int32_t token) { return token >= 2000; });
      CHECK(of_b == (weights[0] == 1 ? 24 : 3));
    }
    for (int stop : {0, 1, 7, 9, 10, 11, 39}) {
      auto first = open_training(options), second = open_training(options);
      std::vector<std::int32_t> parts = firsts(*first, stop);
      second->load_state(first->save_state());
      std::vector<std::int32_t> rest = firsts(*second, 40 - stop);
      parts.insert(parts.end(), rest.begin(), rest.end());
      CHECK(parts == order);
    }
  }
}

TEST_CASE("validation is the files in their order, without weights") {
  TestDirectory directory;
  std::string a = make_file(directory / "a.tok", 0, 2), b = make_file(directory / "b.tok", 1000, 1);
  DataRequest request;
  request.split = Split::validation;
  request.geometry = {3, 10};
  TokenDataset dataset({.train = {a}, .validation = {b, a}, .weights = {2}});
  auto source = dataset.open(request);
  CHECK(firsts(*source, 1) == std::vector<std::int32_t>{1000, 0, 10});
}

TEST_CASE("a list that changed since the checkpoint is refused, and the file that did is named") {
  TestDirectory directory;
  std::string a = make_file(directory / "a.tok", 0, 6), b = make_file(directory / "b.tok", 1000, 9);
  TokenDatasetOptions options{.train = {a, b}, .validation = {}, .weights = {1, 2}};
  std::string state = open_training(options)->save_state();
  auto refused = [&](const TokenDatasetOptions& now, const std::vector<std::string>& parts) {
    check_refused(ErrorCode::input, parts, [&] { open_training(now)->load_state(state); });
  };
  refused({.train = {b, a}, .validation = {}, .weights = {1, 2}}, {b, "changed since the checkpoint: checksum"});
  refused({.train = {a}}, {"data.tokens.train", "changed since the checkpoint: files: found 1, expected 2"});
  refused({.train = {a, b}}, {"data.tokens.weights changed", "found no weights, expected weights that give"});
  refused({.train = {a, b}, .validation = {}, .weights = {2, 1}}, {"data.tokens.weights changed"});
  std::filesystem::rename(a, directory / "moved.tok");  // the same data at another path
  options.train[0] = directory / "moved.tok";
  open_training(options)->load_state(state);
  make_file(b, 1001, 9);
  refused(options, {b, "changed since the checkpoint: checksum"});
}

TEST_CASE("what is wrong with a list is said of the file or the key") {
  TestDirectory directory;
  std::string a = make_file(directory / "a.tok", 0, 6), other = make_file(directory / "b.tok", 0, 6, 70000),
              small = make_file(directory / "c.tok", 0, 0);
  check_refused(ErrorCode::input, {other, "another vocabulary than in " + a, "found 70000, expected 100000"}, [&] {
    open_training({.train = {a, other}});
  });
  check_refused(ErrorCode::input, {small, "shorter than one sequence"}, [&] { open_training({.train = {a, small}}); });
  check_refused(ErrorCode::config, {"data.tokens.weights", "found 1, expected 2"}, [&] {
    open_training({.train = {a, a}, .validation = {}, .weights = {1}});
  });
  check_refused(ErrorCode::config, {"data.tokens.weights", "weight 2 is too small"}, [&] {
    open_training({.train = {a, a}, .validation = {}, .weights = {1, 1e-9}});
  });
  check_refused(ErrorCode::config, {"data.tokens.train: no token file is named"}, [&] { open_training({}); });
}

// ---- files of other programs ----

TEST_CASE("BIN.TOK and bare files give the tokens of quern's") {
  TestDirectory directory;
  std::string ours = make_file(directory / "ours", 0, 6);
  std::vector<std::int32_t> want = firsts(*open_training({.train = {ours}}), 4);
  std::string v1 = write_text(directory / "v1", llmq_header(1, 4, 64) + tokens_32(0, 64));
  std::string v2 = write_text(directory / "v2", llmq_header(2, 4, 64, kVocabulary) + tokens_32(0, 64));
  std::string narrow, bare;
  for (std::int32_t i = 0; i < 64; ++i) append(bare, static_cast<std::uint16_t>(i));
  write_text(directory / "bare", bare);
  narrow = write_text(directory / "narrow", llmq_header(2, 2, 64, 64) + bare);
  for (const std::string& path : {v1, v2, narrow}) CHECK(firsts(*open_training({.train = {path}}), 4) == want);
  TokenDatasetOptions headerless{.train = {directory / "bare"}, .validation = {}, .weights = {}, .format = "uint16"};
  CHECK(firsts(*open_training(headerless), 4) == want);
  // The vocabulary: the file's own, with no more than its tokens where the model has less; or else the model's, or else
  // what the width holds.
  CHECK(open_training({.train = {v1}}, 500)->vocabulary() == 500);
  CHECK(open_training({.train = {v2}}, 2 * kVocabulary)->vocabulary() == kVocabulary);
  CHECK(open_training({.train = {v2}}, 500)->vocabulary() == 64);
  CHECK(open_training(headerless, 0)->vocabulary() == 65536);
  CHECK(open_training({.train = {v1}}, 0)->vocabulary() == 2147483647);
  // A token that the model does not have is found when its batch is made.
  check_refused(ErrorCode::input, {"v1", "is not in the vocabulary", "below 40"}, [&] {
    auto source = open_training({.train = {v1}}, 40);
    Batch batch;
    for (int i = 0; i < 3; ++i) source->next(batch);
  });
}

TEST_CASE("faults of BIN.TOK and bare files are refused with what was found") {
  TestDirectory directory;
  const std::string path = directory / "tokens", payload = tokens_32(0, 64);
  auto refused = [&](const std::string& text, const std::string& words, const std::string& format = "auto") {
    write_text(path, text);
    check_refused(ErrorCode::input, {path, words},
                  [&] { open_training({.train = {path}, .validation = {}, .weights = {}, .format = format}); });
  };
  refused(llmq_header(2, 4, 64, 100).substr(0, 1023), "not a whole BIN.TOK file: found 1023 bytes");
  refused("BIN.TOK\n", "not a whole BIN.TOK file: found 8 bytes");
  refused(llmq_header(3, 4, 64, 100) + payload, "BIN.TOK version: found 3, expected 1 or 2");
  refused(llmq_header(2, 3, 64, 100) + payload, "bytes a token of a BIN.TOK file: found 3");
  refused(llmq_header(2, 4, 0, 100), "token count of a BIN.TOK file: found 0");
  refused(llmq_header(2, 4, -5, 100) + payload, "token count of a BIN.TOK file: found -5");
  refused(llmq_header(2, 4, 64, 0) + payload, "vocabulary of a BIN.TOK file: found 0");
  refused(llmq_header(2, 4, 64, 100, 7) + payload, "mask flag of a BIN.TOK file: found 7");
  refused(llmq_header(2, 4, 64, 100) + payload.substr(1), "file is truncated");
  refused(llmq_header(1, 4, 64) + payload + "x", "file is too long");
  refused(llmq_header(2, 4, 64, 100, 1) + payload + "1234567", "file is truncated");
  refused(llmq_header(2, 4, 64, 100, 1) + payload + std::string(8, '\0'), "no token of any whole sequence counts");
  refused("", "not a file of u16 tokens: found 0 bytes", "uint16");
  refused("abc", "not a file of u16 tokens: found 3 bytes", "uint16");
  refused(llmq_header(2, 4, 64, 100) + payload, "has a header, so it is not headerless: found BIN.TOK", "uint16");
  make_file(path, 0, 6);
  check_refused(ErrorCode::input, {"has a header", "QUERNTOK"},
                [&] { open_training({.train = {path}, .validation = {}, .weights = {}, .format = "uint16"}); });
  refused(payload, "not a token file: found another magic number, expected QUERNTOK or BIN.TOK");
}

TEST_CASE("damaged headers are refused or read, never past the file") {
  TestDirectory directory;
  const std::string path = directory / "tokens";
  const std::string ours = read_text(make_file(directory / "ours", 0, 2));
  const std::string theirs = llmq_header(2, 4, 64, 100, 1) + tokens_32(0, 64) + std::string(8, '\xff');
  int read = 0, refused = 0;
  for (std::uint32_t i = 0; i < 3000; ++i) {
    auto draw = [&](std::uint32_t n) { return random_word({29, RandomPurpose::sample, n}, 0, i); };
    std::string text = i % 2 ? ours : theirs;
    for (std::uint32_t change = 0; change <= draw(0) % 3; ++change)
      text[draw(1 + change) % 48] = static_cast<char>(draw(9 + change) % 3 ? draw(5 + change) % 5 : draw(5 + change));
    if (draw(20) % 4 == 0) text.resize(draw(21) % text.size());
    write_text(path, text);
    try {
      TokenFile file(path);
      ++read;
      std::vector<std::int32_t> tokens(static_cast<std::size_t>(file.count()));
      std::vector<std::uint8_t> counts(tokens.size());
      file.read_targets(0, counts);
      file.first_target(true);
      file.read(0, tokens);
    } catch (const Error& error) {
      ++refused;
      CHECK(error.code() == ErrorCode::input);
    }
  }
  CHECK(read > 100);
  CHECK(refused > 100);
}

TEST_CASE("a file without a checksum that changed since the checkpoint is found out") {
  TestDirectory directory;
  const std::string path = directory / "tokens";
  const std::int32_t count = 3 << 20;  // 12 MiB: sampled
  for (std::int64_t changed : {std::int64_t{0}, std::int64_t{count} - 1}) {
    write_text(path, llmq_header(1, 4, count) + tokens_32(0, count));
    std::string state = open_training({.train = {path}}, 0)->save_state();
    open_training({.train = {path}}, 0)->load_state(state);
    std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
    file.seekp(1024 + 4 * changed);
    file.put('\x7f');
    file.close();
    check_refused(ErrorCode::input, {path, "changed since the checkpoint: checksum"},
                  [&] { open_training({.train = {path}}, 0)->load_state(state); });
  }
}

TEST_CASE("files of more than 2^31 tokens are read to their end") {
  TestDirectory directory;
  const std::string path = directory / "tokens";
  constexpr std::int64_t kCount = (std::int64_t{1} << 31) + 12345;
  std::string last;  // the last window's tokens, and the target behind it
  const std::int64_t windows = (kCount - 1) / 10;
  for (int i = 0; i < 11; ++i) append(last, static_cast<std::uint16_t>(100 + i));
  TokenFileOptions options{.entries = {{path}}, .shuffle = false, .where = "data"};
  auto check_last = [&] {
    TokenFileSource source(options, {1, 10}, 1);
    CHECK(source.windows() == windows);
    std::string state = source.save_state();
    state.replace(state.rfind('=') + 1, std::string::npos, std::to_string(windows - 1));
    source.load_state(state);
    Batch batch;
    source.next(batch);
    CHECK(batch.tokens[0] == 100);
    CHECK(batch.targets[9] == 110);
    CHECK(source.save_state().find("epoch=1 window=0") != std::string::npos);
  };
  TokenHeader header{};
  std::copy_n(kTokenFileMagic, 8, header.magic);
  header.version = kTokenFileVersion;
  header.flags = kTokenMaskFlag;
  header.token_count = kCount;
  header.vocab_size = 200;
  header.token_bytes = 2;
  header.separator = -1;
  const std::int64_t mask_at = 64 + static_cast<std::int64_t>(padded_to_8(2 * kCount));
  const std::int64_t size = mask_at + static_cast<std::int64_t>(padded_to_8((kCount + 7) / 8));
  std::string head(reinterpret_cast<const char*>(&header), sizeof header);
  const std::int64_t target = windows * 10;  // of the last window, the only one that counts
  write_sparse(path, size,
               {{0, head},
                {64 + 2 * (windows - 1) * 10, last},
                {mask_at + target / 8, std::string(1, static_cast<char>(1 << target % 8))}});
  check_last();
  write_sparse(path, size - 8, {{0, head}});
  check_refused(ErrorCode::input, {path, "file is truncated"}, [&] { TokenFileSource(options, {1, 10}, 1); });

  options.reading.format = TokenFormat::uint16;
  write_sparse(path, 2 * kCount, {{2 * (windows - 1) * 10, last}});
  check_last();
}
