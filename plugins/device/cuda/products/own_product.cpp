#include "products/own_product.h"

#include <algorithm>

namespace quern::cuda {

namespace {

const OwnProduct& form_of(const MatmulKey& key) {
  return key.a == DType::i8 ? kI8Product : key.a == DType::e5m2 ? kE5m2Product : kE4m3Product;
}

bool takes_formats(const MatmulKey& key) {
  if (key.a == DType::i8) return key.b == DType::i8;
  return (key.a == DType::e4m3 || key.a == DType::e5m2) && key.b == DType::e4m3;
}

}  // namespace

std::string refuse_own_product(const MatmulKey& key, const CudaTraits& gpu) {
  constexpr std::int64_t kMost = std::int64_t{1} << 30;      // coordinates and numbers of tiles are 32-bit
  constexpr std::int64_t kMostOfI8 = std::int64_t{1} << 17;  // 127 * 127 * 2^17 < 2^31
  if (!gpu.wgmma) return "own products need Hopper's own instructions";
  if (!takes_formats(key)) return "own products are e4m3 or e5m2 times e4m3, or i8 times i8";
  if (key.y != DType::bf16) return "own products give bf16";
  if (key.a != DType::i8 && !key.fast_accumulation) return "own products of floats sum in fewer bits than fp32";
  if (of_blocks(key.scales)) return "own products take no scales of blocks";
  if (key.transpose_a || !key.transpose_b || key.stride_a > 0 || key.stride_b > 0 || key.stride_y > 0)
    return "own products take contiguous operands with the contracted dimension last";
  if (key.alignment < 16 || key.k % 16 != 0 || key.n % 8 != 0)
    return "own products sum over a multiple of 16 and give a multiple of 8 columns";
  if (key.m >= kMost || key.n >= kMost || key.k > (key.a == DType::i8 ? kMostOfI8 : kMost) || key.k == 0)
    return "own products do not take such sizes";
  return {};
}

OwnTiling own_tiling(std::int64_t m, std::int64_t n, std::int64_t k) {
  constexpr std::int64_t kClusters = 66;  // of an H100: whatever the GPU, so that bits are the same
  constexpr std::int64_t kStageDepth = 128, kRowsOfPair = 256;
  constexpr std::int64_t kLeastSaved = 24;  // stages: what writing and adding parts takes
  constexpr double kBesideColumns = 16;     // a tile's time that does not depend on its width, in columns
  const std::int64_t stages = (k + kStageDepth - 1) / kStageDepth;
  OwnTiling best;
  double least = 0;
  for (const int columns : {256, 224, 192}) {
    const std::int64_t pairs = (m + kRowsOfPair - 1) / kRowsOfPair * ((n + columns - 1) / columns);
    const std::int64_t rest = pairs % kClusters;
    std::int64_t parts = rest > 0 ? kClusters / rest : 1;
    parts = std::min(parts, std::max<std::int64_t>(stages / kLeastSaved, 1));
    if (stages - stages / parts < kLeastSaved) parts = 1;
    const double rounds = static_cast<double>(pairs / kClusters) + (rest > 0 ? 1.0 / static_cast<double>(parts) : 0.0);
    const double time = rounds * (columns + kBesideColumns);
    if (least > 0 && time >= least) continue;
    least = time;
    best = {.columns = columns, .divided = parts > 1 ? static_cast<int>(rest) : 0, .parts = static_cast<int>(parts)};
  }
  return best;
}

void load_own_product(const MatmulKey& key) { form_of(key).load(); }

void run_own_product(const MatmulKey& key, const MatmulOperands& operands, int multiprocessors, cudaStream_t stream) {
  form_of(key).run(key, operands, multiprocessors, stream);
}

}  // namespace quern::cuda
