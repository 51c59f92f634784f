#pragma once
// GEMMs of operands with block or tile scales that quantize SwiGLU, or its gradient, with such scales: the common
// part of tile scales and of row and column scales. A tile of values is a square, which both consumers keep, rounded
// to bf16, until its scales are known. The second operand has tile scales.

#include "products/own/gemm_quantize.cuh"
#include "products/own/gemm_scale_factors.cuh"
#include "products/swiglu/swiglu_quantize_form.cuh"
#include "quantization/block_quantize.cuh"

namespace quern::cuda {

namespace gemm {

inline constexpr int kMakingParts = 4, kCodingParts = 3;

struct BlocksArguments {
  int rows, width;
  bf16 *gate_up, *values;  ///< null: not wanted
  std::uint8_t* q;
  bool has_t;
  CUtensorMap t;           ///< dealt
  float *scale, *t_scale;  ///< row_block_scales, column_block_scales; null: not wanted
  ZeroedFloats behind;     ///< t_scale's scales: at most one a column, where columns are whole blocks
};

/// A To (swiglu_epilogues.cuh) but for its scales, which a class derived from it finds, with take(unit, made, values),
/// which keeps them, complete() and work(). kMade values come of an element: y, or dgate and dup. kWritesValues: they
/// are wanted too.
template <class To, int kMade, bool kWritesValues>
class ToBlocks {
 public:
  using Arguments = BlocksArguments;
  static constexpr Rows kRows = Rows::paired;
  static constexpr int kMoreParts = kCodingParts;
  static __device__ bool idle(const Arguments&) { return false; }
  static __device__ __forceinline__ const bf16* gate_up(const Arguments& a) { return a.gate_up; }
  __device__ __forceinline__ float scale(float sum) const { return sum; }

  __device__ __forceinline__ void swiglu(const ValueUnit& unit, const Pack<bf16>& gate, const Pack<bf16>& up,
                                         const Pack<bf16>& y) {
    store(a_.gate_up, unit.at(2 * a_.width), gate, unit);
    store(a_.gate_up, unit.at(2 * a_.width) + a_.width, up, unit);
    static_cast<To*>(this)->take(unit, 0, y);
  }
  __device__ __forceinline__ void gradient(const ValueUnit& unit, const Pack<bf16>&, const Pack<bf16>&,
                                           const Pack<bf16>& dgate, const Pack<bf16>& dup) {
    static_cast<To*>(this)->take(unit, 0, dgate);
    static_cast<To*>(this)->take(unit, 1, dup);
  }
  __device__ void end() { turned_.end(); }

 protected:
  static constexpr int kUnits = 2 * static_cast<int>(kScaleBlock) / UnitPlace::kColumns;  ///< of a square
  static constexpr int kGroups = kUnits / 2 * kMade,
                       kOfPart = (kGroups + kCodingParts - 1) / kCodingParts;  ///< at most
  using Turned = TransposedValues<kOfPart>;

  __device__ ToBlocks(const Arguments& arguments, std::uint32_t shared) : a_(arguments), turned_(shared) {}

  static __device__ __forceinline__ int consumer() { return static_cast<int>(threadIdx.x) / 128; }
  /// For each tile a consumer passes a value to the other, in shared memory: at one of two alternating places, which
  /// suffice, since the other has read one tile's value when it writes the next one's. Likewise barriers, 1 and 2 or 5
  /// and 6: a consumer may come to the next tile's barrier while the other is still before this one's. Barriers between
  /// are TransposedValues'.
  __device__ __forceinline__ void tell_other() const {
    asm volatile("bar.arrive %0, %1;" ::"r"(2 - consumer() + turn_ * 4), "n"(kConsumerThreads) : "memory");
  }
  __device__ __forceinline__ void wait_for_other() const {
    asm volatile("bar.sync %0, %1;" ::"r"(1 + consumer() + turn_ * 4), "n"(kConsumerThreads) : "memory");
  }

  __device__ __forceinline__ void keep(const ValueUnit& unit, int made, const Pack<bf16>& values) {
    if (unit.number == 0 && made == 0) turn_ ^= 1;
    if constexpr (kWritesValues)
      store(a_.values, unit.at(kMade * a_.width) + made * std::int64_t{a_.width}, values, unit);
    kept_[made][unit.number] = values;
  }
  /// Zeroes the floats behind the column scales, when the scales of its first rows are written.
  __device__ __forceinline__ void write_column_scale(int row, int column, float scale) const {
    a_.t_scale[row / kScaleBlock * (kMade * a_.width) + column] = scale;
    if (row < kScaleBlock && column < a_.behind.count) a_.behind.at[column] = 0;
  }

