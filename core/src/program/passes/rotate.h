#pragma once
// Pass 1, rotate: a block's trailing residual add moves to the front of the next block and of the head, where it fuses
// with the norm that follows. What crosses the boundary is then the pair (residual, branch); their sum is materialised
// once, inside the consumer, and is what is saved or offloaded for a layer.

#include "quern/op_spec.h"

namespace quern {

/// A model's programs, and after rotation the first block apart from the others (nothing to add before it).
struct ModelPrograms {
  Program embed;
  Program first_block;
  Program block;
  Program head;
};

/// embed, block and head as the model wrote them. A block that does not end in an add is left as it is.
/// The number of layers must be at least one.
ModelPrograms rotate(const Program& embed, const Program& block, const Program& head, const OpSet& ops);

}  // namespace quern
