#include "products/own/own_matmul.h"

#include <algorithm>
#include <utility>

namespace quern::cuda {

namespace {

bool is_bf16(const MatmulKey& key) { return key.a == DType::bf16; }

bool takes_formats(const MatmulKey& key) {
  if (is_bf16(key)) return key.b == DType::bf16;
  if (key.a == DType::i8) return key.b == DType::i8 && !key.turns();
  const auto [first, second] = swaps_operands(key) ? std::pair{key.b, key.a} : std::pair{key.a, key.b};
  return (first == DType::e4m3 || first == DType::e5m2) && second == DType::e4m3;
}

/// In 8 bits: operands' layouts, accumulators and scales.
std::string refuse_8_bits(const MatmulKey& key) {
  if (key.a != DType::i8 && !key.fast_accumulation && (of_blocks(key.scales) || !(key.transpose_a && key.transpose_b)))
    return "own GEMMs of floats accumulate in fewer bits than fp32 unless a is not K-major";
  const bool turns_a = key.transpose_a && key.transpose_b;
  if (of_blocks(key.scales) && (key.a == DType::i8 || (key.turns() && !(key.squares && turns_a))))
    return "own GEMMs with block scales take floats, both K-major, or with tile scales a not K-major";
  if (key.transpose_a && !key.transpose_b) return "own GEMMs need one K-major operand";
  if (key.turns() && (key.scales == ScaleMode::vector || key.bias))
    return "own GEMMs of an operand that is not K-major take one scale of each, and no bias";
  return {};
}

/// TMA takes rows that begin at multiples of 16 bytes.
bool has_even_rows(DType type, std::int64_t columns, std::int64_t stride) {
  return (stride > 0 ? stride : columns) * static_cast<std::int64_t>(size_of(type)) % 16 == 0;
}

constexpr std::int64_t kClusters = 66;  // of an H100: whatever the GPU, so that bits are the same
constexpr std::int64_t kRowsOfPair = 256;

std::int64_t pairs_of_tiles(std::int64_t m, std::int64_t n, std::int64_t columns) {
  return (m + kRowsOfPair - 1) / kRowsOfPair * ((n + columns - 1) / columns);
}

/// Tiles that a cluster takes one after another, those that are left over in `parts`.
double rounds(std::int64_t pairs, std::int64_t parts) {
  const bool rest = pairs % kClusters > 0;
  return static_cast<double>(pairs / kClusters) + (rest ? 1.0 / static_cast<double>(parts) : 0.0);
}

}  // namespace

bool swaps_operands(const MatmulKey& key) { return !is_bf16(key) && !key.transpose_b; }

std::string refuse_own_matmul(const MatmulKey& key, const CudaTraits& gpu) {
  constexpr std::int64_t kMost = std::int64_t{1} << 30;      // coordinates and numbers of tiles are 32-bit
  constexpr std::int64_t kMostOfI8 = std::int64_t{1} << 17;  // 127 * 127 * 2^17 < 2^31
  if (!gpu.wgmma) return "own GEMMs need compute capability 9.0 (Hopper) and its code in this build";
  if (!takes_formats(key)) return "own GEMMs are bf16 times bf16, e4m3 or e5m2 times e4m3, or i8 times i8";
  if (key.y != DType::bf16) return "own GEMMs give bf16";
  if (key.factor != 1 || key.beta != 0) return "own GEMMs have no factor";
  if (key.stack > 0) return "own GEMMs take no stacks";
  if (is_bf16(key) && key.transpose_a && key.transpose_b)
    return "own GEMMs of bf16 take a not K-major only if b is not K-major either";
  if (std::string text = is_bf16(key) ? "" : refuse_8_bits(key); !text.empty()) return text;
  if (key.alignment < 16 || !has_even_rows(key.a, key.transpose_a ? key.m : key.k, key.stride_a) ||
      !has_even_rows(key.b, key.transpose_b ? key.k : key.n, key.stride_b) ||
      !has_even_rows(key.y, key.n, key.stride_y))
    return "own GEMMs take operands whose rows begin at multiples of 16 bytes";
  if (key.n % 2 != 0 && (key.bias || key.scales == ScaleMode::vector))
    return "own GEMMs take biases and scales of an even number of columns";
  if (key.m >= kMost || key.n >= kMost || key.k > (key.a == DType::i8 ? kMostOfI8 : kMost) || key.k == 0)
    return "own GEMMs do not take such sizes";
  return {};
}

OwnTiling own_tiling(std::int64_t m, std::int64_t n, std::int64_t k, DType operands) {
  const auto stage_depth = static_cast<std::int64_t>(128 / size_of(operands));
  constexpr std::int64_t kLeastSaved = 24;  // stages: what writing and adding parts takes
  constexpr double kBesideColumns = 16;     // a tile's time that does not depend on its width, in columns
  const std::int64_t stages = (k + stage_depth - 1) / stage_depth;
  OwnTiling best;
  double least = 0;
  for (const int columns : {256, 224, 192}) {
    const std::int64_t pairs = pairs_of_tiles(m, n, columns), rest = pairs % kClusters;
    std::int64_t parts = rest > 0 ? kClusters / rest : 1;
    parts = std::min(parts, std::max<std::int64_t>(stages / kLeastSaved, 1));
    if (stages - stages / parts < kLeastSaved) parts = 1;
    const double time = rounds(pairs, parts) * (columns + kBesideColumns);
    if (least > 0 && time >= least) continue;
    least = time;
    best = {.columns = columns, .divided = parts > 1 ? static_cast<int>(rest) : 0, .parts = static_cast<int>(parts)};
  }
  return best;
}

double own_matmul_share(std::int64_t m, std::int64_t n, std::int64_t k) {
  constexpr double kBesideSums = 400;  // a tile's time to begin and end, in terms of K
  const OwnTiling tiling = own_tiling(m, n, k, DType::e4m3);
  const double taken = rounds(pairs_of_tiles(m, n, tiling.columns), tiling.parts) *
                       static_cast<double>(kClusters * kRowsOfPair * tiling.columns);
  return taken / std::max(static_cast<double>(m) * static_cast<double>(n), 1.0) *
         (1 + kBesideSums / static_cast<double>(std::max<std::int64_t>(k, 1)));
}

}  // namespace quern::cuda
