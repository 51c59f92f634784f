#pragma once
// Block scales (quern/block_scales.h) for tests of matmuls.

#include <cmath>
#include <vector>

#include "quern/block_scales.h"
#include "quern/testkit/compare.h"
#include "quern/testkit/op_launch.h"

namespace quern::cuda {

/// Powers of two from 1/8 to 8, different from block to block.
inline testkit::PoisonedTensor block_scales(const Extents& extents, std::uint64_t seed) {
  std::vector<float> scales = testkit::random_normal(element_count(extents), seed, 1);
  for (float& scale : scales) scale = std::exp2(std::round(std::fmin(std::fmax(scale, -3.0f), 3.0f)));
  return {DType::f32, extents, scales};
}

/// Scales of 128 x 128 elements of a matrix (rows, k), laid out as block scales of its rows; few of them differ.
inline testkit::PoisonedTensor spread_scales(std::int64_t rows, std::int64_t k, std::uint64_t seed) {
  const Extents extents = row_block_scales(rows, k);
  const std::vector<float> of_squares = testkit::random_normal(scale_blocks(rows) * scale_blocks(k), seed, 1);
  std::vector<float> scales(static_cast<std::size_t>(element_count(extents)));
  for (std::int64_t block = 0; block < extents[0]; ++block)
    for (std::int64_t row = 0; row < rows; ++row) {
      const float of = of_squares[static_cast<std::size_t>(block * scale_blocks(rows) + row / kScaleBlock)];
      scales[static_cast<std::size_t>(block * rows + row)] = of > 1 ? 2.0f : of < -1.5f ? 0.5f : 1.0f;
    }
  return {DType::f32, extents, scales};
}

}  // namespace quern::cuda
