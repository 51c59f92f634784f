// The tile's index arithmetic, on the host: every byte that a thread puts by rows comes out by columns.
#include "primitives/byte_tile.cuh"

#include <vector>

#include <doctest/doctest.h>

using namespace quern::cuda;

namespace {

std::uint8_t code(int row, int column) { return static_cast<std::uint8_t>(31 * row + 7 * column + row / 8); }

template <int kShift, class ColumnOf>
void check_tile(ColumnOf column_of) {
  std::vector<ByteTile<kShift>> memory(1);
  ByteTile<kShift>& tile = memory[0];
  for (int thread = 0; thread < kTileThreads; ++thread) {
    const TileThread t(thread);
    for (int word = 0; word < 4; ++word) {
      const int first = column_of(t.lane, word);
      std::uint32_t rows[4] = {}, turned[4];
      for (int r = 0; r < 4; ++r)
        for (int i = 0; i < 4; ++i) rows[r] |= std::uint32_t{code(4 * t.row_group + r, first + i)} << (8 * i);
      turn_bytes(rows, turned);
      for (int i = 0; i < 4; ++i) tile.put(first + i, t.row_group, turned[i]);
    }
  }
  int wrong = 0;
  for (int thread = 0; thread < kTileThreads; ++thread) {
    const TileThread t(thread);
    for (int i = 0; i < 4; ++i) {
      const int column = t.column + 32 * i;
      const uint4 piece = tile.take(column, t.part);
      const std::uint32_t words[4] = {piece.x, piece.y, piece.z, piece.w};
      for (int b = 0; b < 16; ++b)
        wrong += static_cast<std::uint8_t>(words[b / 4] >> (8 * (b % 4))) != code(16 * t.part + b, column);
    }
  }
  CHECK(wrong == 0);
}

}  // namespace

TEST_CASE("a tile of bytes is turned, by threads of sixteen columns and of twice eight") {
  check_tile<4>([](int lane, int word) { return 16 * lane + 4 * word; });
  check_tile<3>([](int lane, int word) { return word / 2 * 64 + 8 * lane + word % 2 * 4; });
}

TEST_CASE("words that eight lanes of four row groups put at once are in different banks") {
  for (int shift : {3, 4}) {
    bool used[32] = {};
    for (int lane = 0; lane < 8; ++lane)
      for (int group = 0; group < 4; ++group) {
        const int column = lane << shift;
        used[4 * (group / 4 ^ (column >> shift & 7)) + group % 4] = true;
      }
    for (bool bank : used) CHECK(bank);
  }
}
