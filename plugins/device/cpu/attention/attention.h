#pragma once
// What attention and its gradient share: the layout of packed rows, which keys a query sees, and heads as fp32
// matrices.

#include <cstdint>

#include "products/blas.h"
#include "quern/device.h"

namespace quern::cpu {

/// Packed rows hold H query heads, then K key heads, then K value heads, each `head_dim` wide.
struct AttentionShape {
  std::int64_t batch = 0, sequence = 0, heads = 0, kv_heads = 0, head_dim = 0;
  bool causal = true;
  std::int64_t window = 0;  ///< keys that a query sees; 0: all before it
  float scale = 1, cap = 0;

  std::int64_t tokens() const { return batch * sequence; }
  std::int64_t group() const { return heads / kv_heads; }  ///< query heads that share a key head
  std::int64_t packed() const { return (heads + 2 * kv_heads) * head_dim; }
  std::int64_t query_column(std::int64_t head) const { return head * head_dim; }
  std::int64_t key_column(std::int64_t kv_head) const { return (heads + kv_head) * head_dim; }
  std::int64_t value_column(std::int64_t kv_head) const { return (heads + kv_heads + kv_head) * head_dim; }
};

AttentionShape attention_shape(const OpInstance& op);

/// Query blocks are small enough to skip most of the causal triangle; key blocks long enough for fast GEMMs. A block
/// of scores, 64 x 512 fp32, stays in the second-level cache.
inline constexpr std::int64_t kQueryBlock = 64;
inline constexpr std::int64_t kKeyBlock = 512;

/// Keys [begin, end) of one query, in tokens of the micro-batch.
struct KeyRange {
  std::int64_t begin, end;
};

/// Which keys each query sees: its document or else its row, up to itself when causal, and within its window.
class KeyRanges {
 public:
  /// `memory`: 2 N integers. Offsets that are not ascending from 0, or a document across rows, are an input error.
  KeyRanges(const AttentionShape& shape, const View& documents, std::int32_t* memory);
  KeyRange of(std::int64_t query) const { return {begin_[query], causal_ ? query + 1 : end_[query]}; }
  /// All keys that queries [first, last) see.
  KeyRange of_block(std::int64_t first, std::int64_t last) const { return {begin_[first], of(last - 1).end}; }

 private:
  std::int32_t* begin_;
  std::int32_t* end_;
  bool causal_;
};

/// Rows [row, row + rows) and columns [column, column + columns) of a view as floats: in place when it is f32, else
/// converted into `panel` (rows * columns floats).
MatrixView load_block(const View& view, std::int64_t row, std::int64_t rows, std::int64_t column, std::int64_t columns,
                      float* panel);

}  // namespace quern::cpu
