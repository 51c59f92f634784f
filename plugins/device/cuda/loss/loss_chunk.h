#pragma once
// Into how many tokens lm_loss divides its work where the op does not say.

#include <algorithm>
#include <cstdint>

namespace quern::cuda {

/// A chunk's logits take about 2.5 GiB: fewer chunks write and read the weight's gradient less often. Chunks are of
/// one size where a good one divides the tokens.
inline std::int64_t default_loss_chunk(std::int64_t tokens, std::int64_t row_bytes) {
  const std::int64_t limit = std::max<std::int64_t>((std::int64_t{5} << 29) / row_bytes, 256);
  if (tokens <= limit) return std::max<std::int64_t>(tokens, 1);
  for (std::int64_t chunk = limit / 128 * 128; 2 * chunk > limit; chunk -= 128)
    if (tokens % chunk == 0) return chunk;
  const std::int64_t chunks = (tokens + limit - 1) / limit;
  return std::min((tokens / chunks + 127) / 128 * 128, limit / 128 * 128);
}

}  // namespace quern::cuda
