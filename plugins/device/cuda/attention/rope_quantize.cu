// The rotation's gradient, quantized and transposed as it is made, its columns summed on the way where a bias was
// added: the gradient of a packed qkv on its way to the qkv matmul's gradients.

#include "attention/rope_ops.h"
#include "primitives/heads.cuh"
#include "quantization/block_quantize.cuh"
#include "quantization/quantize_ops.h"
#include "quantization/tile_quantize.cuh"

namespace quern::cuda {

namespace {

/// dy (N, (H + 2 K) D) -> dqkv.
struct RopeOperands {
  const void* dy;
  const std::int32_t* positions;
  RopeTable table;
  int rotated;  ///< columns of query and key heads
  int head_dim, half;
};

/// Heads of any size: each half of a rotated head with the other beside it.
template <bool kSumColumns>
struct RopeGrad : RopeOperands {
  static constexpr int kParts = 1;
  static constexpr bool kSums = kSumColumns;

  template <class T>
  struct Loaded {
    Eight<T> own, other;
    const float* cosines;  ///< of the row's position, sines behind; null: not rotated
    float one;             ///< NaN for a position outside the table, which the step's finite check reports
  };

  /// A column's position in its head, and where its angle is.
  struct Place {
    bool first;  ///< of the two halves
    int angle;
  };
  __device__ __forceinline__ Place place_of(int column) const {
    const int in_head = column % head_dim;
    return {in_head < half, in_head < half ? in_head : in_head - half};
  }

  template <Access kAccess, class T>
  __device__ __forceinline__ Loaded<T> load(std::int64_t row, int column, int columns, int width) const {
    const T* from = static_cast<const T*>(dy) + row * width;
    Loaded<T> loaded{.own = load_eight<kAccess>(from, column, columns), .other = {}, .cosines = nullptr, .one = 1.0f};
    if (columns == 0 || column >= rotated) return loaded;
    const int position = positions[row];
    const bool inside = position >= 0 && position < table.positions;
    loaded.cosines = table.values + std::int64_t{inside ? position : 0} * 2 * half;
    if (!inside) loaded.one = __int_as_float(0x7fffffff);
    if constexpr (kAccess == Access::vector) {  // eight columns are in one half of one head
      loaded.other = load_eight<kAccess>(from, place_of(column).first ? column + half : column - half, columns);
    } else {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        if (column + i >= rotated) continue;
        constexpr int kPerWord = kPack<T> / 4;
        loaded.other.pack[i / kPack<T>].word[i % kPack<T> / kPerWord] |=
            bits_of(from[place_of(column + i).first ? column + i + half : column + i - half]) << (16 * (i % kPerWord));
      }
    }
    return loaded;
  }

  /// As `rotate` of heads.cuh with sign -1, term by term.
  template <Access kAccess, class T>
  __device__ __forceinline__ void make(const Loaded<T>& loaded, int column, Eight<T> (&values)[1]) const {
    values[0] = loaded.own;
    if (loaded.cosines == nullptr) return;
    float own[8], other[8], cos[8], sin[8];
    unpack_eight(loaded.own, own);
    unpack_eight(loaded.other, other);
    if constexpr (kAccess == Access::vector) {
      const Place place = place_of(column);
      unpack_eight(load_eight<kAccess>(loaded.cosines, place.angle, half), cos);
      unpack_eight(load_eight<kAccess>(loaded.cosines + half, place.angle, half), sin);
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        cos[i] *= loaded.one;
        sin[i] = (place.first ? sin[i] : -sin[i]) * loaded.one;
      }
    } else {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const bool turns = column + i < rotated;
        const Place place = place_of(turns ? column + i : 0);
        cos[i] = turns ? loaded.cosines[place.angle] * loaded.one : 1.0f;
        sin[i] = turns ? loaded.cosines[half + place.angle] * loaded.one
                       : -0.0f;  // with other 0: a column that is not rotated keeps its sign
        if (turns && !place.first) sin[i] = -sin[i];
      }
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) own[i] = own[i] * cos[i] + other[i] * sin[i];
    values[0] = round_eight<T>(own);
  }
};

