// Values are widened to int16, which CPUs multiply and add in pairs into int32. Sums are integers, so no order of them
// changes a bit.
#include "products/int8_product.h"

#include <algorithm>

#include "primitives/blocks.h"
#include "primitives/simd.h"

namespace quern::cpu {

namespace {

constexpr std::int64_t kSide = 4;     // rows of either operand that a tile of sums takes
constexpr std::int64_t kLanes = 32;   // int16 of a vector at most: rows of panels are whole vectors
constexpr std::int64_t kPanel = 256;  // rows of b that stay in a cache while rows of a pass

std::int64_t padded(std::int64_t size, std::int64_t unit) { return block_count(size, unit) * unit; }

QUERN_CPU_CLONES void widen(const std::int8_t* codes, std::int64_t stride, std::int64_t count, std::int16_t* wide) {
  if (stride == 1)
    for (std::int64_t i = 0; i < count; ++i) wide[i] = codes[i];
  else
    for (std::int64_t i = 0; i < count; ++i) wide[i] = codes[i * stride];
}

/// Rows and columns past the matrix are zero.
void unpack(const CodeRows& x, std::int64_t rows, std::int64_t k, std::int16_t* panel) {
  const std::int64_t width = padded(k, kLanes);
#pragma omp parallel for schedule(static)
  for (std::int64_t row = 0; row < padded(rows, kSide); ++row) {
    std::int16_t* wide = panel + row * width;
    const std::int64_t filled = row < rows ? k : 0;
    widen(x.data + row * x.row_stride, x.stride, filled, wide);
    std::fill(wide + filled, wide + width, std::int16_t{0});
  }
}

/// sums[i][j] of kSide rows of a with as many of b, each `width` elements, a multiple of kLanes.
QUERN_CPU_CLONES void sum_tile(const std::int16_t* __restrict__ a, const std::int16_t* __restrict__ b,
                               std::int64_t width, std::int32_t (&sums)[kSide][kSide]) {
  for (std::int64_t i = 0; i < kSide; ++i) {
    const std::int16_t *row = a + i * width, *b1 = b + width, *b2 = b1 + width, *b3 = b2 + width;
    std::int32_t s0 = 0, s1 = 0, s2 = 0, s3 = 0;
    for (std::int64_t k = 0; k < width; ++k) {
      s0 += std::int32_t{row[k]} * b[k];
      s1 += std::int32_t{row[k]} * b1[k];
      s2 += std::int32_t{row[k]} * b2[k];
      s3 += std::int32_t{row[k]} * b3[k];
    }
    sums[i][0] = s0, sums[i][1] = s1, sums[i][2] = s2, sums[i][3] = s3;
  }
}

}  // namespace

std::int64_t int8_panel(std::int64_t rows, std::int64_t k) { return padded(rows, kSide) * padded(k, kLanes); }

void int8_product(std::int64_t m, std::int64_t n, std::int64_t k, float alpha, const CodeRows& a, const CodeRows& b,
                  std::int16_t* panel_a, std::int16_t* panel_b, float* c) {
  unpack(a, m, k, panel_a);
  unpack(b, n, k, panel_b);
  const std::int64_t width = padded(k, kLanes), tiles = block_count(m, kSide);
  for (std::int64_t first = 0; first < n; first += kPanel) {
    const std::int64_t end = std::min(n, first + kPanel);
#pragma omp parallel for schedule(static)
    for (std::int64_t tile = 0; tile < tiles; ++tile) {
      for (std::int64_t column = first; column < end; column += kSide) {
        std::int32_t sums[kSide][kSide];
        sum_tile(panel_a + tile * kSide * width, panel_b + column * width, width, sums);
        for (std::int64_t i = 0; i < std::min(kSide, m - tile * kSide); ++i)
          for (std::int64_t j = 0; j < std::min(kSide, end - column); ++j)
            c[(tile * kSide + i) * n + column + j] = static_cast<float>(sums[i][j]) * alpha;
      }
    }
  }
}

}  // namespace quern::cpu
