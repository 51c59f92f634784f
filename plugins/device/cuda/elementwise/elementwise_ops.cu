// Element by element: add, scale, soft cap, GELU and its gradient. Outputs may be an input's memory: a thread writes
// only elements that it alone has read.

#include "elementwise/activations.cuh"
#include "elementwise/elementwise_ops.h"
#include "primitives/vector.cuh"
#include "runtime/launch.cuh"
#include "runtime/operand_check.h"

namespace quern::cuda {

namespace {

constexpr int kThreads = 256, kUnroll = 2;  // packs of a thread, so that enough loads are in flight

struct Scale {
  static __device__ __forceinline__ float of(float factor, float x) { return factor * x; }
};

struct SoftCap {
  static __device__ __forceinline__ float of(float cap, float x) { return cap * tanhf(x / cap); }
};

struct MapArguments {
  const void *a, *b;
  void* y;
  std::int64_t count;
  float number;  ///< of the op, for functions that have one
};

template <class T, Access kAccess, class Function>
__global__ void __launch_bounds__(kThreads) map_kernel(const MapArguments args) {
  constexpr bool kBinary = requires(Function f) { f(0.0f, 0.0f); };
  constexpr bool kNumber = requires(Function f) { f.of(0.0f, 0.0f); };
  const std::int64_t first = (std::int64_t{blockIdx.x} * kUnroll * kThreads + threadIdx.x) * kPack<T>;
  Pack<T> a[kUnroll], b[kUnroll];
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    const std::int64_t at = first + u * kThreads * kPack<T>;
    a[u] = load_pack<kAccess>(static_cast<const T*>(args.a), at, args.count);
    if constexpr (kBinary) b[u] = load_pack<kAccess>(static_cast<const T*>(args.b), at, args.count);
  }
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    Floats<T> values = unpack(a[u]);
    if constexpr (kBinary) {
      const Floats<T> others = unpack(b[u]);
#pragma unroll
      for (int i = 0; i < kPack<T>; ++i) values.at[i] = Function{}(values.at[i], others.at[i]);
    } else if constexpr (kNumber) {
#pragma unroll
      for (int i = 0; i < kPack<T>; ++i) values.at[i] = Function::of(args.number, values.at[i]);
    } else {
#pragma unroll
      for (int i = 0; i < kPack<T>; ++i) values.at[i] = Function{}(values.at[i]);
    }
    store_pack<kAccess>(static_cast<T*>(args.y), first + u * kThreads * kPack<T>, args.count, round_pack(values));
  }
}

/// y = function(a) or function(a, b), over all elements.
template <class Function>
Launch prepare_map(const OpInstance& op, CudaContext& context, float number = 0) {
  const std::int64_t count = element_count(op.inputs[0].extents);
  const auto per_block = static_cast<std::int64_t>(16 / size_of(op.inputs[0].dtype)) * kThreads * kUnroll;
  auto load = [&](auto access) {
    return with_element(op.inputs[0].dtype, [&](auto element) {
      KernelFunction<MapArguments> kernel = map_kernel<decltype(element), access(), Function>;
      return load_kernel(kernel, dim3(kThreads), context.multiprocessors);
    });
  };
  auto vector = load(AccessConstant<Access::tail>{}), scalar = load(AccessConstant<Access::scalar>{});
  return [=](std::span<const View> in, std::span<const View> out, const Exec& exec) {
    if (count == 0) return;
    MapArguments args{
        .a = in[0].data, .b = in.size() > 1 ? in[1].data : nullptr, .y = out[0].data, .count = count, .number = number};
    const auto& kernel = aligned_16({args.a, args.b, args.y}) ? vector : scalar;
    kernel.launch(ceil_divide(count, per_block), stream_of(exec), args);
  };
}

OpSupport query_map(const OpInstance& op, std::initializer_list<const char*> inputs, const char* output) {
  OperandCheck check(op, inputs.size(), 1);
  std::size_t i = 0;
  for (const char* name : inputs) check.input(i++, name, extents_of(op, 0));
  return check.output(0, output, extents_of(op, 0)).support();
}

bool is_tanh(const OpInstance& op) { return op.attributes.word("approximation") == "tanh"; }

OpSupport refuse_approximation(const OpInstance& op) {
  const std::string& word = op.attributes.word("approximation");
  if (word == "erf" || word == "tanh") return {};
  return {op.kind + " approximation: found " + word + ", expected erf or tanh", 0};
}

}  // namespace

void add_elementwise_ops(OpTable& table) {
  table["scale"] = {[](const OpInstance& op, CudaContext& context) {
                      return prepare_map<Scale>(op, context, static_cast<float>(op.attributes.real("factor")));
                    },
                    [](const OpInstance& op, const CudaTraits&) { return query_map(op, {"x"}, "y"); }};
  table["soft_cap"] = {[](const OpInstance& op, CudaContext& context) {
                         return prepare_map<SoftCap>(op, context, static_cast<float>(op.attributes.real("cap")));
                       },
                       [](const OpInstance& op, const CudaTraits&) { return query_map(op, {"x"}, "y"); }};
  table["add"] = {[](const OpInstance& op, CudaContext& context) { return prepare_map<Add>(op, context); },
                  [](const OpInstance& op, const CudaTraits&) {
                    return query_map(op, {"a", "b"}, "y");
                  }};
  table["gelu"] = {[](const OpInstance& op, CudaContext& context) {
                     return is_tanh(op) ? prepare_map<GeluTanh>(op, context) : prepare_map<GeluErf>(op, context);
                   },
                   [](const OpInstance& op, const CudaTraits&) {
                     OpSupport known = refuse_approximation(op);
                     return known.refusal.empty() ? query_map(op, {"x"}, "y") : known;
                   }};
  table["gelu_grad"] = {[](const OpInstance& op, CudaContext& context) {
                          return is_tanh(op) ? prepare_map<GeluTanhGrad>(op, context)
                                             : prepare_map<GeluErfGrad>(op, context);
                        },
                        [](const OpInstance& op, const CudaTraits&) {
                          OpSupport known = refuse_approximation(op);
                          return known.refusal.empty() ? query_map(op, {"dy", "x"}, "dx") : known;
                        }};
  add_swiglu_ops(table);
  add_dropout_ops(table);
  add_column_sum_op(table);
  add_reduce_ranks_op(table);
  add_sum_tree_op(table);
}

}  // namespace quern::cuda
