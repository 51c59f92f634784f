#pragma once
// Small steps that several passes share.

#include <vector>

#include "quern/op_spec.h"

namespace quern {

/// Removes ops without a reader of their outputs that write nothing persistent, then values that no op mentions
/// (boundary inputs and outputs are kept). Ids change; names do not. `keep`: ids to preserve, renumbered in place.
void drop_unused(Program& program, const std::vector<ValueId*>& keep = {});

/// Orders ops so that each comes after what makes its inputs, as near to the present order as possible.
/// Returns false and leaves the program alone when there is a cycle.
bool order_ops(Program& program);

}  // namespace quern
