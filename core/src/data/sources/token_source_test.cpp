// Properties of the token source: an epoch is every window once, a resumed run is the straight run, ranks and batch
// sizes only group one order, and reading ahead changes nothing.
#include "data/sources/token_source.h"

#include <algorithm>
#include <cmath>
#include <fstream>
#include <limits>
#include <map>
#include <numeric>
#include <stdexcept>

#include <doctest/doctest.h>

#include "base/files/test_directory.h"
#include "data/sources/permutation.h"
#include "data/sources/prefetch_source.h"
#include "quern/error.h"
#include "quern/testkit/refusal.h"

using namespace quern;
using testkit::check_refused;
using testkit::refusal;

namespace {

constexpr std::int64_t kVocabulary = 100000;

// Token i is i, so a window names itself; every third token is masked.
std::string make_file(const TestDirectory& directory, std::int64_t count, bool masked = true) {
  TokenFileContent content{std::vector<std::int32_t>(static_cast<std::size_t>(count)), {}, kVocabulary};
  std::iota(content.tokens.begin(), content.tokens.end(), 0);
  if (masked)
    for (std::int64_t i = 0; i < count; ++i) content.mask.push_back(i % 3 != 0);
  std::string path = directory / "tokens";
  write_token_file(path, content);
  return path;
}

TokenFileOptions only(const std::string& path, bool shuffle = true) {
  return {.entries = {{path}}, .shuffle = shuffle, .where = "data.tokens.train"};
}

std::vector<Batch> take(DataSource& source, int batches) {
  std::vector<Batch> taken(static_cast<std::size_t>(batches));
  for (Batch& batch : taken) source.next(batch);
  return taken;
}

// First tokens of all rows in order: the sequence of windows.
std::vector<std::int32_t> windows_of(const std::vector<Batch>& batches, std::int64_t sequence) {
  std::vector<std::int32_t> windows;
  for (const Batch& batch : batches)
    for (std::size_t at = 0; at < batch.tokens.size(); at += static_cast<std::size_t>(sequence))
      windows.push_back(batch.tokens[at] / static_cast<std::int32_t>(sequence));
  return windows;
}

bool same(const Batch& a, const Batch& b) {
  return a.tokens == b.tokens && a.targets == b.targets && a.positions == b.positions && a.documents == b.documents;
}

/// Throws from its third batch on.
class FailingSource : public DataSource {
 public:
  std::int64_t vocabulary() const override { return 7; }
  std::int64_t epoch_tokens() const override { return 70; }
  void next(Batch& batch) override {
    if (taken_ == 2) throw std::runtime_error("the third batch is bad");
    batch.tokens.assign(1, taken_++);
  }
  std::string save_state() const override { return std::to_string(taken_); }
  void load_state(const std::string& state) override {
    if (state == "bad") throw std::runtime_error("refused");
    taken_ = std::stoi(state);
  }

 private:
  int taken_ = 0;
};

}  // namespace

TEST_CASE("a permutation reaches every place once, at every size") {
  for (std::uint64_t count : {1, 2, 3, 4, 5, 15, 16, 17, 255, 256, 257, 1000, 4097}) {
    for (std::uint32_t epoch : {0u, 1u}) {
      std::vector<int> seen(count);
      for (std::uint64_t i = 0; i < count; ++i) ++seen.at(permuted(i, count, 42, epoch));
      CAPTURE(count);
      CHECK(std::all_of(seen.begin(), seen.end(), [](int n) { return n == 1; }));
    }
  }
  // Places of a shuffled order are uncorrelated with their index: |r| < 5 / sqrt(count).
  constexpr std::uint64_t kCount = 10000;
  double sum = 0;
  const double mean = (kCount - 1) / 2.0;
  for (std::uint64_t i = 0; i < kCount; ++i)
    sum += (static_cast<double>(i) - mean) * (static_cast<double>(permuted(i, kCount, 1, 0)) - mean);
  CHECK(std::abs(sum / kCount / (kCount * static_cast<double>(kCount) / 12)) < 0.05);
}

