// SwiGLU and GEGLU of a packed (N, 2 F) value, gates first, their gradients, and both of SwiGLU at once for a
// recomputed forward. Outputs may be an input's memory: a thread writes only elements that it alone has read.

#include "elementwise/activations.cuh"
#include "elementwise/elementwise_ops.h"
#include "primitives/divide.cuh"
#include "primitives/vector.cuh"
#include "runtime/launch.cuh"
#include "runtime/operand_check.h"

namespace quern::cuda {

namespace {

constexpr int kThreads = 256, kUnroll = 2;  // packs of a thread, so that enough loads are in flight

struct SwigluGate {
  static __device__ __forceinline__ float value(float gate, float up) { return swiglu(gate, up); }
  static __device__ __forceinline__ GateUp grad(float dy, float gate, float up) { return swiglu_grad(dy, gate, up); }
};
struct GegluGate {
  static __device__ __forceinline__ float value(float gate, float up) { return GeluTanh{}(gate)*up; }
  static __device__ __forceinline__ GateUp grad(float dy, float gate, float up) {
    return {GeluTanhGrad{}(dy * up, gate), dy * GeluTanh{}(gate)};
  }
};

struct SwigluArguments {
  const void *gate_up, *dy;  ///< (N, 2 F), (N, F)
  void *y, *dgate_up;        ///< (N, F), (N, 2 F), null: not wanted
  std::uint32_t packs;       ///< of all rows of F elements
  int width;                 ///< F
  FastDivide row_packs;
};

template <class T, Access kAccess, bool kGrad, class Gate>
__global__ void __launch_bounds__(kThreads) swiglu_kernel(const SwigluArguments args) {
  const std::uint32_t first = blockIdx.x * (kUnroll * kThreads) + threadIdx.x;
  Pack<T> gate[kUnroll], up[kUnroll], dy[kUnroll];
  std::int64_t row[kUnroll];
  int at[kUnroll], width[kUnroll];
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    const std::uint32_t pack = first + u * kThreads;
    std::uint32_t rest;
    row[u] = args.row_packs.divide(pack, rest);
    at[u] = static_cast<int>(rest) * kPack<T>;
    width[u] = pack < args.packs ? args.width : 0;  // a pack past the end reads and writes nothing
    const T* gates = static_cast<const T*>(args.gate_up) + row[u] * 2 * args.width;
    gate[u] = load_pack<kAccess>(gates, at[u], width[u]);
    up[u] = load_pack<kAccess>(gates + args.width, at[u], width[u]);
    if constexpr (kGrad)
      dy[u] = load_pack<kAccess>(static_cast<const T*>(args.dy) + row[u] * args.width, at[u], width[u]);
  }
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    const Floats<T> g = unpack(gate[u]), v = unpack(up[u]);
    if (args.y) {
      Floats<T> y;
#pragma unroll
      for (int i = 0; i < kPack<T>; ++i) y.at[i] = Gate::value(g.at[i], v.at[i]);
      store_pack<kAccess>(static_cast<T*>(args.y) + row[u] * args.width, at[u], width[u], round_pack(y));
    }
    if constexpr (kGrad) {
      if (args.dgate_up) {
        const Floats<T> d = unpack(dy[u]);
        Floats<T> dgate, dup;
#pragma unroll
        for (int i = 0; i < kPack<T>; ++i) {
          const GateUp slope = Gate::grad(d.at[i], g.at[i], v.at[i]);
          dgate.at[i] = slope.gate;
          dup.at[i] = slope.up;
        }
        T* to = static_cast<T*>(args.dgate_up) + row[u] * 2 * args.width;
        store_pack<kAccess>(to, at[u], width[u], round_pack(dgate));
        store_pack<kAccess>(to + args.width, at[u], width[u], round_pack(dup));
      }
    }
  }
}

/// Where an op of the family has its operands; -1: not there.
struct Operands {
  int gate_up, dy, y, dgate_up;
};
constexpr Operands kForward{0, -1, 0, -1}, kBackward{1, 0, -1, 0}, kBoth{0, 1, 0, 1};

