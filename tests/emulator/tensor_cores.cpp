// Matmuls of tensor cores: wgmma of tiles in shared memory with the 128-byte swizzle (ISA, "Asynchronous Warpgroup
// Level Matrix Instructions"), and mma of registers. A warp has 16 rows of the result. Accumulators of floats are fp32.
//
// A wgmma's result is there at once, since PTX copies sums from register to register before anybody waits. What it
// reads counts as being read until its group was waited for.
#include <cstring>

#include "device/cpu/primitives/simd.h"
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

const float (&codes_of(int type))[256] {
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
  return kTable.of[type];
}

/// As many elements as `bytes` hold.
void decode_elements(float* to, const std::uint8_t* from, int bytes, int type) {
  if (bytes_of(type) == 1) {
    const auto& codes = codes_of(type);
    for (int k = 0; k < bytes; ++k) to[k] = codes[from[k]];
    return;
  }
  for (int k = 0; k < bytes / 2; ++k) {
    std::uint16_t bits;
    std::memcpy(&bits, from + 2 * k, sizeof bits);
    to[k] = type == of_bf16 ? bf16_to_float(bits) : from_half(bits);
  }
}

constexpr int kRows = 16, kDepthBytes = 32, kPiece = 16, kMostColumns = 256, kWide = 8;
using Line = float[kDepthBytes];  ///< along the sum

using Columns = float[kDepthBytes][kWide];  ///< eight of B beside each other

/// A by rows, and its matmul with B.
struct Product {
  Line a[kRows];
  alignas(32) float result[kRows][kMostColumns];
};

}  // namespace

/// The last tile of B, decoded, by its bytes: the warps of a group multiply by the same one.
struct TakenTile {
  int type = -1, count = 0;
  bool across = false;
  std::uint8_t bytes[kMostColumns * kDepthBytes];
  alignas(32) Columns b[kMostColumns / kWide];
};

namespace {

/// Sums of every eighth term, then of these: one order for all instructions.
QUERN_CPU_CLONES void multiply(Product& product, const Columns* b, int columns, int depth) {
  typedef float Wide __attribute__((vector_size(4 * kWide)));
  for (const Line& a : product.a)
    for (int column = 0; column < columns; column += kWide) {
      Wide partial[8] = {};
      for (int k = 0; k < depth; k += 8)
        for (int lane = 0; lane < 8; ++lane)
          partial[lane] += a[k + lane] * *reinterpret_cast<const Wide*>(b[column / kWide][k + lane]);
      Wide sum = {};
      for (const Wide& part : partial) sum += part;
      *reinterpret_cast<Wide*>(&product.result[&a - product.a][column]) = sum;
    }
}

/// [sum +] `product`. Of whole numbers, which are exact.
std::uint64_t added(std::uint64_t sum, bool add, float product, int type) {
  if (type == of_s8)
    return static_cast<std::uint32_t>((add ? static_cast<std::int32_t>(sum) : 0) + static_cast<std::int32_t>(product));
  return bits_of((add ? get<float>(sum) : 0.0f) + product);
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
      decode_elements(&lines[lane / 4 + 8 * (k % 2)][(4 * (lane % 4) + 16 * (k / 2)) / bytes], codes, 4, type);
    }
}

/// A tile in shared memory, as a descriptor says.
class Tile {
 public:
  Tile(Warp& warp, const Instruction& i, int descriptor, int type, bool across)
      : warp_(warp), i_(i), type_(type), across_(across) {
    const std::uint64_t bits = warp.lanes[0]->registers[descriptor];
    for (const Thread* lane : warp.lanes)
      if (lane->registers[descriptor] != bits) stop(std::string("lanes describe different tiles: ") + i.text);
    if (bits >> 62 != 1) stop(std::string("a tile without the 128-byte swizzle: ") + i.text);
    auto field = [bits](int shift) { return static_cast<std::uint32_t>(bits >> shift & 0x3fff) << 4; };
    start_ = field(0);
    leading_ = field(16);
    stride_ = field(32);
  }

  /// Rows of A or columns of B, in pieces of 16 bytes.
  void read_bytes(int first, int count, std::uint8_t* to) {
    const std::vector<std::uint8_t>& memory = warp_.block->memory;
    for_each_piece(first, count, [&](int n, int k) {
      const std::uint32_t address = place(n, k);
      if (address < kSharedBegin || address + kPiece > memory.size())
        stop(std::string("a tile out of bounds: ") + i_.text);
      read({address, kPiece});
      std::memcpy(to, memory.data() + address, kPiece);
      to += kPiece;
    });
  }

  /// at(number, depth) takes each element of what read_bytes gave.
  template <class At>
  void decode(int first, int count, const std::uint8_t* from, At at) {
    const int each = kPiece / bytes_of(type_);
    for_each_piece(first, count, [&](int n, int k) {
      float values[kPiece];
      decode_elements(values, from, kPiece, type_);
      for (int element = 0; element < each; ++element)
        if (across_)
          at(n + element, k) = values[element];
        else
          at(n, k + element) = values[element];
      from += kPiece;
    });
  }