// Counts of each order over many seeds: their chi-square has a mean of orders - 1 and a variance of twice that.
TEST_CASE("every order of a few windows is equally likely") {
  for (std::uint64_t count : {2, 3, 4, 5, 6}) {
    CAPTURE(count);
    std::vector<std::uint64_t> order(count);
    std::iota(order.begin(), order.end(), std::uint64_t{0});
    std::map<std::vector<std::uint64_t>, int> none;
    do none[order] = 0;
    while (std::next_permutation(order.begin(), order.end()));
    const auto orders = static_cast<int>(none.size()), each = 240000 / orders;
    auto excess = [&](auto permutation) {  // in standard deviations
      auto seen = none;
      for (int draw = 0; draw < each * orders; ++draw) {
        for (std::uint64_t place = 0; place < count; ++place)
          order[place] =
              permutation(place, count, static_cast<std::uint64_t>(draw / 5), static_cast<std::uint32_t>(draw % 5));
        ++seen.at(order);
      }
      double chi_square = 0;
      for (const auto& [one, times] : seen) chi_square += std::pow(times - each, 2) / each;
      return (chi_square - (orders - 1)) / std::sqrt(2.0 * (orders - 1));
    };
    CHECK(excess(permuted) < 5);
    if (count > 2 && count < 6) CHECK(excess(feistel_permuted) > 5);
  }
}

TEST_CASE("rows are windows, targets the next tokens, masked by the target") {
  TestDirectory directory;
  std::string path = make_file(directory, 41);
  TokenFileSource source(only(path, false), {2, 10}, 1);
  CHECK(source.windows() == 4);  // the last one ends exactly at the file's end
  CHECK(source.epoch_tokens() == 40);
  CHECK(source.vocabulary() == kVocabulary);
  for (const Batch& batch : take(source, 2)) {
    REQUIRE(batch.tokens.size() == 20);
    for (std::size_t i = 0; i < 20; ++i) {
      std::int32_t next = batch.tokens[i] + 1;
      CHECK(batch.targets[i] == (next % 3 == 0 ? -1 : next));
      CHECK(batch.positions[i] == static_cast<std::int32_t>(i % 10));
    }
    CHECK(batch.documents.empty());
  }
  Batch third;
  source.next(third);
  CHECK(third.tokens[0] == 0);  // sequential order starts again
}

TEST_CASE("an epoch visits every window once, and epochs and seeds differ") {
  TestDirectory directory;
  std::string path = make_file(directory, 501);
  for (std::int64_t batch : {1, 3, 7, 64}) {  // 64 exceeds the epoch and wraps
    TokenFileSource source(only(path), {batch, 10}, 9);
    auto windows = windows_of(take(source, static_cast<int>(200 / batch + 1)), 10);
    std::vector<std::vector<std::int32_t>> epochs;
    for (std::size_t at = 0; at + 50 <= windows.size(); at += 50)
      epochs.emplace_back(windows.begin() + static_cast<long>(at), windows.begin() + static_cast<long>(at) + 50);
    REQUIRE(epochs.size() >= 2);
    CHECK(epochs[0] != epochs[1]);
    TokenFileSource other(only(path), {50, 10}, 10);
    CHECK(windows_of(take(other, 1), 10) != epochs[0]);
    for (auto epoch : epochs) {
      std::sort(epoch.begin(), epoch.end());
      for (std::int32_t i = 0; i < 50; ++i) CHECK(epoch[static_cast<std::size_t>(i)] == i);
    }
  }
}

