#include "data/sources/turns_source.h"

#include <utility>

#include "quern/error.h"
#include "quern/skipping_source.h"

namespace quern {

std::int64_t next_turn(std::int64_t at, std::int64_t rank, std::int64_t size, std::int64_t turn) {
  const std::int64_t number = at / turn, waited = (rank - number % size + size) % size;
  return waited == 0 ? at : (number + waited) * turn;
}

std::vector<std::int64_t> turns_of(std::int64_t rank, std::int64_t size, std::int64_t turn, std::int64_t step) {
  std::vector<std::int64_t> turns;
  for (std::int64_t at = next_turn(0, rank, size, turn); at < step; at = next_turn(at + 1, rank, size, turn))
    turns.push_back(at);
  return turns;
}

TurnsSource::TurnsSource(std::unique_ptr<DataSource> all, int rank, int size, std::int64_t turn, std::int64_t step)
    : all_(std::move(all)), rank_(rank), size_(size), turn_(turn), step_(step) {
  if (rank < 0 || rank >= size || turn < 1 || step <= (size - 1) * turn)
    fail_internal("TurnsSource", "a rank without a turn");
}

// Behind its last micro-batch of a step a rank goes to the next step at once, so that all stand at one position.
void TurnsSource::next(Batch& batch) {
  const std::int64_t own = next_turn(at_, rank_, size_, turn_);
  if (own > at_) skip(*all_, own - at_);
  all_->next(batch);
  at_ = own + 1;
  if (next_turn(at_, rank_, size_, turn_) < step_) return;
  if (at_ < step_) skip(*all_, step_ - at_);
  at_ = 0;
}

void TurnsSource::load_state(const std::string& state) {
  all_->load_state(state);
  at_ = 0;
}

}  // namespace quern
