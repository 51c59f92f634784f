#include "products/swiglu/swiglu_product.h"

#include "elementwise/activations.cuh"
#include "products/own/product_hand_over.cuh"
#include "products/own/product_launch.cuh"

namespace quern::cuda {

using namespace product;

namespace {

/// A tile is 128 columns of gate and the same of up. Sixteen lanes take a row.
class SwigluEpilogue {
 public:
  struct Arguments {
    bf16 *gate_up, *y;
    int rows, width;
  };
  static constexpr int kWidth = TileMemory::kHalf;

  __device__ explicit SwigluEpilogue(const Arguments& arguments) : a(arguments) {}
  [[maybe_unused]] __device__ void prepare(int, int) {}

  __device__ void run(const TileMemory& shared, int half, int row, int column) {
    constexpr int kLanes = kWidth / kPack<bf16>, kAtOnce = 32 * kEpilogueWarps / kLanes;
    const int lane = threadIdx.x % kLanes, at = column * kWidth + lane * kPack<bf16>;
#pragma unroll 4
    for (int r = epilogue_thread() / kLanes; r < kHalfRows; r += kAtOnce) {
      const Pack<bf16> gate = read_pack(shared.pack(half * kHalfRows + r, lane));
      const Pack<bf16> up = read_pack(shared.pack(half * kHalfRows + r, kLanes + lane));
      const Floats<bf16> g = unpack(gate), u = unpack(up);
      Floats<bf16> y;
#pragma unroll
      for (int i = 0; i < kPack<bf16>; ++i) y.at[i] = swiglu(g.at[i], u.at[i]);
      if (row + r >= a.rows) continue;
      if (a.gate_up != nullptr) {
        bf16* to = a.gate_up + static_cast<std::int64_t>(row + r) * 2 * a.width;
        store_pack<Access::vector>(to, at, a.width, gate);
        store_pack<Access::vector>(to + a.width, at, a.width, up);
      }
      if (a.y != nullptr)
        store_pack<Access::vector>(a.y + static_cast<std::int64_t>(row + r) * a.width, at, a.width, round_pack(y));
    }
  }

 private:
  const Arguments& a;
};

/// A tile is 256 columns of dy. A warp takes rows in batches, whose gate and up it reads while it waits or works on the
/// batch before.
class SwigluGradEpilogue {
 public:
  struct Arguments {
    const bf16* gate_up;
    bf16 *dy, *y, *dgate_up;
    int rows, width;
  };
  static constexpr int kWidth = TileMemory::kColumns;

  __device__ explicit SwigluGradEpilogue(const Arguments& arguments) : a(arguments) {}
  __device__ void prepare(int row, int column) { read(ahead, row, column, 0); }

  __device__ void run(const TileMemory& shared, int half, int row, int column) {
#pragma unroll 1
    for (int batch = 0; batch < kBatches; ++batch) {
      const Batch now = ahead;
      if (batch + 1 < kBatches) read(ahead, row, column, batch + 1);
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int r = row_of(batch, i);
        if (r >= kHalfRows) continue;
        write(row + r, column, read_pack(shared.pack(half * kHalfRows + r, threadIdx.x % 32)), now.gate[i], now.up[i]);
      }
    }
  }

 private:
  static constexpr int kBatch = 6, kAtOnce = kBatch * kEpilogueWarps;
  static constexpr int kBatches = (kHalfRows + kAtOnce - 1) / kAtOnce;
  struct Batch {
    Pack<bf16> gate[kBatch], up[kBatch];
  };
  __device__ static int row_of(int batch, int i) {
    return batch * kAtOnce + i * kEpilogueWarps + epilogue_thread() / 32;
  }
  __device__ static int column_of(int column) {
    return column * kWidth + static_cast<int>(threadIdx.x) % 32 * kPack<bf16>;
  }

