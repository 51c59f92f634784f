#pragma once
// A tile of 128 x 128 bytes that is written by rows and read by columns: how 8-bit values are transposed on their way
// to memory. A thread of a block of 256 owns 4 rows by 16 columns; it turns them in registers, four rows to a word, and
// words are spread over the banks so that neither side waits for the other.

#include <cuda_runtime.h>

#include <cstdint>

namespace quern::cuda {

inline constexpr int kTileSide = 128, kTileThreads = 256;

/// Four bytes chosen from `low` (0 to 3) and `high` (4 to 7), one a nibble of `selector`.
__host__ __device__ __forceinline__ std::uint32_t pick_bytes(std::uint32_t low, std::uint32_t high,
                                                             std::uint32_t selector) {
#ifdef __CUDA_ARCH__
  return __byte_perm(low, high, selector);
#else
  const std::uint64_t bytes = std::uint64_t{high} << 32 | low;
  std::uint32_t word = 0;
  for (int i = 0; i < 4; ++i)
    word |= static_cast<std::uint32_t>(bytes >> (selector >> (4 * i) & 7) * 8 & 0xff) << (8 * i);
  return word;
#endif
}

/// Words of four columns in each of four rows become words of four rows in each of four columns.
__host__ __device__ __forceinline__ void turn_bytes(const std::uint32_t (&rows)[4], std::uint32_t (&columns)[4]) {
  const std::uint32_t upper_01 = pick_bytes(rows[0], rows[1], 0x5140), lower_01 = pick_bytes(rows[2], rows[3], 0x5140);
  const std::uint32_t upper_23 = pick_bytes(rows[0], rows[1], 0x7362), lower_23 = pick_bytes(rows[2], rows[3], 0x7362);
  columns[0] = pick_bytes(upper_01, lower_01, 0x5410);
  columns[1] = pick_bytes(upper_01, lower_01, 0x7632);
  columns[2] = pick_bytes(upper_23, lower_23, 0x5410);
  columns[3] = pick_bytes(upper_23, lower_23, 0x7632);
}

/// Column c's words, one a group of 4 rows, are in one line of 32; 16-byte pieces are exchanged by a mask of the
/// column: (c >> kShift) % 8, different for the eight lanes that write at once.
template <int kShift>
struct ByteTile {
  uint4 piece[kTileSide][8];

  __host__ __device__ __forceinline__ void put(int column, int row_group, std::uint32_t word) {
    const int at = row_group / 4 ^ (column >> kShift & 7);
    reinterpret_cast<std::uint32_t*>(&piece[column][at])[row_group % 4] = word;
  }
  /// Rows [16 part, 16 part + 16) of a column.
  __host__ __device__ __forceinline__ uint4 take(int column, int part) const {
    return piece[column][part ^ (column >> kShift & 7)];
  }
};

/// Which rows and columns of the tile a thread fills, and which it empties.
struct TileThread {
  __host__ __device__ __forceinline__ explicit TileThread(int thread)
      : lane(thread % 8), row_group(thread / 8), column(thread / 8), part(thread % 8) {}
  int lane;       ///< of the eight that share rows
  int row_group;  ///< rows [4 row_group, 4 row_group + 4)
  int column;     ///< columns column, column + 32, column + 64, column + 96 when emptying
  int part;       ///< their rows [16 part, 16 part + 16)
};

#ifdef __CUDACC__
/// Empties a tile into a matrix (columns, rows): the tile's corner is at (row, column) of its transpose. kWide: rows
/// are a multiple of 16, and t is at a 16-byte address.
template <bool kWide, int kShift>
__device__ __forceinline__ void store_columns(const ByteTile<kShift>& tile, const TileThread& thread, std::uint8_t* t,
                                              std::int64_t row, std::int64_t column, std::int64_t rows,
                                              std::int64_t columns) {
  const std::int64_t at = row + 16 * thread.part;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int local = thread.column + 32 * i;
    if (column + local >= columns || at >= rows) continue;
    const uint4 piece = tile.take(local, thread.part);
    std::uint8_t* to = t + (column + local) * rows + at;
    if constexpr (kWide) {
      *reinterpret_cast<uint4*>(to) = piece;
    } else {
      const std::uint32_t words[4] = {piece.x, piece.y, piece.z, piece.w};
#pragma unroll
      for (int b = 0; b < 16; ++b)
        if (at + b < rows) to[b] = static_cast<std::uint8_t>(words[b / 4] >> (8 * (b % 4)));
    }
  }
}
#endif

}  // namespace quern::cuda
