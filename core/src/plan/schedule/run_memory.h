#pragma once
// Memory that values of a run share by their lifetimes: the streams between programs, and programs' local values, each
// from the stop that makes it to the last that reads it.

#include <cstdint>
#include <vector>

#include "plan/schedule/order.h"

namespace quern {

/// A stream at a boundary: an operand of the residual stream, or its gradient.
struct StreamId {
  int boundary = 0;
  int operand = 0;
  bool gradient = false;
};

/// The streams that enter a stop, or leave it, by operand of its program; none: something else does.
std::vector<StreamId> streams_into(const Plan& plan, const Stop& stop);
std::vector<StreamId> streams_out_of(const Plan& plan, const Stop& stop);

/// As which a neighbour keeps the stream for the backward pass; null: none does.
const PlannedTensor* kept_as(const Plan& plan, const StreamId& stream);

struct RunMemory {
  std::vector<std::int64_t> streams;  ///< by number_of: offsets from Plan::transient_offset on; -1: kept, or not there
  std::int64_t bytes = 0;             ///< of all that the run has at once
};
std::size_t number_of(const Plan& plan, const StreamId& stream);

/// Puts each at the lowest offset that is free when its life begins, and sets Stop::locals. A stream that is put into a
/// store lives on until the program behind its reader is done, so that none waits for a put that it need not wait for.
RunMemory run_memory(const Plan& plan, std::vector<Stop>& order);

}  // namespace quern
