#include "products/library/library_i8_matmul.h"

#include <algorithm>
#include <memory>
#include <vector>

#include "products/library/scale_accumulators.h"
#include "quern/error.h"

namespace quern::cuda {

namespace {

constexpr std::int64_t kSlab = std::int64_t{32} << 20;  ///< bytes of accumulators at a time; most stay in an L2 cache
constexpr std::int64_t kRows = 128;                     ///< a slab has a multiple of them

std::int64_t slab_rows(const MatmulKey& key) {
  const std::int64_t rows = kSlab / (4 * std::max<std::int64_t>(key.n, 1)) / kRows * kRows;
  return std::min(std::max(rows, kRows), key.m);
}

/// Of so many rows, as i32 without scales.
std::shared_ptr<const MatmulPlan> plan_of(const MatmulKey& key, std::int64_t rows, CudaContext& context) {
  MatmulKey sums;
  sums.m = rows, sums.n = key.n, sums.k = key.k;
  sums.transpose_b = true;
  sums.a = sums.b = DType::i8, sums.y = DType::i32;
  sums.alignment = 16;
  auto plan = std::make_shared<MatmulPlan>(sums);
  const std::vector<cublasLtMatmulAlgo_t> algorithms = plan->candidates(context.lt, 1);
  if (algorithms.empty())
    throw Error(ErrorCode::resources, {.where = "device cuda",
                                       .what = "cuBLASLt has no algorithm for the matmul " + sums.text(),
                                       .next = "choose another precision"});
  plan->choose(algorithms[0]);
  return plan;
}

}  // namespace

std::string refuse_library_i8(const MatmulKey& key, const CudaTraits& gpu) {
  constexpr std::int64_t kMost = std::int64_t{1} << 30, kMostDepth = std::int64_t{1} << 17;  // 127 * 127 * 2^17 < 2^31
  if (gpu.compute_capability < 80) return "the library's need compute capability 8.0 (Ampere) or later";
  if (key.y != DType::bf16) return "the library's give bf16";
  if (of_blocks(key.scales)) return "the library's take no block scales";
  if (key.transpose_a || !key.transpose_b || key.stride_a > 0 || key.stride_b > 0 || key.stride_y > 0)
    return "the library's take contiguous operands with the contracted dimension last";
  if (key.alignment < 16 || key.k % 16 != 0 || key.n % 4 != 0)
    return "the library's sum over a multiple of 16 and give a multiple of 4 columns";
  if (key.m >= kMost || key.n >= kMost || key.k > kMostDepth || key.k == 0) return "the library's are not so large";
  return {};
}

std::size_t library_i8_workspace(const MatmulKey& key) {
  return kMatmulWorkspace + 4 * static_cast<std::size_t>(slab_rows(key) * key.n);
}

Launch prepare_library_i8(const MatmulKey& key, CudaContext& context) {
  const std::int64_t slab = slab_rows(key);
  std::shared_ptr<const MatmulPlan> whole, rest;
  if (key.m > 0 && key.n > 0) {
    whole = plan_of(key, slab, context);
    if (key.m % slab != 0) rest = plan_of(key, key.m % slab, context);
  }
  return [=, lt = context.lt](std::span<const View> in, std::span<const View> out, const Exec& exec) {
    auto data = [&in](std::size_t i) { return i < in.size() ? in[i].data : nullptr; };
    auto* const sums = reinterpret_cast<std::int32_t*>(static_cast<char*>(exec.workspace) + kMatmulWorkspace);
    const auto* const scale_a = static_cast<const float*>(data(3));
    const bool by_row = key.scales == ScaleMode::vector;
    for (std::int64_t row = 0; whole && row < key.m; row += slab) {
      const std::int64_t rows = std::min(slab, key.m - row);
      (rows == slab ? whole : rest)
          ->run(lt,
                {.a = static_cast<const char*>(data(0)) + row * key.k,
                 .b = data(1),
                 .y = sums,
                 .workspace = exec.workspace},
                stream_of(exec));
      scale_accumulators({.of = sums,
                          .scale_a = by_row && scale_a != nullptr ? scale_a + row : scale_a,
                          .scale_b = static_cast<const float*>(data(4)),
                          .bias = key.bias ? static_cast<const __nv_bfloat16*>(data(2)) : nullptr,
                          .y = out[0].as<__nv_bfloat16>() + row * key.n,
                          .columns = key.n,
                          .by_row = by_row,
                          .add = key.accumulate},
                         rows, stream_of(exec));
    }
  };
}

}  // namespace quern::cuda
