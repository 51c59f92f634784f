#pragma once
// How row kernels use the cores: work is cut into blocks of fixed size, whatever the number of threads, and sums over
// tokens are taken block by block and then over the blocks in order. So results do not depend on the thread count.

#include <algorithm>
#include <cstdint>

#include "quern/view.h"

namespace quern::cpu {

inline constexpr std::int64_t kBlockRows = 32;        ///< tokens of one partial sum
inline constexpr std::int64_t kBlockElements = 4096;  ///< elements a thread takes at a time in elementwise ops

constexpr std::int64_t block_count(std::int64_t total, std::int64_t block) { return (total + block - 1) / block; }

/// body(index, begin, end) for every block of [0, total), in parallel. The body must not throw.
template <class Body>
void for_blocks(std::int64_t total, std::int64_t block, const Body& body) {
  std::int64_t blocks = block_count(total, block);
#pragma omp parallel for schedule(static) if (blocks > 1)
  for (std::int64_t index = 0; index < blocks; ++index)
    body(index, index * block, std::min(total, (index + 1) * block));
}

/// Column sums over tokens: one partial row for each block of kBlockRows rows, in fp32, kept in a kernel's workspace;
/// and their sum, in fp64.
class ColumnSums {
 public:
  static std::size_t bytes(std::int64_t rows, std::int64_t columns);
  ColumnSums(float* memory, std::int64_t rows, std::int64_t columns)
      : memory_(memory), rows_(rows), columns_(columns) {}

  /// The partial row of a block, set to zero.
  float* start(std::int64_t block) const;
  /// Writes the sums of columns [begin, begin + sum.columns()) to `sum`, or adds them.
  void finish(const View& sum, bool accumulate, std::int64_t begin = 0) const;

 private:
  float* memory_;
  std::int64_t rows_, columns_;
};

}  // namespace quern::cpu