TEST_CASE("resuming anywhere continues as if never interrupted") {
  TestDirectory directory;
  std::string path = make_file(directory, 173);
  TokenFileSource straight(only(path), {3, 10}, 5);
  for (int point = 0; point < 15; ++point) {
    std::string state = straight.save_state();
    TokenFileSource resumed(only(path), {3, 10}, 5);
    resumed.load_state(state);
    CHECK(resumed.save_state() == state);
    auto ahead = take(resumed, 8);
    straight.load_state(state);
    auto expected = take(straight, 8);
    for (std::size_t i = 0; i < ahead.size(); ++i) CHECK(same(ahead[i], expected[i]));
    straight.load_state(state);
    take(straight, 1);
  }
}

TEST_CASE("a position of the first rule goes on in the first rule's order") {
  TestDirectory directory;
  const std::string path = make_file(directory, 61);  // 6 windows, of which the rules make other orders
  TokenFileSource now(only(path), {1, 10}, 5);
  auto order = [&](const std::string& state, std::uint64_t place) {
    TokenFileSource source(only(path), {1, 10}, 5);
    source.load_state(state);
    CHECK(source.save_state() == state);
    const std::vector<std::int32_t> windows = windows_of(take(source, 12), 10);
    for (std::size_t i = 0; i < windows.size(); ++i) {
      const std::uint64_t at = place + i;
      const bool first = state.starts_with("token-file-1 ");
      CHECK(static_cast<std::uint64_t>(windows[i]) ==
            (first ? feistel_permuted : permuted)(at % 6, 6, 5, static_cast<std::uint32_t>(at / 6)));
    }
    return windows;
  };
  take(now, 4);
  std::string state = now.save_state();
  CHECK(state.starts_with("token-file-2 "));
  const std::vector<std::int32_t> second = order(state, 4);
  CHECK(order(state.replace(0, 12, "token-file-1"), 4) != second);
}

TEST_CASE("batch sizes only group one order, also across a resume") {
  TestDirectory directory;
  std::string path = make_file(directory, 173);
  TokenFileSource one(only(path), {12, 10}, 5);
  auto order = windows_of(take(one, 4), 10);
  std::vector<std::int32_t> grouped;
  std::string state;
  {
    TokenFileSource alone(only(path), {6, 10}, 5);
    grouped = windows_of(take(alone, 2), 10);
    state = alone.save_state();
  }
  TokenFileSource source(only(path), {4, 10}, 5);
  source.load_state(state);
  const std::vector<std::int32_t> rest = windows_of(take(source, 9), 10);
  grouped.insert(grouped.end(), rest.begin(), rest.end());
  CHECK(grouped == order);
}

TEST_CASE("other data, another sequence, order or seed and damaged positions are refused") {
  TestDirectory directory;
  std::string path = make_file(directory, 173);
  TokenFileSource source(only(path), {3, 10}, 5);
  take(source, 2);
  const std::string state = source.save_state();
  check_refused(ErrorCode::input, {"sequence length changed"}, [&] {
    TokenFileSource(only(path), {3, 11}, 5).load_state(state);
  });
  check_refused(ErrorCode::input, {"seed changed"}, [&] { TokenFileSource(only(path), {3, 10}, 6).load_state(state); });
  check_refused(ErrorCode::input, {"order of the data changed"}, [&] {
    TokenFileSource(only(path, false), {3, 10}, 5).load_state(state);
  });
  for (const std::string bad :
       {"", "token-file-3 x=1", "token-file-2 x=1", "token-file-1", "token-file-1 x", "\xff\xfe"})
    CHECK_MESSAGE(refusal(ErrorCode::input, [&] { source.load_state(bad); }) != "accepted", bad);
  auto with = [&](const std::string& key, const std::string& value) {
    std::size_t at = state.find(key + "=") + key.size() + 1;
    std::string changed = state;
    return changed.replace(
        at, changed.find(' ', at) == std::string::npos ? std::string::npos : changed.find(' ', at) - at, value);
  };
  for (const char* bad : {"17", "-1", "x", "", "99999999999999999999999"})
    check_refused(ErrorCode::input, {"window"}, [&] { source.load_state(with("window", bad)); });
  for (const char* bad : {"4294967296", "1e3"})
    check_refused(ErrorCode::input, {"epoch"}, [&] { source.load_state(with("epoch", bad)); });
  CHECK(source.save_state() == state);  // a refusal changes nothing
  make_file(directory, 173, false);
  check_refused(ErrorCode::input, {"changed since the checkpoint"}, [&] {
    TokenFileSource(only(path), {3, 10}, 5).load_state(state);
  });
}

