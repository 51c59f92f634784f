#pragma once
// A micro-batch for people: each document's tokens, and which of them are learned.

#include <string>

#include "data/token_text.h"
#include "quern/data_source.h"

namespace quern {

/// Without `text`, tokens are shown by number. A token is "learned" where predicting it counts in the loss, else
/// "given"; the target behind a row's last token stands in a line of its own.
std::string batch_text(const Batch& batch, const Geometry& geometry, const TokenText* text);

}  // namespace quern
