#pragma once
// Documents, and windows in them, as a bias that is added to attention scores: 0 where a query attends, else a number
// that no score makes up for. It is what cuDNN takes for documents whose number and lengths are known only on the
// device.

#include <cuda_runtime_api.h>

#include <cstdint>

#include "attention/attention.h"

namespace quern::cuda {

/// Writes (rows, sequence, sequence) bf16 for the batch rows from `first_row` on; [b][i][j] is of query i and key j.
/// `documents` are the (tokens + 1) starts of the whole batch, ascending, padded with `tokens`.
void write_attention_mask(void* mask, const AttentionShape& shape, const std::int32_t* documents,
                          std::int64_t first_row, std::int64_t rows, cudaStream_t stream);

}  // namespace quern::cuda