TEST_CASE("files that cannot train are refused at the start") {
  TestDirectory directory;
  std::string path = make_file(directory, 10);
  check_refused(ErrorCode::input, {"shorter than one sequence"}, [&] {
    TokenFileSource source(only(path), {1, 10}, 1);
  });
  make_file(directory, 11);
  TokenFileSource(only(path), {1, 10}, 1);
  TokenFileContent masked{std::vector<std::int32_t>(25, 1), std::vector<bool>(25), 2};
  write_token_file(path, masked);
  check_refused(ErrorCode::input, {"no token of any whole sequence counts"}, [&] {
    TokenFileSource source(only(path), {1, 10}, 1);
  });
  masked.mask[24] = true;  // behind the last whole sequence
  write_token_file(path, masked);
  check_refused(ErrorCode::input, {"no token of any whole sequence counts"}, [&] {
    TokenFileSource source(only(path), {1, 10}, 1);
  });
  masked.mask[20] = true;
  write_token_file(path, masked);
  TokenFileSource(only(path), {1, 10}, 1);
}

TEST_CASE("a token outside the vocabulary is refused when its batch is made") {
  TestDirectory directory;
  std::string path = make_file(directory, 41, false);
  {
    std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
    file.seekp(64 + 4 * 25);
    std::uint32_t bad = kVocabulary;
    file.write(reinterpret_cast<const char*>(&bad), 4);
  }
  TokenFileOptions options = only(path, false);
  options.verify = false;
  TokenFileSource source(options, {2, 10}, 1);
  Batch batch;
  source.next(batch);
  std::string state = source.save_state();
  check_refused(ErrorCode::input, {"token 25 is not in the vocabulary"}, [&] { source.next(batch); });
  CHECK(source.save_state() == state);
}

TEST_CASE("a file of a larger vocabulary than the model's is bounded by its largest token, and keeps to it") {
  TestDirectory directory;
  const std::string path = make_file(directory, 41, false);  // tokens 0 to 40, the last behind the last window
  TokenFileOptions options = only(path, false);
  options.verify = false;
  for (std::int64_t model : {40, 41, 5000}) {
    options.reading.vocabulary = model;
    TokenFileSource source(options, {1, 10}, 1);
    CHECK(source.vocabulary() == 41);
    std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
    auto write = [&](std::uint32_t token) {
      file.seekp(64 + 4 * 5);
      file.write(reinterpret_cast<const char*>(&token), 4).flush();
    };
    write(41);  // after it was looked at
    Batch batch;
    check_refused(ErrorCode::input, {"token 5 is not in the vocabulary: found 41, expected below 41"},
                  [&] { source.next(batch); });
    write(5);
  }
  options.reading.vocabulary = kVocabulary;
  CHECK(TokenFileSource(options, {1, 10}, 1).vocabulary() == kVocabulary);
}

