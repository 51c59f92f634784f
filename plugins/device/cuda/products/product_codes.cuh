#pragma once
// A Finish of products (product_wgmma.cuh) that ends in codes. Each thread rounds its sums to bf16 and makes values and
// codes of them in its registers, while the next tile is multiplied. The second operand is dealt, so that a thread has
// eight neighbours of a row at a time, a unit, and reads and writes packs; no shared memory is used, whose bandwidth
// the products need.
//
//   Epilogue
//     struct Arguments { QuantizeArguments quantize; const float *scale_a, *scale_b; int rows, width; ... };
//     constexpr DType kFormat;               // of the codes
//     constexpr int kColumns;                // of a tile
//     constexpr int kWidth;                  // columns of the values that it is
//     constexpr int kParts;                  // of its work
//     void expect(arguments, place);         // a tile will be summed soon
//     void work(arguments, place, codes, units, part);

#include "primitives/scale.cuh"
#include "products/product_wgmma.cuh"
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
  __device__ __forceinline__ explicit Codes(const QuantizeArguments& args) : quantizer_(args) {
    const float inverse = quantizer_.inverse();  // a power of two: products with it are exact in bf16 too
    inverse_ = __floats2bfloat162_rn(inverse, inverse);
  }
  __device__ __forceinline__ bool idle() const { return quantizer_.idle(); }

  /// Values are zero where they are not inside.
  __device__ __forceinline__ void write(const QuantizeArguments& to, const Eight<bf16>& values, std::int64_t at,
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
    constexpr auto kTo = kFormat == DType::e4m3 ? __NV_E4M3 : __NV_E5M2;
#pragma unroll
    for (int w = 0; w < 2; ++w)
      words[w] = __nv_cvt_float2_to_fp8x2(make_float2(scaled[4 * w], scaled[4 * w + 1]), __NV_SATFINITE, kTo) |
                 static_cast<std::uint32_t>(
                     __nv_cvt_float2_to_fp8x2(make_float2(scaled[4 * w + 2], scaled[4 * w + 3]), __NV_SATFINITE, kTo))
                     << 16;
    if (inside && quantizer_.writes()) *reinterpret_cast<uint2*>(to.q + at) = make_uint2(words[0], words[1]);
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
  __nv_bfloat162 inverse_, most_ = __floats2bfloat162_rn(0.0f, 0.0f);
};

template <class Epilogue>
class InCodes {
 public:
  using Memory = Shared<Epilogue::kColumns, 4, 0>;
  using Arguments = typename Epilogue::Arguments;
  using OfCodes = Codes<Epilogue::kFormat>;
  static constexpr int kWidth = Epilogue::kWidth, kParts = Epilogue::kParts;
  static constexpr bool kAssists = false;

  static __device__ bool idle(const Arguments& arguments) { return OfCodes(arguments.quantize).idle(); }

  __device__ InCodes(const Arguments& arguments, const Memory&, int multiplier)
      : arguments_(arguments),
        codes_(arguments.quantize),
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