  __device__ void read(Batch& to, int row, int column, int batch) {
    const int at = column_of(column);
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int r = row_of(batch, i), width = r < kHalfRows && row + r < a.rows ? a.width : 0;
      const bf16* from = a.gate_up + static_cast<std::int64_t>(row + r) * 2 * a.width;
      to.gate[i] = load_pack<Access::vector>(from, at, width);
      to.up[i] = load_pack<Access::vector>(from + a.width, at, width);
    }
  }
  __device__ void write(int row, int column, const Pack<bf16>& dy, const Pack<bf16>& gate, const Pack<bf16>& up) {
    const Floats<bf16> d = unpack(dy), g = unpack(gate), u = unpack(up);
    Floats<bf16> dgate, dup, y;
#pragma unroll
    for (int i = 0; i < kPack<bf16>; ++i) {
      const GateUp slope = swiglu_grad(d.at[i], g.at[i], u.at[i]);
      dgate.at[i] = slope.gate;
      dup.at[i] = slope.up;
      if (a.y != nullptr) y.at[i] = swiglu(g.at[i], u.at[i]);
    }
    if (row >= a.rows) return;
    const int at = column_of(column);
    const std::int64_t start = static_cast<std::int64_t>(row) * a.width;
    store_pack<Access::vector>(a.dgate_up + 2 * start, at, a.width, round_pack(dgate));
    store_pack<Access::vector>(a.dgate_up + 2 * start + a.width, at, a.width, round_pack(dup));
    if (a.dy != nullptr) store_pack<Access::vector>(a.dy + start, at, a.width, dy);
    if (a.y != nullptr) store_pack<Access::vector>(a.y + start, at, a.width, round_pack(y));
  }

  const Arguments& a;
  Batch ahead;
};

template <Columns kLayout, class Epilogue>
using Bf16Launch = ProductLaunch<StraightSums<OfBf16, kLayout>, HandedOver<Epilogue>>;

}  // namespace

bool wgmma_takes(const SwigluProductShape& s) {
  return s.width % kPack<bf16> == 0 && s.depth % kPack<bf16> == 0 && s.depth > 0 && s.rows < kMostElements &&
         s.depth < kMostElements && 2 * s.width < kMostElements &&
         ceil_divide(s.rows, kRows) * ceil_divide(s.width, SwigluEpilogue::kWidth) < kMostElements;
}

void load_swiglu_products() {
  Bf16Launch<Columns::along, SwigluEpilogue>::load();
  Bf16Launch<Columns::along, SwigluGradEpilogue>::load();
  Bf16Launch<Columns::across, SwigluGradEpilogue>::load();
}

void swiglu_product(const SwigluProductShape& s, const SwigluProduct& p, int multiprocessors, cudaStream_t stream) {
  if (s.rows == 0 || s.width == 0) return;
  Operands operands{};
  for (int half = 0; half < 2; ++half) {
    operands.b[half] =
        tensor_map(DType::bf16, {s.depth, s.width, 1}, static_cast<const bf16*>(p.weight) + half * s.width * s.depth,
                   {OfBf16::kDepth, TileMemory::kHalf, 1});
    operands.b_step[half] = SwigluEpilogue::kWidth;
  }
  Bf16Launch<Columns::along, SwigluEpilogue>::run({s.rows, s.width, s.depth}, operands, DType::bf16, p.x,
                                                  {.gate_up = static_cast<bf16*>(p.gate_up),
                                                   .y = static_cast<bf16*>(p.y),
                                                   .rows = static_cast<int>(s.rows),
                                                   .width = static_cast<int>(s.width)},
                                                  multiprocessors, stream);
}

void swiglu_grad_product(const SwigluProductShape& s, const SwigluGradProduct& p, int multiprocessors,
                         cudaStream_t stream) {
  if (s.rows == 0 || s.width == 0) return;
  const SwigluGradEpilogue::Arguments epilogue{.gate_up = static_cast<const bf16*>(p.gate_up),
                                               .dy = static_cast<bf16*>(p.dy),
                                               .y = static_cast<bf16*>(p.y),
                                               .dgate_up = static_cast<bf16*>(p.dgate_up),
                                               .rows = static_cast<int>(s.rows),
                                               .width = static_cast<int>(s.width)};
  Operands operands{};
  for (int half = 0; half < 2; ++half) {
    operands.b[half] =
        s.transposed ? tensor_map(DType::bf16, {s.depth, s.width, 1}, p.weight, {OfBf16::kDepth, TileMemory::kHalf, 1})
                     : tensor_map(DType::bf16, {s.width, s.depth, 1}, p.weight, {wgmma::kColumns, OfBf16::kDepth, 1});
    operands.b_step[half] = SwigluGradEpilogue::kWidth;
    operands.b_first[half] = half * TileMemory::kHalf;
  }
  const auto run = s.transposed ? Bf16Launch<Columns::along, SwigluGradEpilogue>::run
                                : Bf16Launch<Columns::across, SwigluGradEpilogue>::run;
  run({s.rows, s.width, s.depth}, operands, DType::bf16, p.dout, epilogue, multiprocessors, stream);
}

}  // namespace quern::cuda