std::int64_t packs_of(const OpInstance& op, const Operands& operands, std::int64_t& row_packs) {
  auto [rows, columns] = matrix_of(op, static_cast<std::size_t>(operands.gate_up));
  auto type = op.inputs[static_cast<std::size_t>(operands.gate_up)].dtype;
  row_packs = ceil_divide(columns / 2 * static_cast<std::int64_t>(size_of(type)), 16);
  return rows * row_packs;
}

template <class Gate>
Launch prepare_swiglu(const OpInstance& op, CudaContext& context, Operands operands) {
  const Operand& gate_up = op.inputs[static_cast<std::size_t>(operands.gate_up)];
  const std::int64_t width = matrix_of(op, static_cast<std::size_t>(operands.gate_up)).columns / 2;
  std::int64_t row_packs = 0;
  const std::int64_t packs = packs_of(op, operands, row_packs);
  const bool whole = width * static_cast<std::int64_t>(size_of(gate_up.dtype)) % 16 == 0;
  auto load = [&](auto access) {
    return with_element(gate_up.dtype, [&](auto element) {
      using T = decltype(element);
      KernelFunction<SwigluArguments> forward = swiglu_kernel<T, access(), false, Gate>,
                                      grad = swiglu_kernel<T, access(), true, Gate>;
      return load_kernel(operands.dy < 0 ? forward : grad, dim3(kThreads), context.multiprocessors);
    });
  };
  auto vector = load(AccessConstant<Access::vector>{}), scalar = load(AccessConstant<Access::scalar>{});
  return [=](std::span<const View> in, std::span<const View> out, const Exec& exec) {
    if (packs == 0) return;
    auto pointer = [](std::span<const View> views, int i) {
      return i < 0 ? nullptr : views[static_cast<std::size_t>(i)].data;
    };
    SwigluArguments args{.gate_up = pointer(in, operands.gate_up),
                         .dy = pointer(in, operands.dy),
                         .y = pointer(out, operands.y),
                         .dgate_up = pointer(out, operands.dgate_up),
                         .packs = static_cast<std::uint32_t>(packs),
                         .width = static_cast<int>(width),
                         .row_packs = FastDivide(static_cast<std::uint32_t>(row_packs))};
    const auto& kernel = whole && aligned_16({args.gate_up, args.dy, args.y, args.dgate_up}) ? vector : scalar;
    kernel.launch(ceil_divide(packs, kThreads * kUnroll), stream_of(exec), args);
  };
}

OpSupport query_swiglu(const OpInstance& op, Operands operands) {
  auto i = [](int operand) { return static_cast<std::size_t>(operand); };
  OperandCheck check(op, operands.dy < 0 ? 1 : 2, operands.y >= 0 && operands.dgate_up >= 0 ? 2 : 1,
                     i(operands.gate_up));
  Extents packed = extents_of(op, i(operands.gate_up)), half = packed;
  if (!half.empty()) half.back() /= 2;
  check.that(!packed.empty() && packed.back() % 2 == 0, "needs an even number of columns in gate_up");
  check.input(i(operands.gate_up), "gate_up", packed);
  if (operands.dy >= 0) check.input(i(operands.dy), "dy", half);
  if (operands.y >= 0) check.output(i(operands.y), "y", half);
  if (operands.dgate_up >= 0) check.output(i(operands.dgate_up), "dgate_up", packed);
  std::int64_t row_packs = 0;
  // Packs are counted in 31 bits, the last block's threads past the end included.
  check.that(!check.ok() || packs_of(op, operands, row_packs) < (std::int64_t{1} << 31) - kThreads * kUnroll,
             "on cuda takes up to 2^31 packs of 16 bytes");
  return check.support();
}

}  // namespace

void add_swiglu_ops(OpTable& table) {
  auto add = [&table]<class Gate>(const char* kind, Operands operands, Gate) {
    table[kind] = {
        [operands](const OpInstance& op, CudaContext& context) { return prepare_swiglu<Gate>(op, context, operands); },
        [operands](const OpInstance& op, const CudaTraits&) { return query_swiglu(op, operands); }};
  };
  add("swiglu", kForward, SwigluGate{});
  add("swiglu_grad", kBackward, SwigluGate{});
  add("swiglu_and_grad", kBoth, SwigluGate{});
  add("geglu", kForward, GegluGate{});
  add("geglu_grad", kBackward, GegluGate{});
}

}  // namespace quern::cuda
