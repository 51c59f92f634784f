// matmul_swiglu_quantize_blocks and matmul_swiglu_grad_quantize_blocks: 8-bit GEMMs with scales for 128 elements
// of a row that quantize SwiGLU, or its gradient, row by row with such scales, and transposed with scales
// of 128 elements of a column. A tile of values is 128 of each: a row's scale is found by four lanes, a column's by
// both consumers.

#include "products/own/gemm_row_scales.cuh"
#include "products/swiglu/swiglu_blocks_form.cuh"

namespace quern::cuda {

using namespace gemm;

namespace {

__device__ __forceinline__ __nv_bfloat162 pair(const Pack<bf16>& pack, int i) {
  return reinterpret_cast<const __nv_bfloat162&>(pack.word[i]);
}

template <int kMade, DType kFormat>
class ToRowScales : public ToBlocks<ToRowScales<kMade, kFormat>, kMade, false> {
  using Base = ToBlocks<ToRowScales, kMade, false>;
  static constexpr std::uint32_t kLine = 2 * kScaleBlock;  ///< bytes of a row of the tile in bf16
  static constexpr std::uint32_t kBytes =
      kMade * (kConsumerThreads / 32) * kLine;  ///< of its warps' magnitudes of columns
  static constexpr std::uint32_t kInverses = Base::Turned::kShared + 2 * kBytes;  ///< of columns' scales, begin here

 public:
  static constexpr std::uint32_t kShared = kInverses + kConsumers * kMade * kLine;

  __device__ ToRowScales(const BlocksArguments& arguments, std::uint32_t shared)
      : Base(arguments, shared),
        magnitudes_(shared + Base::Turned::kShared),
        inverses_(shared + kInverses + this->consumer() * kMade * kLine) {}

  __device__ __forceinline__ void take(const ValueUnit& unit, int made, const Pack<bf16>& values) {
    this->keep(unit, made, values);
    const int row = unit.number % 2;
    if (unit.number < 2) most_[made][row] = __float2bfloat162_rn(0.0f);
    take_magnitudes(most_[made][row], values);
    if (row == 1) tell_columns(made, unit.number / 2);
  }

  __device__ __forceinline__ void complete() { this->tell_other(); }

  __device__ __forceinline__ void work(const UnitPlace& place, int part) {
    if (part == 0) find_scales(place);
    this->write(place, part, [&](int made, int group) {
      const Pack<bf16> of_columns = read_pack(inverses_ + made * kLine + group_line(group));
      typename Base::GroupValues codes;
#pragma unroll
      for (int row = 0; row < 2; ++row) {
        const Pack<bf16>& values = this->kept_[made][2 * group + row];
        codes.q[row] = codes_of<kFormat>(values, of_rows_[made][row]);
        codes.t[row] = codes_of<kFormat>(values, of_columns);
      }
      return codes;
    });
  }

 private:
  /// In a line, where this thread's eight columns of a group are.
  static __device__ __forceinline__ std::uint32_t group_line(int group) {
    return group * (2 * UnitPlace::kColumns) + threadIdx.x % 4 * 16;
  }
  __device__ __forceinline__ std::uint32_t magnitudes(int made, int warp) const {
    return magnitudes_ + this->turn_ * kBytes + (made * (kConsumerThreads / 32) + warp) * kLine;
  }

  /// The largest magnitudes of a group's columns in the warp's rows. Eight lanes have rows of the same columns: they
  /// halve what each looks after, until it is two columns.
  __device__ __forceinline__ void tell_columns(int made, int group) {
    __nv_bfloat162 most[4];
#pragma unroll
    for (int i = 0; i < 4; ++i)
      most[i] =
          __hmax2(__habs2(pair(this->kept_[made][2 * group], i)), __habs2(pair(this->kept_[made][2 * group + 1], i)));
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const __nv_bfloat162 left = halved(most[0], most[2], 4), right = halved(most[1], most[3], 4);
    __nv_bfloat162 two = halved(left, right, 8);
    two = __hmax2(two, __shfl_xor_sync(~0u, two, 16));
    two = __hmax2(two, __float2bfloat162_rn(0.0f));  // of NaNs alone
    if (lane < 16)
      asm volatile("st.shared.u32 [%0], %1;" ::"r"(magnitudes(made, static_cast<int>(threadIdx.x) / 32) +
                                                   group_line(group) + (lane & 4) * 2 + (lane & 8) / 2),
                   "r"(reinterpret_cast<const std::uint32_t&>(two))
                   : "memory");
  }
  /// Of two pairs that this lane and the one across `bit` have, the largest of the first, or, in the upper lane, of the
  /// second.
  static __device__ __forceinline__ __nv_bfloat162 halved(__nv_bfloat162 first, __nv_bfloat162 second, int bit) {
    const bool upper = (static_cast<int>(threadIdx.x) & bit) != 0;
    const __nv_bfloat162 other = __shfl_xor_sync(~0u, upper ? first : second, bit);
    return __hmax2(upper ? second : first, other);
  }

