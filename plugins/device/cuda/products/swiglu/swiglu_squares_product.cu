// matmul_swiglu_quantize_squares and matmul_swiglu_grad_quantize_squares: products of operands with scales of 128 x 128
// elements that end in the codes of SwiGLU, or of its gradient, with such scales. A tile of values is a square, whose
// scale both multipliers find together: they keep values, rounded to bf16, until it is known.

#include "products/own/product_codes.cuh"
#include "products/own/product_squares.cuh"
#include "products/swiglu/swiglu_codes_form.cuh"
#include "quantization/block_quantize.cuh"

namespace quern::cuda {

using namespace product;

namespace {

__device__ __forceinline__ Pack<bf16> read_pack(std::uint32_t address) {
  Pack<bf16> pack;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(pack.word[0]), "=r"(pack.word[1]), "=r"(pack.word[2]), "=r"(pack.word[3])
               : "r"(address)
               : "memory");
  return pack;
}

constexpr int kMakingParts = 4, kCodingParts = 3;

struct SquaresArguments {
  int rows, width;
  bf16 *gate_up, *values;  ///< null: not wanted
  std::uint8_t* q;
  bool has_t;
  CUtensorMap t;           ///< dealt
  float *scale, *t_scale;  ///< row_block_scales, column_block_scales; null: not wanted
  ZeroedFloats behind;     ///< t_scale's scales: at most one a column, where columns are whole blocks
};

/// kMade: y alone, or dgate and dup. kValues: they are wanted too.
template <int kMade, bool kValues>
class ToSquares {
  static constexpr int kUnits = 2 * static_cast<int>(kScaleBlock) / UnitPlace::kColumns;  ///< of a square
  static constexpr std::uint32_t kBytes = 4 * 4 * kMultipliers;                           ///< of its warps' magnitudes
  static constexpr int kGroups = kUnits / 2 * kMade,
                       kOfPart = (kGroups + kCodingParts - 1) / kCodingParts;  ///< at most
  using Turned = TurnedCodes<kOfPart>;

 public:
  using Arguments = SquaresArguments;
  static constexpr Rows kRows = Rows::paired;
  static constexpr int kMoreParts = kCodingParts;
  static constexpr std::uint32_t kShared = Turned::kShared + 2 * kMade * kBytes;
  static __device__ bool idle(const Arguments&) { return false; }
  static __device__ __forceinline__ const bf16* gate_up(const Arguments& a) { return a.gate_up; }

  __device__ ToSquares(const Arguments& arguments, std::uint32_t shared)
      : a_(arguments), turned_(shared), magnitudes_(shared + Turned::kShared) {}

  __device__ __forceinline__ float scale(float sum) const { return sum; }

  __device__ __forceinline__ void swiglu(const ValueUnit& unit, const Pack<bf16>& gate, const Pack<bf16>& up,
                                         const Pack<bf16>& y) {
    store(a_.gate_up, unit.at(2 * a_.width), gate, unit);
    store(a_.gate_up, unit.at(2 * a_.width) + a_.width, up, unit);
    keep(unit, 0, y);
  }
  __device__ __forceinline__ void gradient(const ValueUnit& unit, const Pack<bf16>&, const Pack<bf16>&,
                                           const Pack<bf16>& dgate, const Pack<bf16>& dup) {
    keep(unit, 0, dgate);
    keep(unit, 1, dup);
  }

  /// Tells the other multiplier, which has read the places of a tile when it tells of the next: two, in turn, suffice.
  /// So do barriers: a multiplier may come to that of the next tile while the other is still before that of this one.
  __device__ __forceinline__ void complete() {
    magnitudes_ ^= kMade * kBytes;
#pragma unroll
    for (int made = 0; made < kMade; ++made) {
      const float most = fmaxf(__low2float(most_[made]), __high2float(most_[made]));
      const std::uint32_t of_warp = __reduce_max_sync(~0u, __float_as_uint(most));
      if (threadIdx.x % 32 == 0)
        asm volatile("st.shared.u32 [%0], %1;" ::"r"(magnitudes_ + made * kBytes + threadIdx.x / 32 * 4), "r"(of_warp)
                     : "memory");
      most_[made] = __float2bfloat162_rn(0.0f);
    }
    asm volatile("bar.arrive %0, %1;" ::"r"(barrier_of(1 - multiplier())), "n"(kMultiplying) : "memory");
  }

