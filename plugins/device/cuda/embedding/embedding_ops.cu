// embedding: y[n] = table[token[n]].

#include <algorithm>
#include <string>

#include "embedding/embedding_ops.h"
#include "primitives/vector.cuh"
#include "runtime/check.h"
#include "runtime/operand_check.h"

namespace quern::cuda {

namespace {

constexpr int kWarp = 32;
constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarp;

__device__ __forceinline__ std::int64_t warp_index() {
  return (blockIdx.x * std::int64_t{blockDim.x} + threadIdx.x) / kWarp;
}
__device__ __forceinline__ std::int64_t warp_count() { return std::int64_t{gridDim.x} * blockDim.x / kWarp; }

// ---- forward ----

/// A warp a row. An id outside the table gives NaN, which the run's finite check reports.
template <class T, Access kAccess>
__global__ void embed_kernel(const int* __restrict__ tokens, const T* __restrict__ table, T* __restrict__ y,
                             std::int64_t count, std::int64_t vocabulary, std::int64_t columns) {
  const int lane = threadIdx.x % kWarp;
  for (std::int64_t n = warp_index(); n < count; n += warp_count()) {
    const int token = tokens[n];
    const bool known = token >= 0 && token < vocabulary;
    Floats<T> nan;
#pragma unroll
    for (float& value : nan.at) value = __int_as_float(0x7fc00000);
    for (std::int64_t at = lane * kPack<T>; at < columns; at += kWarp * kPack<T>) {
      Pack<T> pack = known ? load_pack<kAccess>(table + token * columns, at, columns) : round_pack(nan);
      store_pack<kAccess>(y + n * columns, at, columns, pack);
    }
  }
}

void embed(std::span<const View> inputs, std::span<const View> outputs, const Exec& exec) {
  const View &tokens = inputs[0], &table = inputs[1], &y = outputs[0];
  const std::int64_t count = tokens.count(), columns = table.columns();
  if (count == 0 || columns == 0) return;
  const auto blocks = static_cast<unsigned>(std::min<std::int64_t>((count + kWarps - 1) / kWarps, 1 << 16));
  with_element(y.dtype, [&](auto element) {
    using T = decltype(element);
    auto* kernel = packed_rows<T>(columns, {table.data, y.data}) ? embed_kernel<T, Access::vector>
                                                                 : embed_kernel<T, Access::scalar>;
    kernel<<<blocks, kThreads, 0, stream_of(exec)>>>(tokens.as<const int>(), table.as<const T>(), y.as<T>(), count,
                                                     table.extents[0], columns);
  });
  QUERN_CUDA(cudaGetLastError());
}

OpSupport query_embed(const OpInstance& op, const CudaTraits&) {
  std::int64_t count = element_count(extents_of(op, 0));
  Extents table = extents_of(op, 1);
  if (table.size() != 2) return {"embedding: the table must be a matrix", 0};
  return OperandCheck(op, 2, 1, 1)
      .input(0, "tokens", extents_of(op, 0), DType::i32)
      .input(1, "table", table)
      .output(0, "y", {count, table[1]})
      .support();
}

}  // namespace

void add_embedding_ops(OpTable& table) {
  table["embedding"] = {[](const OpInstance&, CudaContext&) { return Launch(embed); }, query_embed};
  add_embedding_grad_op(table);
}

}  // namespace quern::cuda