  __device__ __forceinline__ void find_scales(const UnitPlace& place) {
    this->wait_for_other();
#pragma unroll
    for (int made = 0; made < kMade; ++made) {
      find_column_scale(place, made);
      find_row_scales(place, made);
    }
    this->turned_.synchronize();
  }

  /// Of a column a thread, for its consumer; each consumer writes half of the columns' scales.
  __device__ __forceinline__ void find_column_scale(const UnitPlace& place, int made) {
    const int local = static_cast<int>(threadIdx.x) % 128, row = place.first_row() - this->consumer() * kHalfRows;
    std::uint32_t most = 0;
#pragma unroll
    for (int warp = 0; warp < kConsumerThreads / 32; ++warp) {
      std::uint16_t of_warp;
      asm volatile("ld.shared.u16 %0, [%1];" : "=h"(of_warp) : "r"(magnitudes(made, warp) + 2 * local) : "memory");
      most = max(most, std::uint32_t{of_warp});
    }
    const float scale = format_scale(__uint_as_float(most << 16), kFormat);
    asm volatile("st.shared.u16 [%0], %1;" ::"r"(inverses_ + made * kLine + 2 * local),
                 "h"(static_cast<std::uint16_t>(__float_as_uint(inverse_power(scale)) >> 16))
                 : "memory");
    const BlocksArguments& a = this->a_;
    if (a.t_scale != nullptr && local / kHalfRows == this->consumer() && row < a.rows)
      this->write_column_scale(row, place.column / kDealtRows * kDealtRows + made * a.width + local, scale);
  }

  /// Of this thread's two rows, of which four lanes have the columns.
  __device__ __forceinline__ void find_row_scales(const UnitPlace& place, int made) {
    const __nv_bfloat162 upper = most_[made][0], lower = most_[made][1];
    __nv_bfloat162 rows = __hmax2(__lows2bfloat162(upper, lower), __highs2bfloat162(upper, lower));
#pragma unroll
    for (int lanes = 1; lanes < 4; lanes *= 2) rows = __hmax2(rows, __shfl_xor_sync(~0u, rows, lanes));
    const float2 scales = {format_scale(__low2float(rows), kFormat), format_scale(__high2float(rows), kFormat)};
    of_rows_[made][0] = __float2bfloat162_rn(inverse_power(scales.x));
    of_rows_[made][1] = __float2bfloat162_rn(inverse_power(scales.y));
    const BlocksArguments& a = this->a_;
    if (a.scale != nullptr && threadIdx.x % 4 == 0 && place.row < a.rows)
      *reinterpret_cast<float2*>(a.scale + (place.column + made * a.width) / kScaleBlock * std::int64_t{a.rows} +
                                 place.row) = scales;
  }

  const std::uint32_t magnitudes_, inverses_;
  __nv_bfloat162 most_[kMade][2] = {}, of_rows_[kMade][2] = {};
};

template <DType kFormat>
Launch prepare(const OpInstance& op, CudaContext& context, QuantizedForm form) {
  using Mainloop = RowScalesMainloop<OfFloat8<kFormat, DType::e4m3>>;
  if constexpr (kFormat == DType::e4m3)
    if (!form.gradient)
      return prepare_blocks_matmul<Mainloop, SwigluBlocks<ToRowScales<1, kFormat>>>(op, context, form);
  return prepare_blocks_matmul<Mainloop, SwigluGradBlocks<ToRowScales<2, kFormat>>>(op, context, form);
}

}  // namespace

void add_swiglu_row_scales_ops(OpTable& table) {
  for (const bool gradient : {false, true}) {
    const QuantizedForm form{gradient};
    table[gradient ? "matmul_swiglu_grad_quantize_blocks" : "matmul_swiglu_quantize_blocks"] = {
        [form](const OpInstance& op, CudaContext& context) {
          return (op.inputs[0].dtype == DType::e5m2 ? prepare<DType::e5m2> : prepare<DType::e4m3>)(op, context, form);
        },
        [form](const OpInstance& op, const CudaTraits& gpu) { return query_blocks_matmul(op, gpu, form); }};
  }
}

}  // namespace quern::cuda
