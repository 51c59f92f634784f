#pragma once
// The own products of one pair of formats.

#include "products/own_product.h"
#include "products/product_launch.cuh"

namespace quern::cuda::product {

/// Writes the tile or adds it to what is there: a warp takes a row.
class StoreEpilogue {
 public:
  struct Arguments {
    bf16* y;  ///< (rows, columns)
    int rows, columns;
    bool add;  ///< values are rounded before, as the library's are
  };
  static constexpr int kWidth = kColumns;

  __device__ explicit StoreEpilogue(const Arguments& arguments) : a(arguments) {}
  [[maybe_unused]] __device__ void prepare(int, int) {}

  __device__ void run(const Shared& shared, int half, int row, int column) {
    const int lane = static_cast<int>(threadIdx.x) % 32, at = column * kWidth + lane * kPack<bf16>;
#pragma unroll 4
    for (int r = static_cast<int>(threadIdx.x) / 32 - 1; r < kHalfRows; r += kEpilogueWarps) {
      Pack<bf16> pack = read_pack(shared.pack(half * kHalfRows + r, lane));
      if (row + r >= a.rows) continue;
      bf16* to = a.y + static_cast<std::int64_t>(row + r) * a.columns;
      if (a.add) {
        Floats<bf16> sum = unpack(load_pack<Access::vector>(to, at, a.columns));
        const Floats<bf16> more = unpack(pack);
#pragma unroll
        for (int i = 0; i < kPack<bf16>; ++i) sum.at[i] += more.at[i];
        pack = round_pack(sum);
      }
      store_pack<Access::vector>(to, at, a.columns, pack);
    }
  }

 private:
  const Arguments& a;
};

template <class Formats>
struct OwnProductForm {
  template <bool kByRow>
  using Launch = ProductLaunch<Formats, Columns::along, Scaled<kByRow>, StoreEpilogue>;

  static void load(bool by_row) { by_row ? Launch<true>::load() : Launch<false>::load(); }

  static void run(const MatmulKey& key, const MatmulOperands& o, int multiprocessors, cudaStream_t stream) {
    if (key.m == 0 || key.n == 0) return;
    const int rows = static_cast<int>(key.m), columns = static_cast<int>(key.n);
    Operands operands{};
    for (int half = 0; half < 2; ++half) {
      operands.b[half] = tensor_map(key.b, {key.k, key.n, 1}, o.b, {Formats::kDepth, kHalf, 1});
      operands.b_step[half] = kColumns;
      operands.b_first[half] = half * kHalf;
    }
    const auto launch = key.scales == ScaleMode::vector ? Launch<true>::run : Launch<false>::run;
    launch({key.m, key.n, key.k}, operands, key.a, o.a,
           {.a = o.scale_a,
            .b = o.scale_b,
            .bias = key.bias ? static_cast<const bf16*>(o.bias) : nullptr,
            .rows = rows,
            .columns = columns},
           {.y = static_cast<bf16*>(o.y), .rows = rows, .columns = columns, .add = key.accumulate}, multiprocessors,
           stream);
  }
};

}  // namespace quern::cuda::product
