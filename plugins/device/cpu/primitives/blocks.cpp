#include "primitives/blocks.h"

#include "primitives/row_math.h"
#include "primitives/rows.h"

namespace quern::cpu {

std::size_t ColumnSums::bytes(std::int64_t rows, std::int64_t columns) {
  return static_cast<std::size_t>(block_count(rows, kBlockRows) * columns) * sizeof(float);
}

float* ColumnSums::start(std::int64_t block) const {
  float* partial = memory_ + block * columns_;
  std::fill_n(partial, columns_, 0.0f);
  return partial;
}

void ColumnSums::finish(const View& sum, bool accumulate, std::int64_t begin) const {
  constexpr std::int64_t kStrip = 512;  // columns that one thread sums: they stay in its first-level cache
  for_blocks(sum.count(), kStrip, [&](std::int64_t, std::int64_t from, std::int64_t to) {
    double sums[kStrip] = {};
    float total[kStrip];
    for (std::int64_t block = 0; block < block_count(rows_, kBlockRows); ++block)
      add_to_sums(memory_ + block * columns_ + begin + from, to - from, sums);
    round_sums(sums, to - from, total);
    if (accumulate)
      quern::cpu::accumulate(sum, from, to - from, total);
    else
      store(sum, from, to - from, total);
  });
}

}  // namespace quern::cpu
