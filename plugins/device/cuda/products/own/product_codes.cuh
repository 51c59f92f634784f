#pragma once
// A Finish of products (product_wgmma.cuh) that ends in codes. Each thread rounds its sums to bf16 and makes values and
// codes of them in its registers, while the next tile is multiplied. The second operand is dealt, so that a thread has
// eight neighbours of a row at a time, a unit, and reads and writes packs. Shared memory, whose bandwidth the products
// need, is used for transposed codes alone.
//
//   Epilogue
//     struct Arguments { QuantizeArguments quantize; const float *scale_a, *scale_b; int rows, width; ... };
//     constexpr DType kFormat;               // of the codes
//     constexpr bool kTransposed;            // whether they are written so too
//     constexpr int kColumns;                // of a tile
//     constexpr int kWidth;                  // columns of the values that it is
//     constexpr int kParts;                  // of its work
//     void expect(arguments, place);         // a tile will be summed soon
//     void work(arguments, place, codes, units, part);

#include "primitives/scale.cuh"
#include "products/own/product_wgmma.cuh"
#include "quantization/tile_quantize.cuh"

namespace quern::cuda::product {

/// Where a thread's units are: of rows `row` and `row` + 8; of columns [32 g, 32 g + 32) of a tile those from
/// 32 g + column on. Unit 2 g is of the first row.
struct DealtPlace {
  int row, column;
};

/// The codes of units in e4m3 or e5m2 and their largest magnitude, without a branch, which would part the work of one
/// unit from that of the next.
template <DType kFormat>
class Codes {
 public:
  /// Of a warp in shared memory: a group's codes, 16 rows of 32 columns, the lower rows' 64 bytes on.
  static constexpr std::uint32_t kTurnedBytes = 4 * 128 + 64;

  __device__ __forceinline__ Codes(const QuantizeArguments& args, std::uint32_t memory)
      : quantizer_(args), memory_(memory + static_cast<std::uint32_t>(threadIdx.x) / 32 * kTurnedBytes) {
    const float inverse = quantizer_.inverse();  // a power of two: codes of products with it in bf16 are the same
    inverse_ = __floats2bfloat162_rn(inverse, inverse);
  }

  /// Values are zero where they are not inside.
  __device__ __forceinline__ uint2 write(const QuantizeArguments& to, const Eight<bf16>& values, std::int64_t at,
                                         bool inside) {
    float scaled[8];
    Eight<bf16> products;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const auto pair = reinterpret_cast<const __nv_bfloat162&>(values.pack[0].word[i]);
      most_ = __hmax2(most_, __habs2(pair));
      reinterpret_cast<__nv_bfloat162&>(products.pack[0].word[i]) = __hmul2(pair, inverse_);
    }
    unpack_eight(products, scaled);
    std::uint32_t words[2];
    encode_float8(scaled, kFormat, 1.0f, words);
    const uint2 codes = make_uint2(words[0], words[1]);
    if (inside && quantizer_.writes()) *reinterpret_cast<uint2*>(to.q + at) = codes;
    return codes;
  }

  /// Writes a group's codes, of the warp's upper and lower 8 rows, transposed: `t` is at its first row and column of
  /// (columns, rows). Pairs of columns are transposed as elements of 16 bits, and taken apart by two permutes; two
  /// lanes then have the 16 rows of two columns.
  __device__ __forceinline__ void write_transposed(std::uint8_t* t, std::int64_t rows, uint2 upper, uint2 lower,
                                                   bool inside) const {
    const std::uint32_t lane = threadIdx.x % 32;
    auto place = [&](std::uint32_t half, std::uint32_t word, std::uint32_t row) {
      return memory_ + (2 * half + word) * 128 + half * 64 + row * 16;
    };
    __syncwarp();  // the last group is read
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(
                     place(lane / 16, lane / 8 % 2, lane % 8)),
                 "r"(upper.x), "r"(upper.y), "r"(lower.x), "r"(lower.y)
                 : "memory");
    __syncwarp();
    const std::uint32_t half = lane % 2, word = lane / 16, row = lane / 2 % 8;
    const Pack<bf16> pairs = read_pack(place(half, word, row));
    std::uint8_t* to = t + (row / 2 * 8 + word * 4 + row % 2 * 2) * rows + half * 8;
    if (!inside || !quantizer_.writes()) return;
#pragma unroll
    for (std::uint32_t i = 0; i < 2; ++i) {
      const std::uint32_t bytes = i == 0 ? 0x6420 : 0x7531;
      *reinterpret_cast<uint2*>(to + i * rows) = make_uint2(__byte_perm(pairs.word[0], pairs.word[1], bytes),
                                                            __byte_perm(pairs.word[2], pairs.word[3], bytes));
    }
  }

  /// By all threads that multiply.
  __device__ void finish(const QuantizeArguments& args) {
    const float largest[2] = {__low2float(most_), __high2float(most_)};
    quantizer_.measure(args, largest);
    quantizer_.finish(args, static_cast<int>(threadIdx.x), [] {
      asm volatile("bar.sync 1, %0;" ::"n"(kMultiplying) : "memory");
    });
  }

 private:
  Quantizer<Formats::float8> quantizer_;
  std::uint32_t memory_;
  __nv_bfloat162 inverse_, most_ = __floats2bfloat162_rn(0.0f, 0.0f);
};

template <class Epilogue>
class InCodes {
 public:
  using OfCodes = Codes<Epilogue::kFormat>;
  using Memory = Shared<Epilogue::kColumns, 4, Epilogue::kTransposed ? 4 * kMultipliers * OfCodes::kTurnedBytes : 0>;
  using Arguments = typename Epilogue::Arguments;
  static constexpr int kWidth = Epilogue::kWidth, kParts = Epilogue::kParts;
  static constexpr bool kAssists = false;

  static __device__ bool idle(const Arguments& arguments) {
    return Quantizer<Formats::float8>(arguments.quantize).idle();
  }

  __device__ InCodes(const Arguments& arguments, const Memory& memory, int multiplier)
      : arguments_(arguments),
        codes_(arguments.quantize, memory.results()),
        factor_(*arguments.scale_a * *arguments.scale_b),
        multiplier_(multiplier) {}

  __device__ __forceinline__ void expect(const Item& item) { epilogue_.expect(arguments_, place_of(item)); }
  __device__ __forceinline__ void keep(const Item& item, const float (&sums)[Memory::kColumns / 2]) {
    place_ = place_of(item);
#pragma unroll
    for (int unit = 0; unit < kUnits; ++unit) {
      float eight[8];
#pragma unroll
      for (int i = 0; i < 8; ++i) eight[i] = sums[unit / 2 * 16 + i / 2 * 4 + unit % 2 * 2 + i % 2] * factor_;
      units_[unit] = round_eight<bf16>(eight);
    }
  }
  __device__ __forceinline__ void work(int part) { epilogue_.work(arguments_, place_, codes_, units_, part); }
  __device__ void end() { codes_.finish(arguments_.quantize); }

 private:
  static constexpr int kUnits = Epilogue::kColumns / 16;

  __device__ __forceinline__ DealtPlace place_of(const Item& item) const {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    return {item.row(multiplier_) + warp_row() + lane / 4, item.column * kWidth + lane % 4 * 8};
  }

  const Arguments& arguments_;
  OfCodes codes_;
  float factor_;
  int multiplier_;
  Eight<bf16> units_[kUnits] = {};
  DealtPlace place_{1 << 30, 0};  // before the first tile: outside
  Epilogue epilogue_;
};

}  // namespace quern::cuda::product
