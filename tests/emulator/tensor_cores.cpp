// Matmuls of tensor cores: wgmma of tiles in shared memory with the 128-byte swizzle (ISA, "Asynchronous Warpgroup
// Level Matrix Instructions"), and mma of registers. A warp has 16 rows of the result. Accumulators of floats are fp32.
//
// A wgmma's result is there at once, since PTX copies sums from register to register before anybody waits. What it
// reads counts as being read until its group was waited for.
#include <cstring>

#include "emulator/machine.h"
#include "emulator/registers.h"
#include "quern/numeric.h"

namespace quern::emulator {

namespace {

enum Type { of_bf16, of_e4m3, of_e5m2, of_s8, of_f16 };

int type_named(const std::string& name) {
  const char* const names[] = {"bf16", "e4m3", "e5m2", "s8", "f16"};
  for (int type = 0; type < 5; ++type)
    if (name == names[type]) return type;
  stop("tensor cores are not known to multiply " + name);
}
int bytes_of(int type) { return type == of_bf16 || type == of_f16 ? 2 : 1; }

float decoded(const std::uint8_t* at, int type) {
  struct Table {
    float of[5][256];
    Table() {
      for (int code = 0; code < 256; ++code) {
        const auto bits = static_cast<std::uint8_t>(code);
        of[of_e4m3][code] = e4m3_to_float(bits);
        of[of_e5m2][code] = e5m2_to_float(bits);
        of[of_s8][code] = static_cast<std::int8_t>(bits);
      }
    }
  };
  static const Table kTable;
  if (bytes_of(type) == 1) return kTable.of[type][*at];
  std::uint16_t bits;
  std::memcpy(&bits, at, sizeof bits);
  if (type == of_bf16) return bf16_to_float(bits);
  return from_half(bits);
}

constexpr int kRows = 16, kDepthBytes = 32, kPiece = 16;
using Line = float[kDepthBytes];  ///< along the sum

/// sums = [sums +] a line by a line.
std::uint64_t added(std::uint64_t sum, bool add, const Line& a, const Line& b, int depth, int type) {
  constexpr int kLanes = 8;
  float partial[kLanes] = {};  // of whole numbers: exact
  for (int k = 0; k < depth; k += kLanes)
    for (int lane = 0; lane < kLanes; ++lane) partial[lane] += a[k + lane] * b[k + lane];
  float product = 0;
  for (const float sum : partial) product += sum;
  if (type == of_s8)
    return static_cast<std::uint32_t>((add ? static_cast<std::int32_t>(sum) : 0) + static_cast<std::int32_t>(product));
  float total = 0;
  if (add) std::memcpy(&total, &sum, sizeof total);
  total += product;
  std::uint64_t bits = 0;
  std::memcpy(&bits, &total, sizeof total);
  return bits;
}

/// Rows that lanes have of A in registers: rows lane / 4 and 8 more, four bytes along the sum from 4 (lane % 4) on and
/// 16 further.
void take_registers(Line (&lines)[kRows], const Warp& warp, const int* registers, int count, int type) {
  const int bytes = bytes_of(type);
  for (int lane = 0; lane < 32; ++lane)
    for (int k = 0; k < count; ++k) {
      const auto word = static_cast<std::uint32_t>(warp.lanes[static_cast<std::size_t>(lane)]->registers[registers[k]]);
      std::uint8_t codes[4];
      std::memcpy(codes, &word, sizeof codes);
      for (int at = 0; at < 4; at += bytes)
        lines[lane / 4 + 8 * (k % 2)][(4 * (lane % 4) + 16 * (k / 2) + at) / bytes] = decoded(codes + at, type);
    }
}

/// A tile in shared memory, as a descriptor says.
class Tile {
 public:
  Tile(Warp& warp, const Instruction& i, int descriptor, int type, bool across)
      : warp_(warp), i_(i), type_(type), across_(across) {
    const std::uint64_t bits = warp.lanes[0]->registers[descriptor];
    for (const Thread* lane : warp.lanes)
      if (lane->registers[descriptor] != bits) stop("lanes describe different tiles: " + i.text);
    if (bits >> 62 != 1) stop("a tile without the 128-byte swizzle: " + i.text);
    auto field = [bits](int shift) { return static_cast<std::uint32_t>(bits >> shift & 0x3fff) << 4; };
    start_ = field(0);
    leading_ = field(16);
    stride_ = field(32);
  }

  /// A row of A or column of B.
  void take(Line& line, int number) {
    const int bytes = bytes_of(type_), step = across_ ? bytes : kPiece;
    for (int at = 0; at < kDepthBytes; at += step) {
      const std::uint32_t address = place(number, at / bytes), piece = address / kPiece * kPiece;
      if (piece < kSharedBegin || piece + kPiece > warp_.block->memory.size()) stop("a tile out of bounds: " + i_.text);
      if (!across_ || number % 8 == 0) read({piece, kPiece});
      for (int element = 0; element < step; element += bytes)
        line[(at + element) / bytes] = decoded(warp_.block->memory.data() + address + element, type_);
    }
  }

