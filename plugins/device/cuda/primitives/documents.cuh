#pragma once
// Which tokens a token may attend to, from the starts of documents.

#include <cstdint>

namespace quern::cuda {

struct TokenRange {
  std::int64_t begin, end;
};

/// The document that `token` is in, cut at the ends of its batch row; the row where there are no documents.
/// `documents` are (tokens + 1) starts, ascending, padded with `tokens`.
__device__ inline TokenRange document_of(const std::int32_t* documents, std::int64_t tokens, std::int64_t sequence,
                                         std::int64_t token) {
  const std::int64_t row = token / sequence * sequence;
  TokenRange range{row, row + sequence};
  if (documents == nullptr) return range;
  std::int64_t low = 0, high = tokens;  // documents[low] <= token < documents[high]
  while (high - low > 1) {
    const std::int64_t middle = (low + high) / 2;
    (documents[middle] <= token ? low : high) = middle;
  }
  range.begin = max(range.begin, static_cast<std::int64_t>(documents[low]));
  range.end = min(range.end, static_cast<std::int64_t>(documents[high]));
  return range;
}

}  // namespace quern::cuda
