#pragma once
// What each token attends to, and what attends to it, as ranges of its row: from documents, windows and causality. Both
// ends of a range grow from token to token, so the ranges of a tile's first and last row bound the tile's.

#include <cuda_runtime_api.h>

#include <cstdint>

#include "attention/attention.h"

namespace quern::cuda {

/// (B, S) ranges [x, y) of places in the token's own row.
struct AttentionRanges {
  int2* keys = nullptr;     ///< that the token as a query attends to; never empty
  int2* queries = nullptr;  ///< that attend to the token as a key
  int* counter = nullptr;   ///< of work items of the kernel that comes next: set to 0
};

/// Whether a query attends to less than the mask says.
inline bool has_ranges(const AttentionShape& s) { return s.documents || s.window > 0; }

/// Bytes of one of the two, a multiple of 256.
std::size_t attention_range_bytes(const AttentionShape& shape);
/// Loads the kernel: at prepare.
void load_attention_ranges();
/// Writes all that are not null; `documents` may be null.
void write_attention_ranges(const AttentionShape& shape, const std::int32_t* documents, const AttentionRanges& ranges,
                            cudaStream_t stream);

}  // namespace quern::cuda