  /// B, which stays until the block's next tile of other bytes.
  const Columns* columns(int count) {
    std::shared_ptr<TakenTile>& tile = warp_.block->taken;
    if (!tile) tile = std::make_shared<TakenTile>();
    const auto size = static_cast<std::size_t>(count) * kDepthBytes;
    std::uint8_t bytes[sizeof tile->bytes];
    read_bytes(0, count, bytes);
    if (tile->type != type_ || tile->count != count || tile->across != across_ ||
        std::memcmp(tile->bytes, bytes, size) != 0) {
      decode(0, count, bytes, [&](int column, int k) -> float& { return tile->b[column / kWide][k][column % kWide]; });
      tile->type = type_;
      tile->count = count;
      tile->across = across_;
      std::memcpy(tile->bytes, bytes, size);
    }
    return tile->b;
  }

 private:
  template <class F>
  void for_each_piece(int first, int count, F f) const {
    const int each = kPiece / bytes_of(type_), wide = across_ ? each : 1, deep = across_ ? 1 : each;
    for (int n = first; n < first + count; n += wide)
      for (int k = 0; k < kDepthBytes / bytes_of(type_); k += deep) f(n, k);
  }
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
  const int type_a = i.type % 8, type_b = i.type / 8;
  const bool add = warp.lanes[0]->registers[i.extra] != 0;
  for (const Thread* lane : warp.lanes)
    if ((lane->registers[i.extra] != 0) != add) stop(std::string("some lanes add: ") + i.text);
  Product product;
  if (!i.operands.empty()) {
    take_registers(product.a, warp, i.operands.data(), 4, type_a);
  } else {
    const int first = warp.number % 4 * kRows;
    std::uint8_t bytes[kRows * kDepthBytes];
    Tile tile(warp, i, i.a, type_a, (i.mode & a_across) != 0);
    tile.read_bytes(first, kRows, bytes);
    tile.decode(first, kRows, bytes, [&](int row, int k) -> float& { return product.a[row - first][k]; });
  }
  const Columns* b = Tile(warp, i, i.b, type_b, (i.mode & b_across) != 0).columns(i.count);
  multiply(product, b, i.count, kDepthBytes / bytes_of(type_a));
  for (int lane = 0; lane < 32; ++lane) {
    std::uint64_t* const r = warp.lanes[static_cast<std::size_t>(lane)]->registers;
    const int* place = i.values.data();
    for (int column = lane % 4 * 2; column < i.count; column += 8)  // of each eight columns two, of two rows
      for (const int row : {lane / 4, lane / 4 + 8})
        for (const int beside : {0, 1}) {
          std::uint64_t& at = r[*place++];
          at = added(at, add, product.result[row][column + beside], type_a);
        }
  }
}

/// d = c + A B of 16 x 8; operands: A, B, c.
void multiply_registers(Warp& warp, const Instruction& i) {
  const int type_a = i.type % 8, type_b = i.type / 8, depth = kDepthBytes / bytes_of(type_a);
  Product product;
  Line rows[kRows];
  alignas(32) Columns b;
  take_registers(product.a, warp, i.operands.data(), 4, type_a);
  const int columns[] = {i.operands[4], i.operands[4], i.operands[5], i.operands[5]};  // eight of them, not sixteen
  take_registers(rows, warp, columns, 4, type_b);
  for (int k = 0; k < depth; ++k)
    for (int column = 0; column < kWide; ++column) b[k][column] = rows[column][k];
  multiply(product, &b, 8, depth);
  for (int lane = 0; lane < 32; ++lane)
    for (int k = 0; k < 4; ++k) {
      std::uint64_t* r = warp.lanes[static_cast<std::size_t>(lane)]->registers;
      const auto at = static_cast<std::size_t>(k);
      r[i.values[at]] =
          added(r[i.operands[6 + at]], true, product.result[lane / 4 + 8 * (k / 2)][2 * (lane % 4) + k % 2], type_a);
    }
}

void commit(Warp& warp, const Instruction&) {
  warp.groups.push_back(std::move(warp.open));
  warp.open.clear();
}

/// For all groups but the last `count`.
void wait(Warp& warp, const Instruction& i) {
  while (static_cast<int>(warp.groups.size()) > i.count) {
    for (const Range& range : warp.groups.front()) warp.block->races->done(range, warp.access(i.text));
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
    if (i.operands.size() != 10) stop(std::string("not 16 x 8 with a depth of 32 bytes: ") + i.text);
    i.type = type_named(name[name.size() - 3]) + 8 * type_named(name[name.size() - 2]);
    return true;
  }
  return false;
}

}  // namespace quern::emulator