  __device__ __forceinline__ void work(const UnitPlace& place, int part) {
    if (part == 0) find_scales(place);
    const int first = part * kGroups / kCodingParts, last = (part + 1) * kGroups / kCodingParts;
    uint2 codes[kOfPart][2];
#pragma unroll
    for (int number = first; number < last; ++number) {
      const int group = number / kMade, made = number % kMade;
#pragma unroll
      for (int row = 0; row < 2; ++row)
        codes[number - first][row] = codes_of<DType::e4m3>(kept_[made][2 * group + row], inverse_[made]);
      turned_.put(number - first, codes[number - first][0], codes[number - first][1]);
    }
    if (a_.has_t)
      turned_.send([&](auto at) {
#pragma unroll
        for (int number = first; number < last; ++number)
          tma::store_dealt_box(a_.t, place.first_row(),
                               (place.column + number % kMade * a_.width) / kDealtRows + number / kMade,
                               at(number - first));
      });
#pragma unroll
    for (int number = first; number < last; ++number) {
#pragma unroll
      for (int row = 0; row < 2; ++row) {
        const ValueUnit unit(place, number / kMade * 2 + row, a_.rows, a_.width);
        store_unit(a_.q + unit.at(std::int64_t{kMade} * a_.width) + number % kMade * std::int64_t{a_.width},
                   codes[number - first][row], unit.inside);
      }
    }
  }
  __device__ void end() { turned_.end(); }

 private:
  static __device__ __forceinline__ int multiplier() { return static_cast<int>(threadIdx.x) / 128; }
  /// At which one waits for the other's magnitudes: 1 and 2, or 5 and 6; those between are TurnedCodes'.
  __device__ __forceinline__ std::uint32_t barrier_of(int multiplier) const {
    return 1 + multiplier + magnitudes_ / (kMade * kBytes) % 2 * 4;
  }

  __device__ __forceinline__ void keep(const ValueUnit& unit, int made, const Pack<bf16>& values) {
    if constexpr (kValues) store(a_.values, unit.at(kMade * a_.width) + made * std::int64_t{a_.width}, values, unit);
    take_magnitudes(most_[made], values);
    kept_[made][unit.number] = values;
  }

  __device__ __forceinline__ void find_scales(const UnitPlace& place) {
    asm volatile("bar.sync %0, %1;" ::"r"(barrier_of(multiplier())), "n"(kMultiplying) : "memory");
#pragma unroll
    for (int made = 0; made < kMade; ++made) {
      std::uint32_t most = 0;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const Pack<bf16> four = read_pack(magnitudes_ + made * kBytes + half * 16);
#pragma unroll
        for (const std::uint32_t word : four.word) most = max(most, word);
      }
      const float scale = format_scale(__uint_as_float(most), DType::e4m3);
      inverse_[made] = __float2bfloat162_rn(inverse_power(scale));
      write_scale(place, made, scale);
    }
  }

  /// In the places of its rows and of its columns: a multiplier those of its rows, and of half of the columns.
  __device__ __forceinline__ void write_scale(const UnitPlace& place, int made, float scale) const {
    const int thread = static_cast<int>(threadIdx.x) % 128, row = place.first_row();
    const int column = place.column / kDealtRows * kDealtRows + made * a_.width;
    if (thread < kHalfRows) {
      if (a_.scale != nullptr && row + thread < a_.rows)
        a_.scale[column / kScaleBlock * a_.rows + row + thread] = scale;
    } else if (a_.t_scale != nullptr && row - multiplier() * kHalfRows < a_.rows) {
      const int of_columns = column + multiplier() * kHalfRows + thread - kHalfRows;
      a_.t_scale[row / kScaleBlock * (kMade * a_.width) + of_columns] = scale;
      if (row < kScaleBlock && of_columns < a_.behind.count) a_.behind.at[of_columns] = 0;
    }
  }

  const Arguments& a_;
  Turned turned_;
  std::uint32_t magnitudes_;  ///< where they are, in turn
  Pack<bf16> kept_[kMade][kUnits] = {};
  __nv_bfloat162 most_[kMade] = {}, inverse_[kMade] = {};
};

template <bool kValues>
using SwigluSquares = SwigluEpilogue<ToSquares<1, kValues>, kMakingParts>;
template <bool kValues>
using SwigluGradSquares =
    SwigluGradEpilogue<ToSquares<2, kValues>, kMakingParts, kGradientStages, static_cast<int>(kScaleBlock)>;

template <class Epilogue>
using SquaresProduct =
    EpilogueLaunch<SquaresSums<OfFloat8<DType::e4m3, DType::e4m3>, Epilogue::kRows, Columns::dealt>, Epilogue>;

