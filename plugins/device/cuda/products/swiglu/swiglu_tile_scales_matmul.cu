// matmul_swiglu_quantize_squares and matmul_swiglu_grad_quantize_squares: GEMMs of operands with scales of 128 x 128
// elements that quantize SwiGLU, or its gradient, with such scales. A tile of values is a square, whose
// scale both consumers find together.

#include "products/own/gemm_tile_scales.cuh"
#include "products/swiglu/swiglu_blocks_form.cuh"

namespace quern::cuda {

using namespace gemm;

namespace {

template <int kMade, bool kWritesValues, DType kFormat>
class ToTileScales : public ToBlocks<ToTileScales<kMade, kWritesValues, kFormat>, kMade, kWritesValues> {
  using Base = ToBlocks<ToTileScales, kMade, kWritesValues>;
  static constexpr std::uint32_t kBytes = 4 * kConsumerThreads / 32;  ///< of its warps' magnitudes

 public:
  static constexpr std::uint32_t kShared = Base::Turned::kShared + 2 * kMade * kBytes;

  __device__ ToTileScales(const BlocksArguments& arguments, std::uint32_t shared)
      : Base(arguments, shared), magnitudes_(shared + Base::Turned::kShared) {}

  __device__ __forceinline__ void take(const ValueUnit& unit, int made, const Pack<bf16>& values) {
    take_magnitudes(most_[made], values);
    this->keep(unit, made, values);
  }

  __device__ __forceinline__ void complete() {
#pragma unroll
    for (int made = 0; made < kMade; ++made) {
      const float most = fmaxf(__low2float(most_[made]), __high2float(most_[made]));
      const std::uint32_t of_warp = __reduce_max_sync(~0u, __float_as_uint(most));
      if (threadIdx.x % 32 == 0)
        asm volatile("st.shared.u32 [%0], %1;" ::"r"(magnitudes(made) + threadIdx.x / 32 * 4), "r"(of_warp) : "memory");
      most_[made] = __float2bfloat162_rn(0.0f);
    }
    this->tell_other();
  }

  __device__ __forceinline__ void work(const UnitPlace& place, int part) {
    if (part == 0) find_scales(place);
    this->write(place, part, [&](int made, int group) {
      const uint2 upper = codes_of<kFormat>(this->kept_[made][2 * group], inverse_[made]),
                  lower = codes_of<kFormat>(this->kept_[made][2 * group + 1], inverse_[made]);
      return typename Base::GroupValues{{upper, lower}, {upper, lower}};
    });
  }

 private:
  __device__ __forceinline__ std::uint32_t magnitudes(int made) const {
    return magnitudes_ + (this->turn_ * kMade + made) * kBytes;
  }

  __device__ __forceinline__ void find_scales(const UnitPlace& place) {
    this->wait_for_other();
#pragma unroll
    for (int made = 0; made < kMade; ++made) {
      std::uint32_t most = 0;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const Pack<bf16> four = read_pack(magnitudes(made) + half * 16);
#pragma unroll
        for (const std::uint32_t word : four.word) most = max(most, word);
      }
      const float scale = format_scale(__uint_as_float(most), kFormat);
      inverse_[made] = __float2bfloat162_rn(inverse_power(scale));
      write_scale(place, made, scale);
    }
  }

  /// In the places of its rows and of its columns: a consumer writes its rows' scales, and of half of the columns.
  __device__ __forceinline__ void write_scale(const UnitPlace& place, int made, float scale) const {
    const BlocksArguments& a = this->a_;
    const int thread = static_cast<int>(threadIdx.x) % 128, row = place.first_row();
    const int column = place.column / kDealtRows * kDealtRows + made * a.width;
    if (thread < kHalfRows) {
      if (a.scale != nullptr && row + thread < a.rows) a.scale[column / kScaleBlock * a.rows + row + thread] = scale;
    } else if (a.t_scale != nullptr && row - this->consumer() * kHalfRows < a.rows) {
      this->write_column_scale(row, column + this->consumer() * kHalfRows + thread - kHalfRows, scale);
    }
  }

  const std::uint32_t magnitudes_;  ///< where the first ones are
  __nv_bfloat162 most_[kMade] = {}, inverse_[kMade] = {};
};

template <bool kWritesValues, DType kFormat>
Launch prepare_form(const OpInstance& op, CudaContext& context, QuantizedForm form) {
  using Mainloop = TileScalesMainloop<OfFloat8<kFormat, DType::e4m3>, Rows::paired, Columns::dealt>;
  if constexpr (kFormat == DType::e4m3)
    if (!form.gradient)
      return prepare_blocks_matmul<Mainloop, SwigluBlocks<ToTileScales<1, kWritesValues, kFormat>>>(op, context, form);
  return prepare_blocks_matmul<Mainloop, SwigluGradBlocks<ToTileScales<2, kWritesValues, kFormat>>>(op, context, form);
}

template <bool kWritesValues>
Launch prepare(const OpInstance& op, CudaContext& context, QuantizedForm form) {
  const bool e5m2 = op.inputs[0].dtype == DType::e5m2;
  return (e5m2 ? prepare_form<kWritesValues, DType::e5m2> : prepare_form<kWritesValues, DType::e4m3>)(op, context,
                                                                                                      form);
}

}  // namespace

void add_swiglu_tile_scales_ops(OpTable& table) {
  for (const bool gradient : {false, true}) {
    const QuantizedForm form{gradient};
    table[gradient ? "matmul_swiglu_grad_quantize_squares" : "matmul_swiglu_quantize_squares"] = {
        [form](const OpInstance& op, CudaContext& context) {
          return (op.outputs[kValues].present ? prepare<true> : prepare<false>)(op, context, form);
        },
        [form](const OpInstance& op, const CudaTraits& gpu) { return query_blocks_matmul(op, gpu, form); }};
  }
}

}  // namespace quern::cuda
