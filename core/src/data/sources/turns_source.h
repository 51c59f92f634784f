#pragma once
// One rank's micro-batches of a global order: whole ones, round-robin within each step, so that a micro-batch has the
// same rows on any number of ranks.

#include <memory>
#include <string>
#include <vector>

#include "quern/data_source.h"

namespace quern {

/// The first number from `at` on that is the rank's.
std::int64_t next_turn(std::int64_t at, std::int64_t rank, std::int64_t size, std::int64_t turn);

/// The rank's numbers among `step` of them; rank 0 has at least as many as any other.
std::vector<std::int64_t> turns_of(std::int64_t rank, std::int64_t size, std::int64_t turn, std::int64_t step);

class TurnsSource : public DataSource {
 public:
  /// Of each `step` micro-batches of `all`, number n is rank (n / turn) % size's.
  TurnsSource(std::unique_ptr<DataSource> all, int rank, int size, std::int64_t turn, std::int64_t step);

  std::int64_t vocabulary() const override { return all_->vocabulary(); }
  std::int64_t epoch_tokens() const override { return all_->epoch_tokens(); }
  void next(Batch& batch) override;
  /// The same on all ranks, between two steps.
  std::string save_state() const override { return all_->save_state(); }
  /// Of a position between two steps.
  void load_state(const std::string& state) override;

 private:
  std::unique_ptr<DataSource> all_;
  const std::int64_t rank_, size_, turn_, step_;
  std::int64_t at_ = 0;  // micro-batch of the step
};

}  // namespace quern
