#pragma once
// Configurations of cuBLASLt's GEMMs beyond the few that its heuristic lists. On Hopper one algorithm of the library
// comes in hundreds of tile shapes; the list holds shapes that suit most GEMMs, and leaves a wave half empty where
// another shape would fill it. Tiles are ranked by a model here, and timed elsewhere.

#include <cublasLt.h>

#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace quern::cuda {

class MatmulPlan;
struct MatmulKey;

/// A thread block's part of a GEMM, as cuBLASLt counts: its rows are our columns.
struct MatmulTile {
  cublasLtMatmulTile_t id;
  int rows, columns;
};
std::span<const MatmulTile> matmul_tiles();

/// Predicted rate of a GEMM of (rows, columns), as a share of a rate that no tile reaches.
double predicted_rate(const MatmulTile& tile, std::int64_t rows, std::int64_t columns, int multiprocessors);
/// The `count` best by that, best first.
std::vector<MatmulTile> ranked_tiles(std::int64_t rows, std::int64_t columns, int multiprocessors, std::size_t count);

/// Deterministic configurations that the library accepts and its list lacks.
struct UnlistedCandidates {
  std::vector<cublasLtMatmulAlgo_t> first;  ///< a few of each tile
  std::vector<cublasLtMatmulAlgo_t> rest;   ///< all others, of which the best tiles' are worth a try
  bool empty() const { return first.empty(); }
};
/// `listed` is from the library's heuristic. None where no listed algorithm has tiles to choose from.
UnlistedCandidates unlisted_candidates(cublasLtHandle_t lt, const MatmulPlan& plan, const MatmulKey& key,
                                       std::span<const cublasLtMatmulAlgo_t> listed, int multiprocessors);

/// "112x256 2x1 4": tile, cluster and variant; " /3" behind them for split-K in three.
std::string configuration_text(const cublasLtMatmulAlgo_t& algorithm);
/// The tile's enumerator, also of shapes that are not in the table.
std::uint32_t tile_of(const cublasLtMatmulAlgo_t& algorithm);

}  // namespace quern::cuda
