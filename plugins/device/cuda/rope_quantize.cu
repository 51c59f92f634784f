// The rotation's gradient, quantized and transposed as it is made: the gradient of a packed qkv on its way to the
// product that made it.

#include "heads.cuh"
#include "quantize_ops.h"
#include "tile_quantize.cuh"

namespace quern::cuda {

namespace {

/// dy (N, (H + 2 K) D) -> dqkv; each half of a rotated head with the other beside it.
struct RopeGrad {
  static constexpr int kParts = 1;
  const void* dy;
  const std::int32_t* positions;
  RopeTable table;
  int rotated;  ///< columns of query and key heads
  int head_dim, half;

  template <class T>
  struct Loaded {
    Eight<T> own, other;
    float cos[8], sin[8];  ///< value = own * cos + other * sin
  };

  template <Access kAccess, class T>
  __device__ __forceinline__ Loaded<T> load(std::int64_t row, int column, int columns, int width) const {
    const T* from = static_cast<const T*>(dy) + row * width;
    Loaded<T> loaded{.own = load_eight<kAccess>(from, column, columns), .other = {}, .cos = {}, .sin = {}};
#pragma unroll
    for (int i = 0; i < 8; ++i) {  // values of columns that are not rotated keep their bits, those of -0 too
      loaded.cos[i] = 1.0f;
      loaded.sin[i] = -0.0f;
    }
    if (columns == 0 || column >= rotated) return loaded;
    const int position = positions[row];
    const bool inside = position >= 0 && position < table.positions;
    const float* cosines = table.values + std::int64_t{inside ? position : 0} * 2 * half;
    const float one = inside ? 1.0f : __int_as_float(0x7fffffff);  // NaN: the step's finite check reports it
    if constexpr (kAccess == Access::vector) {
      // Eight columns lie in one half of one head.
      const int in_head = column % head_dim;
      const bool first = in_head < half;
      const int at = first ? in_head : in_head - half;
      loaded.other = load_eight<kAccess>(from, first ? column + half : column - half, columns);
      unpack_eight(load_eight<kAccess>(cosines, at, half), loaded.cos);
      unpack_eight(load_eight<kAccess>(cosines + half, at, half), loaded.sin);
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        loaded.cos[i] *= one;
        loaded.sin[i] *= first ? one : -one;
      }
    } else {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        if (column + i >= rotated) continue;
        const int in_head = (column + i) % head_dim;
        const bool first = in_head < half;
        const int at = first ? in_head : in_head - half;
        constexpr int kPerWord = kPack<T> / 4;
        loaded.other.pack[i / kPack<T>].word[i % kPack<T> / kPerWord] |=
            bits_of(from[first ? column + i + half : column + i - half]) << (16 * (i % kPerWord));
        loaded.cos[i] = cosines[at] * one;
        loaded.sin[i] = cosines[half + at] * (first ? one : -one);
      }
    }
    return loaded;
  }

  /// As `rotate` of heads.cuh with sign -1, term by term.
  template <Access kAccess, class T>
  __device__ __forceinline__ void make(const Loaded<T>& loaded, Eight<T> (&values)[1]) const {
    float own[8], other[8];
    unpack_eight(loaded.own, own);
    unpack_eight(loaded.other, other);
#pragma unroll
    for (int i = 0; i < 8; ++i) own[i] = own[i] * loaded.cos[i] + other[i] * loaded.sin[i];
    values[0] = round_eight<T>(own);
  }
};

QuantizePlan plan_of(const OpInstance& op, ScaleSource source) {
  return QuantizePlan(op, source, 2, 1, matrix_of(op, 0));
}

Launch prepare(const OpInstance& op, CudaContext& context, ScaleSource source) {
  const Matrix size = matrix_of(op, 0);
  const PackedHeads packed(op.attributes);
  RopeGrad producer{.dy = nullptr,
                    .positions = nullptr,
                    .table = make_rope_table(op, context),
                    .rotated = static_cast<int>(packed.rotated() * packed.head_dim),
                    .head_dim = static_cast<int>(packed.head_dim),
                    .half = static_cast<int>(packed.head_dim / 2)};
  return prepare_tiles<RopeGrad>(op, context, plan_of(op, source), size.rows, size.columns, packed.head_dim % 16 == 0,
                                 0, [producer](std::span<const View> in) {
                                   RopeGrad bound = producer;
                                   bound.dy = in[0].data;
                                   bound.positions = in[1].as<const std::int32_t>();
                                   return bound;
                                 });
}

OpSupport query(const OpInstance& op, ScaleSource source) {
  const QuantizePlan plan = plan_of(op, source);
  OperandCheck check(op, plan.inputs(), plan.outputs());
  check_packed(check, op, 0, "dy");
  check_rope(check, op, 1);
  check.output(0, "dx", extents_of(op, 0));
  plan.check(check, op);
  return check.support(QuantizePlan::kWorkspace);
}

}  // namespace

void add_rope_quantize_ops(OpTable& table) { add_quantize_kinds(table, "rope_grad", prepare, query); }

}  // namespace quern::cuda
