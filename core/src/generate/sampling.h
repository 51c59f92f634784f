#pragma once
// Picks the next token from its logits. A draw depends only on the logits, the seed, the sequence's number and the
// position, so that a text does not depend on what else is generated beside it.

#include <cstdint>
#include <span>

#include "quern/generation.h"

namespace quern {

/// The token for position `position` of sequence `sequence`. Equal logits are ordered by token, the lower one first. A
/// logit that is not finite is a numerics error.
std::int32_t sample_token(std::span<const float> logits, const Sampling& sampling, std::uint32_t sequence,
                          std::uint32_t position);

}  // namespace quern