  /// Of two rows of a group of columns: row by row, and those that are transposed.
  struct GroupValues {
    uint2 q[2], t[2];
  };
  /// A part of a tile's quantized values: codes_of(made, group).
  template <class CodesOf>
  __device__ __forceinline__ void write(const UnitPlace& place, int part, CodesOf codes_of) {
    const int first = part * kGroups / kCodingParts, last = (part + 1) * kGroups / kCodingParts;
    uint2 codes[kOfPart][2];
#pragma unroll
    for (int number = first; number < last; ++number) {
      const GroupValues of = codes_of(number % kMade, number / kMade);
      codes[number - first][0] = of.q[0];
      codes[number - first][1] = of.q[1];
      turned_.put(number - first, of.t[0], of.t[1]);
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

  const Arguments& a_;
  Turned turned_;
  Pack<bf16> kept_[kMade][kUnits] = {};
  int turn_ = 0;
};

__device__ __forceinline__ Pack<bf16> read_pack(std::uint32_t address) {
  Pack<bf16> pack;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(pack.word[0]), "=r"(pack.word[1]), "=r"(pack.word[2]), "=r"(pack.word[3])
               : "r"(address)
               : "memory");
  return pack;
}

template <class To>
using SwigluBlocks = SwigluEpilogue<To, kMakingParts>;
template <class To>
using SwigluGradBlocks = SwigluGradEpilogue<To, kMakingParts, kGradientStages, static_cast<int>(kScaleBlock)>;

}  // namespace gemm

/// Outputs of the ops.
enum BlocksOutput : std::size_t { kProduct, kValues, kQ, kScale, kT, kTScale };

inline OpSupport query_blocks_matmul(const OpInstance& op, const CudaTraits& gpu, QuantizedForm form) {
  const bool squares = is_spread(op);  // scales of a and of the values
  OperandCheck check(op, form.inputs(), kTScale + 1, 2);
  const auto [rows, width, depth] = form.sizes(op);
  // A stage, which is a block, for each part.
  constexpr std::int64_t kLeast = kScaleBlock * (gemm::kMakingParts + gemm::kCodingParts);
  auto is = [&](const char* name, std::int64_t value) { return op.attributes.integer_or(name, 0) == value; };
  const DType of_a = check.ok() ? op.inputs[0].dtype : DType::e4m3;
  check
      .that(of_a == DType::e4m3 || (form.gradient && of_a == DType::e5m2),
            "in one kernel takes e4m3, or a gradient in e5m2")
      .that(is("scale_rows_b", kScaleBlock) && is("square_scales", squares ? 1 : 0) && is("square", 0),
            std::string("in one kernel takes a weight with tile scales, beside ") +
                (squares ? "tile scales" : "row block scales"));
  check_quantized_matmul(check, op, gpu, form, {.width = kScaleBlock, .depth = kLeast});
  check.input(2, "scale_a", row_block_scales(rows, depth), DType::f32)
      .input(3, "scale_b", square_scales(form.gradient ? width : 2 * width, depth), DType::f32);
  const Matrix values = form.values({rows, width, depth});
  check_blocks(check, op, kQ, values.rows, values.columns);
  if (check.ok())
    check.that(op.outputs[kQ].present, "in one kernel writes quantized values")
        .that(op.attributes.word("format") == name_of(of_a), "in one kernel quantizes to the format of a")
        .that(rows % kPairedRows == 0, "in one kernel takes a multiple of 16 rows")
        .that(depth % kScaleBlock == 0, "in one kernel takes whole blocks along k")
        .that(squares || !op.outputs[kValues].present, "with row scales does not write the unquantized values");
  return check.support();
}

template <class Mainloop, class EpilogueOp>
Launch prepare_blocks_matmul(const OpInstance& op, CudaContext& context, QuantizedForm form) {
  static_assert(Mainloop::kLayoutA == EpilogueOp::kRows);
  using Product = gemm::FusedLaunch<Mainloop, EpilogueOp>;
  Product::load();
  return [s = form.sizes(op), form, format = op.inputs[0].dtype, multiprocessors = context.multiprocessors](
             std::span<const View> in, std::span<const View> out, const Exec& exec) {
    const std::int64_t of_b = form.gradient ? s.width : 2 * s.width;
    gemm::Operands operands{};
    for (int half = 0; half < 2; ++half) {  // gate and up, or the columns of dy
      operands.b[half] = dealt_tensor_map(DType::e4m3, of_b, s.depth, in[1].data, EpilogueOp::kColumns / 2);
      operands.b_step[half] = EpilogueOp::kWidth;
      operands.b_first[half] = half * (form.gradient ? EpilogueOp::kWidth / 2 : static_cast<int>(s.width));
    }
    const auto rows = static_cast<int>(s.rows);
    operands.scale_a = {in[2].as<const float>(), rows, rows, kScaleBlock};
    operands.scale_b = {in[3].as<const float>(), static_cast<int>(of_b), 1,
                        static_cast<int>(square_scales(of_b, s.depth)[1])};
    CUtensorMap t{};
    if (out[kT].data != nullptr)
      t = dealt_tensor_map(format, form.values(s).columns, s.rows, out[kT].data, kDealtRows, gemm::kHalfRows);
    const gemm::BlocksArguments arguments{
        .rows = rows,
        .width = static_cast<int>(s.width),
        .gate_up = (form.gradient ? in[QuantizedForm::kGateUp] : out[kProduct]).template as<bf16>(),
        .values = out[kValues].as<bf16>(),
        .q = out[kQ].as<std::uint8_t>(),
        .has_t = out[kT].data != nullptr,
        .t = t,
        .scale = out[kScale].as<float>(),
        .t_scale = out[kTScale].as<float>(),
        .behind = ZeroedFloats::behind(out[kTScale], scale_blocks(s.rows) * form.values(s).columns)};
    Product::run({s.rows, s.width, s.depth}, operands, format, in[0].data, arguments, multiprocessors, stream_of(exec));
  };
}

}  // namespace quern::cuda