/// Heads that fill a tile, so that a thread has both halves: a pack of the first, and of the second the one that the
/// rotation mixes it with. Other columns are only copied.
template <bool kSumColumns>
struct RopeGradPairs : RopeOperands {
  static constexpr int kParts = 1;
  static constexpr bool kSums = kSumColumns;

  template <class T>
  struct Loaded {
    Eight<T> x;
  };

  /// Lanes share out the packs of the first halves. In the upper half of the tile a thread's first pack is of the
  /// second half: this is how eight lanes write to different banks whatever the size of heads.
  __device__ __forceinline__ int column_of(int lane, int pack) const {
    const int packs = half / 8, first = lane + (lane & -packs);  // packs of a half are a power of two
    return 8 * (first + (first >= 8 ? 1 - pack : pack) * packs);
  }

  /// Rows are found by bytes: offsets in elements, which writes need, would take registers from here on.
  template <Access kAccess, class T>
  __device__ __forceinline__ Loaded<T> load(std::int64_t row, int column, int columns, int width) const {
    const std::uint32_t bytes = static_cast<std::uint32_t>(width) * static_cast<std::uint32_t>(sizeof(T));
    return {
        load_eight<kAccess>(reinterpret_cast<const T*>(static_cast<const char*>(dy) + row * bytes), column, columns)};
  }

  /// As `rotate` of heads.cuh with sign -1, term by term; sign 1 where the second half comes first.
  template <class T>
  __device__ __forceinline__ void mix(Loaded<T>& one, Loaded<T>& two, std::int64_t row, int column, int columns) const {
    if (column >= min(rotated, columns)) return;
    const int position = positions[row];
    const bool inside = position >= 0 && position < table.positions, second_first = (column & half) != 0;
    const float one_or_nan = inside ? 1.0f : __int_as_float(0x7fffffff);
    const auto line = static_cast<std::uint32_t>(inside ? position : 0);
    const float* cosines =
        table.values + std::uint64_t{line} * static_cast<std::uint32_t>(head_dim) + (column & (half - 1));
    float x[8], y[8], cos[8], sin[8];
    unpack_eight(one.x, x);
    unpack_eight(two.x, y);
    unpack_eight(load_eight<Access::vector>(cosines, 0, 8), cos);
    unpack_eight(load_eight<Access::vector>(cosines + half, 0, 8), sin);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float a = x[i], b = y[i], c = cos[i] * one_or_nan, s = second_first ? sin[i] : -sin[i];
      x[i] = a * c - b * s;
      y[i] = b * c + a * s;
    }
    one.x = round_eight<T>(x);
    two.x = round_eight<T>(y);
  }

  template <Access kAccess, class T>
  __device__ __forceinline__ void make(const Loaded<T>& loaded, int, Eight<T> (&values)[1]) const {
    values[0] = loaded.x;
  }
};

template <bool kSums>
QuantizePlan plan_of(const OpInstance& op, ScaleSource source) {
  return QuantizePlan(op, source, 2, kSums ? 2 : 1, matrix_of(op, 0));
}

/// Makes a producer of inputs.
template <class Producer>
auto maker_of(const OpInstance& op, CudaContext& context) {
  const PackedHeads packed(op.attributes);
  const RopeOperands operands{.dy = nullptr,
                              .positions = nullptr,
                              .table = make_rope_table(op, context),
                              .rotated = static_cast<int>(packed.rotated() * packed.head_dim),
                              .head_dim = static_cast<int>(packed.head_dim),
                              .half = static_cast<int>(packed.head_dim / 2)};
  return [operands](std::span<const View> in) {
    Producer bound{operands};
    bound.dy = in[0].data;
    bound.positions = in[1].as<const std::int32_t>();
    return bound;
  };
}

