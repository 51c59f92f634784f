#pragma once
// What goes wrong in groups of ranks beside sums and moves of data: NaN, buffers that are used again, ranks that are
// ahead. Each is run by one rank, and returns how many cases it had.

#include "conformance/communicator/collective_data.h"

namespace quern::conformance::collectives {

/// NaN of any one rank is in the maximum, beside infinities and negative numbers; elsewhere it is the largest.
int maximum_of_nan(Joined& group);
/// Buffers are written again at once, while alternating ranks are ahead of each other.
int again_and_again(Joined& group);
/// The root does not wait for the others, which come late to each broadcast; sizes for which libraries have ways of
/// their own.
int root_ahead(Joined& group);
/// A graph of collectives, launched again and again on other data; 0: these cannot be captured.
int captured(Joined& group);

}  // namespace quern::conformance::collectives
