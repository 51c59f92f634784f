#include "products/library/matmul_tiles.h"

#include <algorithm>
#include <optional>
#include <tuple>

#include "products/library/matmul_plan.h"

namespace quern::cuda {

namespace {

#define QUERN_TILE(rows, columns) \
  { CUBLASLT_MATMUL_TILE_##rows##x##columns, rows, columns }
#define QUERN_TILES(x, y) QUERN_TILE(x, y), QUERN_TILE(y, x)

/// Shapes that were fast in whole GEMMs on an H100, and shapes between them. Larger ones keep too few stages in
/// shared memory; narrower ones load too much.
constexpr MatmulTile kTiles[] = {
    QUERN_TILE(128, 128),  QUERN_TILES(128, 112), QUERN_TILES(128, 144), QUERN_TILES(128, 152), QUERN_TILES(128, 160),
    QUERN_TILES(128, 168), QUERN_TILES(128, 176), QUERN_TILES(128, 184), QUERN_TILES(128, 192), QUERN_TILES(128, 208),
    QUERN_TILES(128, 224), QUERN_TILES(128, 240), QUERN_TILES(128, 256), QUERN_TILES(128, 288), QUERN_TILES(128, 304),
    QUERN_TILES(128, 320), QUERN_TILES(256, 96),  QUERN_TILES(256, 112), QUERN_TILES(256, 136), QUERN_TILES(256, 144),
    QUERN_TILES(256, 152), QUERN_TILES(256, 160), QUERN_TILE(192, 192),  QUERN_TILES(192, 96),  QUERN_TILES(192, 112),
    QUERN_TILES(192, 160), QUERN_TILES(192, 208), QUERN_TILES(384, 96),
};

struct Cluster {
  cublasLtClusterShape_t id;
  const char* name;
};
constexpr Cluster kClusters[] = {
    {CUBLASLT_CLUSTER_SHAPE_2x1x1, "2x1"}, {CUBLASLT_CLUSTER_SHAPE_1x2x1, "1x2"}, {CUBLASLT_CLUSTER_SHAPE_1x1x1, "1x1"},
    {CUBLASLT_CLUSTER_SHAPE_4x1x1, "4x1"}, {CUBLASLT_CLUSTER_SHAPE_1x4x1, "1x4"}, {CUBLASLT_CLUSTER_SHAPE_2x2x1, "2x2"},
    {CUBLASLT_CLUSTER_SHAPE_4x2x1, "4x2"}, {CUBLASLT_CLUSTER_SHAPE_2x4x1, "2x4"}, {CUBLASLT_CLUSTER_SHAPE_4x4x1, "4x4"},
};
constexpr std::size_t kTriedClusters = 3;  ///< the most promising first; larger ones never won

/// By rank; winners that the library did not list were among the first 9, or had the tile of one that it did.
constexpr std::size_t kTriedTiles = 16;
/// Values of the custom option: the order of tiles, which operand is the transposed one, one tile a warpgroup or one
/// for both. The library says how many there are.
constexpr std::uint32_t kMostVariants = 8;
/// An algorithm with at least as many tiles has the shapes of the table; others have ten at most.
constexpr std::size_t kManyTiles = 100;

template <class T>
T read(const cublasLtMatmulAlgo_t& algorithm, cublasLtMatmulAlgoConfigAttributes_t attribute) {
  T value = 0;
  std::size_t written = 0;
  cublasLtMatmulAlgoConfigGetAttribute(&algorithm, attribute, &value, sizeof value, &written);
  return value;
}

template <class T>
bool write(cublasLtMatmulAlgo_t& algorithm, cublasLtMatmulAlgoConfigAttributes_t attribute, T value) {
  return cublasLtMatmulAlgoConfigSetAttribute(&algorithm, attribute, &value, sizeof value) == CUBLAS_STATUS_SUCCESS;
}

std::size_t count_tiles(const cublasLtMatmulAlgo_t& algorithm) {
  std::size_t bytes = 0;
  const cublasStatus_t status =
      cublasLtMatmulAlgoCapGetAttribute(&algorithm, CUBLASLT_ALGO_CAP_TILE_IDS, nullptr, 0, &bytes);
  return status == CUBLAS_STATUS_SUCCESS ? bytes / sizeof(std::uint32_t) : 0;
}

std::uint32_t count_variants(const cublasLtMatmulAlgo_t& algorithm) {
  std::int32_t last = 0;
  std::size_t written = 0;
  const cublasStatus_t status =
      cublasLtMatmulAlgoCapGetAttribute(&algorithm, CUBLASLT_ALGO_CAP_CUSTOM_OPTION_MAX, &last, sizeof last, &written);
  if (status != CUBLAS_STATUS_SUCCESS || last < 0) return 1;
  return std::min(static_cast<std::uint32_t>(last) + 1, kMostVariants);
}

auto configuration_of(const cublasLtMatmulAlgo_t& algorithm) {
  return std::tuple(tile_of(algorithm), read<std::uint16_t>(algorithm, CUBLASLT_ALGO_CONFIG_CLUSTER_SHAPE_ID),
                    read<std::uint32_t>(algorithm, CUBLASLT_ALGO_CONFIG_CUSTOM_OPTION));
}

/// Of a tile, the variants that show whether it suits a GEMM: with these and all others of the best four tiles, none
/// was missed of the fastest configurations of 19 GEMMs in e4m3.
bool is_sample(const cublasLtMatmulAlgo_t& algorithm) {
  const auto [tile, cluster, variant] = configuration_of(algorithm);
  if (cluster == CUBLASLT_CLUSTER_SHAPE_1x2x1) return variant == 0 || variant == 3;
  return cluster == CUBLASLT_CLUSTER_SHAPE_1x1x1 && (variant == 0 || variant == 5);
}

/// Enumerators: the best by rank, then the listed algorithms', of which other variants may be better.
std::vector<std::uint32_t> tried_tiles(const MatmulKey& key, std::span<const cublasLtMatmulAlgo_t> listed,
                                       int multiprocessors) {
  std::vector<std::uint32_t> tiles;
  for (const MatmulTile& tile : ranked_tiles(key.n, key.m, multiprocessors, kTriedTiles)) tiles.push_back(tile.id);
  for (const cublasLtMatmulAlgo_t& algorithm : listed) {
    const std::uint32_t tile = tile_of(algorithm);
    const bool known = std::find(tiles.begin(), tiles.end(), tile) != tiles.end();
    if (!known && tile != CUBLASLT_MATMUL_TILE_UNDEFINED) tiles.push_back(tile);
  }
  return tiles;
}

std::int64_t divide_up(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

}  // namespace

std::span<const MatmulTile> matmul_tiles() { return kTiles; }

double predicted_rate(const MatmulTile& tile, std::int64_t rows, std::int64_t columns, int multiprocessors) {
  const std::int64_t tiles = divide_up(rows, tile.rows) * divide_up(columns, tile.columns);
  const std::int64_t waves = divide_up(tiles, multiprocessors);
  // Elements of the result among the elements that whole waves of whole tiles would give.
  const double filled = static_cast<double>(rows) * static_cast<double>(columns) /
                        (static_cast<double>(waves) * multiprocessors * tile.rows * tile.columns);
  // A tile loads its sides for its area; full waves of 128x128 reached 0.94 of the rate of 128x256.
  constexpr double kLoad = 24;
  return filled / (1 + kLoad / tile.rows + kLoad / tile.columns);
}

std::vector<MatmulTile> ranked_tiles(std::int64_t rows, std::int64_t columns, int multiprocessors, std::size_t count) {
  std::vector<MatmulTile> tiles(std::begin(kTiles), std::end(kTiles));
  std::stable_sort(tiles.begin(), tiles.end(), [&](const MatmulTile& x, const MatmulTile& y) {
    return predicted_rate(x, rows, columns, multiprocessors) > predicted_rate(y, rows, columns, multiprocessors);
  });
  tiles.resize(std::min(count, tiles.size()));
  return tiles;
}

UnlistedCandidates unlisted_candidates(cublasLtHandle_t lt, const MatmulPlan& plan, const MatmulKey& key,
                                       std::span<const cublasLtMatmulAlgo_t> listed, int multiprocessors) {
  auto model = std::find_if(listed.begin(), listed.end(), [](const auto& a) { return count_tiles(a) >= kManyTiles; });
  if (model == listed.end()) return {};
  const std::optional<cublasLtMatmulAlgo_t> plain = plan.plain(lt, read<int>(*model, CUBLASLT_ALGO_CONFIG_ID));
  if (!plain) return {};
  const auto stages = read<std::uint32_t>(*model, CUBLASLT_ALGO_CONFIG_STAGES_ID);
  const std::uint32_t variants = count_variants(*model);
  auto is_listed = [&](const cublasLtMatmulAlgo_t& algorithm) {
    auto same = [&](const auto& other) {
      return read<std::int32_t>(other, CUBLASLT_ALGO_CONFIG_SPLITK_NUM) <= 1 &&
             configuration_of(other) == configuration_of(algorithm);
    };
    return std::any_of(listed.begin(), listed.end(), same);
  };
  UnlistedCandidates found;
  for (std::uint32_t tile : tried_tiles(key, listed, multiprocessors)) {
    std::vector<cublasLtMatmulAlgo_t> of_tile;
    for (const Cluster& cluster : std::span(kClusters).first(kTriedClusters)) {
      for (std::uint32_t variant = 0; variant < variants; ++variant) {
        cublasLtMatmulAlgo_t algorithm = *plain;
        const bool written =
            write(algorithm, CUBLASLT_ALGO_CONFIG_TILE_ID, tile) &&
            write(algorithm, CUBLASLT_ALGO_CONFIG_STAGES_ID, stages) &&
            write(algorithm, CUBLASLT_ALGO_CONFIG_CLUSTER_SHAPE_ID, static_cast<std::uint16_t>(cluster.id)) &&
            write(algorithm, CUBLASLT_ALGO_CONFIG_CUSTOM_OPTION, variant);
        if (written && !is_listed(algorithm) && plan.accepts(lt, algorithm)) of_tile.push_back(algorithm);
      }
    }
    const auto others = std::stable_partition(of_tile.begin(), of_tile.end(), is_sample);
    const auto rest = others == of_tile.begin() && others != of_tile.end() ? others + 1 : others;
    found.first.insert(found.first.end(), of_tile.begin(), rest);
    found.rest.insert(found.rest.end(), rest, of_tile.end());
  }
  return found;
}

std::uint32_t tile_of(const cublasLtMatmulAlgo_t& algorithm) {
  return read<std::uint32_t>(algorithm, CUBLASLT_ALGO_CONFIG_TILE_ID);
}

std::string configuration_text(const cublasLtMatmulAlgo_t& algorithm) {
  const auto [tile_id, cluster_id, variant] = configuration_of(algorithm);
  std::string tile = "tile " + std::to_string(tile_id), cluster = "cluster " + std::to_string(cluster_id);
  for (const MatmulTile& known : kTiles)
    if (known.id == tile_id) tile = std::to_string(known.rows) + "x" + std::to_string(known.columns);
  for (const Cluster& known : kClusters)
    if (known.id == cluster_id) cluster = known.name;
  const auto parts = read<std::int32_t>(algorithm, CUBLASLT_ALGO_CONFIG_SPLITK_NUM);
  return tile + " " + cluster + " " + std::to_string(variant) + (parts > 1 ? " /" + std::to_string(parts) : "");
}

}  // namespace quern::cuda
