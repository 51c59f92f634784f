#include "data/sources/turns_source.h"

#include <doctest/doctest.h>

#include "quern/skipping_source.h"

using namespace quern;

namespace {

/// Batches whose one token is their number.
class Numbers : public SkippingSource {
 public:
  std::int64_t vocabulary() const override { return 1000; }
  std::int64_t epoch_tokens() const override { return 1000; }
  void next(Batch& batch) override { batch.tokens = {next_++}; }
  std::string save_state() const override { return std::to_string(next_); }
  void load_state(const std::string& state) override { next_ = std::stoi(state); }
  void skip(std::int64_t batches) override { next_ += static_cast<std::int32_t>(batches); }

 private:
  std::int32_t next_ = 0;
};

}  // namespace

TEST_CASE("ranks take the micro-batches of each step round-robin, and stand at one position between steps") {
  for (int size : {1, 2, 3, 4, 7})
    for (std::int64_t step : {7, 8, 12}) {
      CAPTURE(size);
      CAPTURE(step);
      std::vector<bool> taken(static_cast<std::size_t>(3 * step), false);
      for (int rank = 0; rank < size; ++rank) {
        TurnsSource source(std::make_unique<Numbers>(), rank, size, 1, step);
        std::vector<std::int64_t> turns;
        for (std::int64_t begin = 0; begin < 3 * step; begin += step) {
          CHECK(source.save_state() == std::to_string(begin));
          for (std::int64_t own = rank; own < step; own += size) {
            Batch batch;
            source.next(batch);
            CHECK(batch.tokens[0] == begin + own);
            if (begin == 0) turns.push_back(own);
            taken[static_cast<std::size_t>(begin + own)] = true;
          }
        }
        CHECK(turns_of(rank, size, 1, step) == turns);
        source.load_state("70");
        Batch batch;
        source.next(batch);
        CHECK(batch.tokens[0] == 70 + rank);
      }
      CHECK(taken == std::vector<bool>(taken.size(), true));
    }
}

TEST_CASE("a turn of several micro-batches is a block of neighbours") {
  std::vector<std::int32_t> taken;
  for (int rank = 0; rank < 3; ++rank) {
    TurnsSource source(std::make_unique<Numbers>(), rank, 3, 4, 10);
    for (int i = 0; i < (rank == 2 ? 2 : 4); ++i) {
      Batch batch;
      source.next(batch);
      taken.push_back(batch.tokens[0]);
    }
    CHECK(source.save_state() == "10");
  }
  CHECK(taken == std::vector<std::int32_t>{0, 1, 2, 3, 4, 5, 6, 7, 8, 9});
}