TEST_CASE("reading ahead gives the same batches and positions") {
  TestDirectory directory;
  std::string path = make_file(directory, 173);
  TokenFileSource direct(only(path), {3, 10}, 5);
  PrefetchSource ahead(std::make_unique<TokenFileSource>(only(path), Geometry{3, 10}, 5));
  CHECK(ahead.vocabulary() == direct.vocabulary());
  CHECK(ahead.epoch_tokens() == direct.epoch_tokens());
  Batch got, want;
  std::string middle;
  for (int i = 0; i < 40; ++i) {
    CHECK(ahead.save_state() == direct.save_state());
    if (i == 20) middle = ahead.save_state();
    ahead.next(got);
    direct.next(want);
    CHECK(same(got, want));
  }
  CHECK_THROWS_AS(ahead.load_state("nonsense"), Error);
  CHECK(ahead.save_state() == direct.save_state());
  ahead.load_state(middle);
  direct.load_state(middle);
  for (int i = 0; i < 5; ++i) {
    ahead.next(got);
    direct.next(want);
    CHECK(same(got, want));
  }
}

TEST_CASE("passing over batches is as reading them") {
  TestDirectory directory;
  std::string path = make_file(directory, 173);
  for (std::int64_t count : {0, 1, 2, 3, 17, 400})
    for (int before : {0, 1, 5}) {
      TokenFileSource direct(only(path), {3, 10}, 5), skipping(only(path), {3, 10}, 5);
      Batch got, want;
      for (int i = 0; i < before; ++i) skipping.next(got);
      for (std::int64_t i = 0; i < before + count; ++i) direct.next(want);
      skipping.skip(count);
      CHECK(skipping.save_state() == direct.save_state());
      direct.next(want);
      skipping.next(got);
      CHECK(same(got, want));
      CHECK_THROWS_AS(skipping.skip(std::numeric_limits<std::int64_t>::max()), Error);
      direct.next(want);
      skipping.next(got);
      CHECK(same(got, want));
    }
}

TEST_CASE("a payload that is not what its header states is found before the first batch, or behind the first ones") {
  TestDirectory directory;
  for (std::int64_t count : {173, 5 << 20}) {  // 4 bytes a token: more than one read
    const std::string path = directory / "tokens";
    TokenFileContent content{std::vector<std::int32_t>(static_cast<std::size_t>(count), 1), {}, kVocabulary};
    write_token_file(path, content);
    for (bool verify : {true, false}) {
      CAPTURE(count);
      CAPTURE(verify);
      TokenFileOptions options = only(path);
      options.verify = verify;
      auto read_all = [&] {
        TokenFileSource source(options, {3, 10}, 5);
        Batch batch;
        for (int i = 0; i < 1000; ++i) source.next(batch);
      };
      CHECK(refusal(ErrorCode::input, read_all) == "accepted");
      std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
      file.seekp(64 + 4 * (count - 1));
      file.put('\x2');
      file.close();
      if (!verify) {
        CHECK(refusal(ErrorCode::input, read_all) == "accepted");
        continue;
      }
      check_refused(ErrorCode::input, {path + ": checksum of the payload: found "}, [&] {
        TokenFileSource source(options, {3, 10}, 5);
        Batch batch;
        for (;;) source.next(batch);
      });
      write_token_file(path, content);
    }
  }
}

TEST_CASE("errors of the thread arrive with their batch, and again until another position is loaded") {
  PrefetchSource source(std::make_unique<FailingSource>());
  Batch batch;
  for (int round = 0; round < 2; ++round) {
    for (int i = 0; i < 2; ++i) {
      CHECK(source.save_state() == std::to_string(i));
      source.next(batch);
      CHECK(batch.tokens.at(0) == i);
    }
    for (int i = 0; i < 3; ++i) CHECK_THROWS_WITH(source.next(batch), "the third batch is bad");
    CHECK(source.save_state() == "2");
    CHECK_THROWS_WITH(source.load_state("bad"), "refused");
    CHECK_THROWS_WITH(source.next(batch), "the third batch is bad");
    source.load_state("0");
  }
}

TEST_CASE("a source that reads ahead can be dropped at any time") {
  TestDirectory directory;
  std::string path = make_file(directory, 173);
  for (int taken = 0; taken < 6; ++taken) {
    PrefetchSource source(std::make_unique<TokenFileSource>(only(path), Geometry{3, 10}, 5));
    take(source, taken);
  }
}
