// The tile's index arithmetic, on the host: a grid of blocks that take rows by groups and empty the tile when it is
// full leaves the transpose of all codes, and nothing beside it.
#include "row_tile.cuh"

#include <algorithm>
#include <vector>

#include <doctest/doctest.h>

using namespace quern::cuda;

namespace {

/// Threads that share a row, rows of a block's step, packs of a thread.
struct Shape {
  int team, teams, packs;
};

std::uint8_t code(std::int64_t row, std::int64_t column) {
  return static_cast<std::uint8_t>(31 * row + 7 * column + row / 8 + column / 256);
}
constexpr std::uint8_t kPoison = 0xA5;

/// One step of a block: every thread's packs of kWords words.
template <int kWords>
void put_rows(const RowTile& tile, const Shape& shape, std::int64_t base, std::int64_t rows) {
  for (std::int64_t row = base; row < base + shape.teams; ++row) {
    for (int pack = 0; pack < shape.team * shape.packs; ++pack) {
      const int at = pack * 4 * kWords;
      std::uint32_t words[kWords] = {};
      for (int i = 0; i < 4 * kWords; ++i)
        if (row < rows && at + i < tile.columns) words[i / 4] |= std::uint32_t{code(row, at + i)} << (8 * (i % 4));
      tile.put(row, at, words);
    }
  }
}

/// How many bytes differ from the transpose, or from what was there outside of it.
template <int kWords>
int wrong_bytes(const Shape& shape, std::int64_t rows, int columns, unsigned group, int held, std::int64_t blocks,
                int shift) {
  std::vector<uint4> memory((RowTile::bytes(static_cast<unsigned>(held), columns) + 15) / 16);
  const RowTile tile{reinterpret_cast<std::uint32_t*>(memory.data()), columns, held};
  const std::int64_t count = rows * columns, pad = 16 + shift;
  std::vector<uint4> result(static_cast<std::size_t>(count + 63) / 16);
  auto* bytes = reinterpret_cast<std::uint8_t*>(result.data());
  std::fill_n(bytes, 16 * result.size(), kPoison);
  const auto teams = static_cast<unsigned>(shape.teams);
  const int threads = shape.team * shape.teams;
  for (std::int64_t block = 0; block < blocks; ++block) {
    for (std::int64_t base = block * group; base < rows; base = next_rows(base, group, teams, blocks)) {
      put_rows<kWords>(tile, shape, base, rows);
      if (!tile.full(base + shape.teams, rows)) continue;
      for (int thread = 0; thread < threads; ++thread) tile.store(bytes + pad, base, rows, thread, threads);
    }
  }
  int wrong = 0;
  for (std::int64_t i = 0; i < static_cast<std::int64_t>(16 * result.size()); ++i) {
    const std::int64_t at = i - pad;
    wrong += bytes[i] != (at >= 0 && at < count ? code(at % rows, at / rows) : kPoison);
  }
  return wrong;
}

}  // namespace

TEST_CASE("blocks that take rows by groups write their codes' transpose, whatever the number of rows") {
  for (std::int64_t rows : {1, 15, 16, 31, 32, 33, 48, 200, 256}) {
    for (std::int64_t blocks : {1, 2, 5}) {
      for (int shift : {0, 1}) {
        CAPTURE(rows);
        CAPTURE(blocks);
        CAPTURE(shift);
        CHECK(wrong_bytes<2>({32, 8, 1}, rows, 8, 32, 32, blocks, shift) == 0);
        CHECK(wrong_bytes<2>({32, 8, 1}, rows, 17, 32, 32, blocks, shift) == 0);
        CHECK(wrong_bytes<2>({32, 8, 4}, rows, 896, 32, 32, blocks, shift) == 0);
        CHECK(wrong_bytes<1>({64, 4, 4}, rows, 1000, 32, 32, blocks, shift) == 0);
        CHECK(wrong_bytes<2>({64, 4, 4}, rows, 1001, 32, 16, blocks, shift) == 0);
        CHECK(wrong_bytes<2>({128, 2, 4}, rows, 3584, 16, 16, blocks, shift) == 0);
        CHECK(wrong_bytes<1>({128, 1, 8}, rows, 4094, 16, 16, blocks, shift) == 0);
        CHECK(wrong_bytes<2>({128, 1, 8}, rows, 4100, 16, 4, blocks, shift) == 0);
      }
    }
  }
}

TEST_CASE("a tile holds a whole group of rows where they fit, and fewer of long rows") {
  constexpr std::size_t kRoom = 226 << 10, kSmallRoom = 98 << 10;
  CHECK(RowTile::most_rows(32, 8, 896, kSmallRoom) == 32);
  CHECK(RowTile::most_rows(32, 4, 2048, kSmallRoom) == 32);
  CHECK(RowTile::most_rows(16, 2, 3584, kSmallRoom) == 16);
  CHECK(RowTile::most_rows(16, 1, 5120, kSmallRoom) == 16);
  CHECK(RowTile::most_rows(16, 1, 14336, kRoom) == 16);
  CHECK(RowTile::most_rows(16, 1, 32768, kRoom) == 4);
  CHECK(RowTile::most_rows(16, 1, 32768, kSmallRoom) == 2);
}

TEST_CASE("lanes that take pieces of a tile at once read different banks") {
  for (int columns : {8, 896, 1001, 2048, 3584}) {
    for (int held : {16, 32}) {
      const RowTile tile{nullptr, columns, held};
      bool used[32] = {};
      for (int lane = 0; lane < 32; ++lane)
        used[(held == 32 ? tile.place(lane % 2 * 16 + 3, lane / 2) : tile.place(3, lane)) % 32] = true;
      for (bool bank : used) CHECK(bank);
    }
  }
}
