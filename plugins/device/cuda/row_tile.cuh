#pragma once
// Rows of 8-bit codes that a block keeps in shared memory until it has 16 or 32 of them: their transpose then leaves in
// pieces of 16 bytes, two to a sector of memory where 32 rows are kept. Words of four columns lie by rows, as threads
// that hold a row make them; rows 16 to 31 begin half the banks further on, so that lanes which read two pieces of 16
// columns' words at once meet in no bank.

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "byte_tile.cuh"

namespace quern::cuda {

/// Consecutive rows, of all `rows`, that a block takes at a time, where it has `teams` that take a row each. Of the
/// matrix alone: sums over rows have one order, whatever else a kernel writes. Few rows go round more blocks.
__host__ __device__ constexpr unsigned rows_at_once(unsigned teams, std::int64_t rows) {
  return teams >= 4 && rows >= 8192 ? 32 : 16;
}

/// The first of the rows that a block takes after those of `row`, where `blocks` share them by groups.
__host__ __device__ __forceinline__ std::int64_t next_rows(std::int64_t row, unsigned group, unsigned teams,
                                                           std::int64_t blocks) {
  row += teams;
  return row % group == 0 ? row + (blocks - 1) * group : row;
}

struct RowTile {
  std::uint32_t* word;
  int columns;
  int held;  ///< rows: a power of two, at least the block's teams and at most its group

  static constexpr std::size_t bytes(unsigned held, std::int64_t columns) {
    return static_cast<std::size_t>(held * pitch_of(columns) + (held > 16 ? 16 : 0)) * 4;
  }
  /// As many rows of a group as fit.
  static constexpr std::uint8_t most_rows(unsigned group, unsigned teams, std::int64_t columns, std::size_t room) {
    unsigned rows = group;
    while (rows > teams && bytes(rows, columns) > room) rows /= 2;
    return static_cast<std::uint8_t>(rows);
  }

  /// Codes of kWords words of a row (any of the matrix), from column `at` on, a multiple of 4 kWords.
  template <int kWords>
  __host__ __device__ __forceinline__ void put(std::int64_t row, int at, const std::uint32_t (&codes)[kWords]) const {
    static_assert(kWords == 1 || kWords == 2);
    if (at >= columns) return;
    std::uint32_t* to = word + place(static_cast<int>(row & (held - 1)), at / 4);
    if constexpr (kWords == 2)
      *reinterpret_cast<uint2*>(to) = make_uint2(codes[0], codes[1]);
    else
      *to = codes[0];
  }

  /// Whether the tile is to be emptied before row `end`, the first that is not in it; `rows` is how many there are.
  __host__ __device__ __forceinline__ bool full(std::int64_t end, std::int64_t rows) const {
    return (end & (held - 1)) == 0 || end >= rows;
  }

  /// This thread's part of writing the tile, which holds `any` row, into t (columns, rows).
  __host__ __device__ __forceinline__ void store(std::uint8_t* t, std::int64_t any, std::int64_t rows, int thread,
                                                 int threads) const {
    const std::int64_t row = any & ~static_cast<std::int64_t>(held - 1);
    if (held >= 16 && rows % 16 == 0 && reinterpret_cast<std::uintptr_t>(t) % 16 == 0) {
      const int upper = held / 32, pieces = (columns + 3) / 4 << upper;  // two pieces a word where 32 rows are held
      for (int i = thread; i < pieces; i += threads) {
        const int part = i & upper, column = (i >> upper) * 4;
        if (row + 16 * part >= rows) continue;
        uint4 piece[4];
        take(part, column / 4, piece);
        std::uint8_t* to = t + column * rows + row + 16 * part;
        for (int c = 0; c < 4; ++c)
          if (column + c < columns) *reinterpret_cast<uint4*>(to + c * rows) = piece[c];
      }
      return;
    }
    for (int i = thread; i < held * columns; i += threads) {
      const int local = i & (held - 1), column = i / held;
      if (row + local < rows)
        t[column * rows + row + local] =
            static_cast<std::uint8_t>(word[place(local, column / 4)] >> (8 * (column % 4)));
    }
  }

  /// Where word number `index` of a row lies.
  __host__ __device__ __forceinline__ int place(int row, int index) const {
    return row * pitch_of(columns) + (row & 16) + index;
  }

 private:
  /// Words of a row: even, so that two can be put at once.
  __host__ __device__ static constexpr int pitch_of(std::int64_t columns) {
    return static_cast<int>((columns + 7) / 8) * 2;
  }

  /// Rows [16 part, 16 part + 16) of four columns.
  __host__ __device__ __forceinline__ void take(int part, int index, uint4 (&piece)[4]) const {
    const std::uint32_t* from = word + place(16 * part, index);
    std::uint32_t turned[4][4];  // four rows each, by columns
    for (int group = 0; group < 4; ++group) {
      std::uint32_t row[4];
      for (int r = 0; r < 4; ++r) row[r] = from[(4 * group + r) * pitch_of(columns)];
      turn_bytes(row, turned[group]);
    }
    for (int c = 0; c < 4; ++c) piece[c] = make_uint4(turned[0][c], turned[1][c], turned[2][c], turned[3][c]);
  }
};

}  // namespace quern::cuda