enum Output : std::size_t { kProduct, kValues, kQ, kScale, kT, kTScale };

OpSupport query(const OpInstance& op, const CudaTraits& gpu, CodesForm form) {
  OperandCheck check(op, form.inputs(), kTScale + 1, 2);
  const auto [rows, width, depth] = form.sizes(op);
  constexpr std::int64_t kLeast = kScaleBlock * (kMakingParts + kCodingParts - 1) + 1;  // a stage for each part
  auto is = [&](const char* name, std::int64_t value) { return op.attributes.integer_or(name, 0) == value; };
  check.that(check.ok() && op.inputs[0].dtype == DType::e4m3, "in one kernel takes e4m3")
      .that(is("scale_rows_b", kScaleBlock) && is("square_scales", 1), "in one kernel takes scales of squares");
  check_codes_product(check, op, gpu, form, {.width = kScaleBlock, .depth = kLeast});
  check.input(2, "scale_a", row_block_scales(rows, depth), DType::f32)
      .input(3, "scale_b", square_scales(form.gradient ? width : 2 * width, depth), DType::f32);
  const Matrix values = form.values({rows, width, depth});
  check_blocks(check, op, kQ, values.rows, values.columns);
  if (check.ok())
    check
        .that(op.outputs[kQ].present && op.attributes.word("format") == name_of(DType::e4m3),
              "in one kernel writes codes of e4m3")
        .that(rows % kPairedRows == 0, "in one kernel takes a multiple of 16 rows");
  return check.support();
}

template <class Epilogue>
Launch prepare(const OpInstance& op, CudaContext& context, CodesForm form) {
  using Product = SquaresProduct<Epilogue>;
  Product::load();
  return [s = form.sizes(op), form, multiprocessors = context.multiprocessors](
             std::span<const View> in, std::span<const View> out, const Exec& exec) {
    const std::int64_t of_b = form.gradient ? s.width : 2 * s.width;
    Operands operands{};
    for (int half = 0; half < 2; ++half) {  // gate and up, or the columns of dy
      operands.b[half] = dealt_tensor_map(DType::e4m3, of_b, s.depth, in[1].data, Epilogue::kColumns / 2);
      operands.b_step[half] = Epilogue::kWidth;
      operands.b_first[half] = half * (form.gradient ? Epilogue::kWidth / 2 : static_cast<int>(s.width));
    }
    const auto rows = static_cast<int>(s.rows);
    operands.scale_a = {in[2].as<const float>(), rows, rows, kScaleBlock};
    operands.scale_b = {in[3].as<const float>(), static_cast<int>(of_b), 1,
                        static_cast<int>(square_scales(of_b, s.depth)[1])};
    CUtensorMap t{};
    if (out[kT].data != nullptr)
      t = dealt_tensor_map(DType::e4m3, form.values(s).columns, s.rows, out[kT].data, kDealtRows, kHalfRows);
    const SquaresArguments arguments{
        .rows = rows,
        .width = static_cast<int>(s.width),
        .gate_up = (form.gradient ? in[CodesForm::kGateUp] : out[kProduct]).as<bf16>(),
        .values = out[kValues].as<bf16>(),
        .q = out[kQ].as<std::uint8_t>(),
        .has_t = out[kT].data != nullptr,
        .t = t,
        .scale = out[kScale].as<float>(),
        .t_scale = out[kTScale].as<float>(),
        .behind = ZeroedFloats::behind(out[kTScale], scale_blocks(s.rows) * form.values(s).columns)};
    Product::run({s.rows, s.width, s.depth}, operands, DType::e4m3, in[0].data, arguments, multiprocessors,
                 stream_of(exec));
  };
}

template <bool kWithValues>
Launch prepare_form(const OpInstance& op, CudaContext& context, CodesForm form) {
  return (form.gradient ? prepare<SwigluGradSquares<kWithValues>> : prepare<SwigluSquares<kWithValues>>)(op, context,
                                                                                                         form);
}

}  // namespace

void add_swiglu_squares_ops(OpTable& table) {
  for (const bool gradient : {false, true}) {
    const CodesForm form{gradient};
    table[gradient ? "matmul_swiglu_grad_quantize_squares" : "matmul_swiglu_quantize_squares"] = {
        [form](const OpInstance& op, CudaContext& context) {
          return (op.outputs[kValues].present ? prepare_form<true> : prepare_form<false>)(op, context, form);
        },
        [form](const OpInstance& op, const CudaTraits& gpu) { return query(op, gpu, form); }};
  }
}

}  // namespace quern::cuda
