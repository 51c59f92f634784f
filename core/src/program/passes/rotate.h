#pragma once
// Pass 1, rotate: a block's trailing residual add moves to the front of the next block and of the head, where it fuses
// with the norm that follows. What crosses the boundary is then the pair (residual, branch); their sum is materialised
// once, inside the consumer, and is what is saved or offloaded for a layer.

#include <vector>

#include "quern/op_spec.h"

namespace quern {

/// A model's programs, of each kind of block that occurs one.
struct ModelPrograms {
  Program embed;
  std::vector<Program> blocks;
  std::vector<int> block_of_layer;  ///< indices of `blocks`
  Program head;
};

/// `written` is what the model wrote, of at least one layer. The first layer gets a program of its own (nothing to add
/// before it). Unless all blocks end in an add of one kind, the programs are left as they are.
ModelPrograms rotate(ModelPrograms written, const OpSet& ops);

}  // namespace quern