template <class Producer>
Launch prepare_as(const OpInstance& op, CudaContext& context, ScaleSource source) {
  const Matrix size = matrix_of(op, 0);
  return prepare_tiles<Producer>(op, context, plan_of<Producer::kSums>(op, source), size.rows, size.columns,
                                 PackedHeads(op.attributes).head_dim % 16 == 0, 0, maker_of<Producer>(op, context));
}

// dy, positions -> dqkv, kSums: their sum over tokens, and the quantizing part's of dqkv
template <bool kSums>
Launch prepare(const OpInstance& op, CudaContext& context, ScaleSource source) {
  return rope_quantizes_pairs(PackedHeads(op.attributes).head_dim)
             ? prepare_as<RopeGradPairs<kSums>>(op, context, source)
             : prepare_as<RopeGrad<kSums>>(op, context, source);
}

template <bool kSums>
void check_dx(OperandCheck& check, const OpInstance& op) {
  check_fused(check, op);
  check_packed(check, op, 0, "dy");
  check_rope(check, op, 1);
  check.output(0, "dx", extents_of(op, 0));
  if (kSums) check.sum(1, "sum", {matrix_of(op, 0).columns});
}

template <bool kSums>
OpSupport query(const OpInstance& op, ScaleSource source) {
  const QuantizePlan plan = plan_of<kSums>(op, source);
  const auto [rows, columns] = matrix_of(op, 0);
  OperandCheck check(op, plan.inputs(), plan.outputs());
  check_dx<kSums>(check, op);
  check.that(source != ScaleSource::given, "is not fused with a given scale: dx might take the place of dy");
  plan.check(check, op);
  const bool sums = kSums && check.ok() && op.outputs[1].present;
  return check.support(QuantizePlan::kWorkspace + (sums ? partial_bytes(sum_tiles(rows), columns) : 0));
}

// With block or tile scales.
template <bool kSums>
Launch prepare_of_blocks(const OpInstance& op, CudaContext& context) {
  using Producer = RopeGradPairs<kSums>;
  const Matrix size = matrix_of(op, 0);
  const BlockOutputs outputs{.y = 0, .codes = kSums ? 2 : 1};
  const auto make = maker_of<Producer>(op, context);
  return is_square(op) ? prepare_blocks<Producer, true>(op, context, size.rows, size.columns, outputs, make)
                       : prepare_blocks<Producer, false>(op, context, size.rows, size.columns, outputs, make);
}

template <bool kSums>
OpSupport query_of_blocks(const OpInstance& op, const CudaTraits&) {
  const auto [rows, columns] = matrix_of(op, 0);
  OperandCheck check(op, 2, kSums ? 6 : 5);
  check_dx<kSums>(check, op);
  check_blocks(check, op, kSums ? 2 : 1, rows, columns);
  check.that(!is_square(op) || is_spread(op), "is not fused with scales laid out as weights' scales");
  if (check.ok())
    check.that(rope_quantizes_pairs(PackedHeads(op.attributes).head_dim),
               "is fused with block scales where heads fill a block");
  const bool sums = kSums && check.ok() && op.outputs[1].present;
  return check.support(sums ? partial_bytes(sum_tiles(rows), columns) : 0);
}

}  // namespace

void add_rope_quantize_ops(OpTable& table) {
  add_quantize_kinds(table, "rope_grad", prepare<false>, query<false>);
  add_quantize_kinds(table, "rope_grad_column_sum", prepare<true>, query<true>);
  for (const char* way : {"_quantize_blocks", "_quantize_squares"}) {
    table[std::string("rope_grad") + way] = {prepare_of_blocks<false>, query_of_blocks<false>};
    table[std::string("rope_grad_column_sum") + way] = {prepare_of_blocks<true>, query_of_blocks<true>};
  }
}

}  // namespace quern::cuda