 private:
  std::uint32_t place(int number, int depth) const {
    const auto n = static_cast<std::uint32_t>(number), k = static_cast<std::uint32_t>(depth);
    const std::uint32_t at =
        across_ ? start_ + n / 64 * leading_ + k / 8 * stride_ + k % 8 * 128 + n % 64 * 2
                : start_ + n / 8 * stride_ + n % 8 * 128 + k * static_cast<std::uint32_t>(bytes_of(type_));
    return at ^ (at >> 7 & 7) << 4;
  }
  void read(Range range) {
    Block& block = *warp_.block;
    block.races->read(range, warp_.access(i_.text));
    block.races->check_fenced(range, block.fenced, i_.text);
    block.races->hold(range);
    warp_.open.push_back(range);
  }

  Warp& warp_;
  const Instruction& i_;
  int type_;
  bool across_;
  std::uint32_t start_ = 0, leading_ = 0, stride_ = 0;
};

enum Across { a_across = 1, b_across = 2 };

/// sums [+]= A B; count columns; mode: Across; type: of A, and of B times eight; extra: whether sums are added to.
void multiply_tiles(Warp& warp, const Instruction& i) {
  const int type_a = i.type % 8, type_b = i.type / 8, depth = kDepthBytes / bytes_of(type_a);
  const bool add = warp.lanes[0]->registers[i.extra] != 0;
  for (const Thread* lane : warp.lanes)
    if ((lane->registers[i.extra] != 0) != add) stop("some lanes add: " + i.text);
  Line a[kRows];
  if (!i.operands.empty()) {
    take_registers(a, warp, i.operands.data(), 4, type_a);
  } else {
    Tile tile(warp, i, i.a, type_a, (i.mode & a_across) != 0);
    for (int row = 0; row < kRows; ++row) tile.take(a[row], warp.number % 4 * kRows + row);
  }
  Tile tile(warp, i, i.b, type_b, (i.mode & b_across) != 0);
  for (int column = 0; column < i.count; ++column) {
    Line b;
    tile.take(b, column);
    for (int row = 0; row < kRows; ++row) {
      const auto lane = static_cast<std::size_t>(row % 8 * 4 + column % 8 / 2);
      const auto sum = static_cast<std::size_t>(column / 8 * 4 + row / 8 * 2 + column % 2);
      std::uint64_t& at = warp.lanes[lane]->registers[i.values[sum]];
      at = added(at, add, a[row], b, depth, type_a);
    }
  }
}

/// d = c + A B of 16 x 8; operands: A, B, c.
void multiply_registers(Warp& warp, const Instruction& i) {
  const int type_a = i.type % 8, type_b = i.type / 8;
  Line a[kRows], b[kRows];
  take_registers(a, warp, i.operands.data(), 4, type_a);
  const int columns[] = {i.operands[4], i.operands[4], i.operands[5], i.operands[5]};  // eight of them, not sixteen
  take_registers(b, warp, columns, 4, type_b);
  for (int lane = 0; lane < 32; ++lane)
    for (int k = 0; k < 4; ++k) {
      std::uint64_t* r = warp.lanes[static_cast<std::size_t>(lane)]->registers;
      const auto at = static_cast<std::size_t>(k);
      r[i.values[at]] = added(r[i.operands[6 + at]], true, a[lane / 4 + 8 * (k / 2)], b[2 * (lane % 4) + k % 2],
                              kDepthBytes / bytes_of(type_a), type_a);
    }
}

void commit(Warp& warp, const Instruction&) {
  warp.groups.push_back(std::move(warp.open));
  warp.open.clear();
}

/// For all groups but the last `count`.
void wait(Warp& warp, const Instruction& i) {
  while (static_cast<int>(warp.groups.size()) > i.count) {
    for (const Range& range : warp.groups.front()) warp.block->races->done(range, warp.unit(), warp.clock());
    warp.groups.erase(warp.groups.begin());
  }
}

void nothing(Warp&, const Instruction&) {}

}  // namespace

bool decode_tensor_core(Instruction& i, const Words& name, const Words& operands, Operands& of) {
  if (name[0] == "wgmma") {
    i.step = Step::together;
    if (name[1] == "fence") {
      i.run_warp = nothing;
    } else if (name[1] == "commit_group") {
      i.run_warp = commit;
    } else if (name[1] == "wait_group") {
      i.run_warp = wait;
      i.count = std::atoi(operands[0].c_str());
    } else {
      i.run_warp = multiply_tiles;
      i.values = of.places(operands[0]);
      i.count = 2 * static_cast<int>(i.values.size());
      i.type = type_named(name[name.size() - 2]) + 8 * type_named(name.back());
      const bool registers = operands[1][0] == '{';
      if (registers)
        i.operands = of.places(operands[1]);
      else
        i.a = of.place(operands[1]);
      i.b = of.place(operands[2]);
      i.extra = of.place(operands[3]);
      // Behind the two factors of signs: whether A, where it is in memory, and B are not K-major.
      auto across = [&](std::size_t at, int which) { return at < operands.size() && operands[at] == "1" ? which : 0; };
      i.mode = registers ? across(6, b_across) : across(6, a_across) | across(7, b_across);
    }
    return true;
  }
  if (name[0] == "mma" && name[1] == "sync") {
    i.step = Step::together;
    i.run_warp = multiply_registers;
    i.values = of.places(operands[0]);
    i.values_written = true;
    for (std::size_t k = 1; k < 4; ++k)
      for (const int place : of.places(operands[k])) i.operands.push_back(place);
    if (i.operands.size() != 10) stop("not 16 x 8 with a depth of 32 bytes: " + i.text);
    i.type = type_named(name[name.size() - 3]) + 8 * type_named(name[name.size() - 2]);
    return true;
  }
  return false;
}

}  // namespace quern::emulator
