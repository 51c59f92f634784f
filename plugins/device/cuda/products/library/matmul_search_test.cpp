// The search for matmuls' algorithms: tiles and names without a GPU; candidates, choices and results with one.
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <set>

#include <doctest/doctest.h>

#include "products/library/matmul_plan.h"
#include "products/library/matmul_scratch.h"
#include "products/library/matmul_tiles.h"
#include "products/library/matmul_timing.h"
#include "runtime/gpu_table.h"
#include "runtime/hopper_kernels.h"
#include "tests/device_pair.h"

using namespace quern;
using namespace quern::cuda;

namespace {

MatmulTile tile(int rows, int columns) {
  for (const MatmulTile& known : matmul_tiles())
    if (known.rows == rows && known.columns == columns) return known;
  FAIL("no tile " << rows << "x" << columns);
  return {};
}

MatmulKey key_of(std::int64_t m, std::int64_t n, std::int64_t k, DType operands = DType::bf16) {
  MatmulKey key;
  key.m = m, key.n = n, key.k = k, key.transpose_b = true;
  key.a = key.b = operands;
  if (size_of(operands) == 1) key.scales = ScaleMode::tensor;
  return key;
}

bool equal(const cublasLtMatmulAlgo_t& x, const cublasLtMatmulAlgo_t& y) { return std::memcmp(&x, &y, sizeof x) == 0; }

/// What a search needs of a GPU of capability 9.0; none: not `here`, and a message says why.
struct Gpu {
  DevicePair pair = open_pair();
  CudaContext context;
  bool here = false;

  Gpu() {
    if (!pair.open) return;
    context.traits = facts_of_unit(0).cuda;
    if (context.traits.compute_capability != 90) {
      MESSAGE("skipped: GEMMs are searched beyond the list on compute capability 9.0 only");
      return;
    }
    here = cublasLtCreate(&context.lt) == CUBLAS_STATUS_SUCCESS &&
           cudaStreamCreateWithFlags(&context.setup, cudaStreamNonBlocking) == cudaSuccess;
    CHECK(here);
  }
  ~Gpu() {
    if (context.setup != nullptr) cudaStreamDestroy(context.setup);
    if (context.lt != nullptr) cublasLtDestroy(context.lt);
  }
};

}  // namespace

TEST_CASE("tiles are of moderate size, each once") {
  std::set<int> ids;
  for (const MatmulTile& t : matmul_tiles()) {
    CAPTURE(t.rows);
    CAPTURE(t.columns);
    CHECK(ids.insert(t.id).second);
    CHECK((std::min(t.rows, t.columns) >= 96 && t.rows % 8 == 0 && t.columns % 8 == 0));
    CHECK((t.rows * t.columns >= 14 << 10 && t.rows * t.columns <= 40 << 10));
  }
}

TEST_CASE("predicted rates tell full waves from empty ones") {
  constexpr int kUnits = 132;
  auto rate = [](const MatmulTile& t, std::int64_t rows, std::int64_t columns) {
    return predicted_rate(t, rows, columns, kUnits);
  };
  // 7B, 4096 tokens, to a width of 3584: 448 tiles are 3.4 waves, 512 are 3.9.
  for (const MatmulTile& better : {tile(112, 256), tile(224, 128), tile(152, 256)})
    for (const MatmulTile& worse : {tile(128, 256), tile(256, 128)})
      CHECK(rate(better, 3584, 4096) > 1.05 * rate(worse, 3584, 4096));
  CHECK(rate(tile(128, 256), 128 * kUnits, 256) > rate(tile(128, 128), 128 * kUnits, 256));  // full both: the larger
  CHECK(rate(tile(128, 256), 128 * kUnits + 1, 256) < 0.51 * rate(tile(128, 256), 128 * kUnits, 256) * 1.01);
  CHECK(rate(tile(128, 256), 1, 1) > 0);
  for (std::int64_t size : {std::int64_t{1}, std::int64_t{1} << 20})
    for (const MatmulTile& t : matmul_tiles()) CHECK(rate(t, size, size) < 1);
}

TEST_CASE("tiles that won on an H100 are among those that are tried") {
  struct Winner {
    std::int64_t rows, columns;
    MatmulTile tile;
  };
  for (const Winner& w : {Winner{3584, 4096, tile(112, 256)}, Winner{3584, 4096, tile(152, 256)},
                          Winner{3584, 4096, tile(224, 128)}, Winner{1536, 16384, tile(192, 128)}}) {
    const std::vector<MatmulTile> tried = ranked_tiles(w.rows, w.columns, 132, 16);
    CHECK(tried.size() == 16);
    CHECK(std::any_of(tried.begin(), tried.end(), [&](const MatmulTile& t) { return t.id == w.tile.id; }));
  }
  CHECK(ranked_tiles(3584, 4096, 132, 1000).size() == matmul_tiles().size());
}

TEST_CASE("only large GEMMs on Hopper are searched beyond the list, and their names say so") {
  CudaTraits hopper, ampere;
  ampere.compute_capability = 80;
  const MatmulKey large = key_of(4096, 3584, 18944), small = key_of(64, 48, 32);
  MatmulKey unaligned = large;
  unaligned.alignment = 16;
  CHECK(search_mark(MatmulSearch::wide, large, hopper) == ", wide");
  CHECK(search_mark(MatmulSearch::wide, unaligned, hopper) == "");
  CHECK(search_mark(MatmulSearch::wide, small, hopper) == "");
  CHECK(search_mark(MatmulSearch::wide, large, ampere) == "");
  CHECK(search_mark(MatmulSearch::listed, large, hopper) == "");
  hopper.products = ProductChoice::automatic, hopper.wgmma = true;
  CHECK(search_mark(MatmulSearch::wide, large, hopper) == ", wide, own");
  MatmulKey e4m3 = key_of(4096, 3584, 18944, DType::e4m3);
  CHECK(search_mark(MatmulSearch::wide, e4m3, hopper) == ", wide");
  e4m3.scales = ScaleMode::square_block, e4m3.fast_accumulation = false;
  CHECK(search_mark(MatmulSearch::wide, e4m3, hopper) == ", wide");
  e4m3.fast_accumulation = true;
  CHECK(search_mark(MatmulSearch::wide, e4m3, hopper) == ", wide, own");
  e4m3.squares = true;
  CHECK(search_mark(MatmulSearch::wide, e4m3, hopper) == ", wide");
  CHECK(search_mark(MatmulSearch::wide, small, hopper) == "");
  CHECK(search_mark(MatmulSearch::listed, large, hopper) == "");
}

TEST_CASE("own GEMMs are taken without timing where the option says so, and with tile scales") {
  CudaTraits hopper, other;
  hopper.wgmma = true;
  MatmulKey blocks = key_of(144, 272, 256, DType::e4m3), squares = blocks;
  blocks.scales = squares.scales = ScaleMode::square_block;
  blocks.fast_accumulation = squares.fast_accumulation = squares.squares = true;
  auto taken = [&](ProductChoice products, const MatmulKey& key) {
    hopper.products = other.products = products;
    CHECK_FALSE(takes_own(key, other));
    return takes_own(key, hopper);
  };
  CHECK(taken(ProductChoice::own, blocks));
  CHECK(taken(ProductChoice::own, squares));
  CHECK_FALSE(taken(ProductChoice::automatic, blocks));
  CHECK(taken(ProductChoice::automatic, squares));
  CHECK_FALSE(taken(ProductChoice::library, squares));
  squares.fast_accumulation = false;
  CHECK_FALSE(taken(ProductChoice::automatic, squares));
}

TEST_CASE("a GEMM with tile scales is quern's own without a search, unless a continued run has another choice") {
  Gpu gpu;
  if (!gpu.here) return;
  gpu.context.traits.wgmma = has_hopper_kernels();
  if (!gpu.context.traits.wgmma) {
    MESSAGE("skipped: own GEMMs are not in this build");
    return;
  }
  gpu.context.multiprocessors = gpu.context.traits.multiprocessors;
  MatmulKey key = key_of(144, 272, 256, DType::e4m3);
  key.scales = ScaleMode::square_block, key.squares = key.fast_accumulation = true;
  auto choice = [&](ProductChoice products, TimedChoices& choices) {
    gpu.context.traits.products = products;
    return MatmulPlans(choices, 8, MatmulSearch::listed).make(gpu.context, key)->choice();
  };
  TimedChoices first("GPU", ""), of_library("GPU", ""), continued("GPU", "");
  CHECK(choice(ProductChoice::automatic, first) == MatmulPlan::kOwn);
  const std::string library = choice(ProductChoice::library, of_library);
  CHECK(library != MatmulPlan::kOwn);
  continued.load(of_library.save());
  CHECK(choice(ProductChoice::automatic, continued) == library);
}

TEST_CASE("matmuls are timed on so many operands that none are left in the cache") {
  constexpr std::size_t kCache = 50u << 20;
  for (const MatmulKey& key : {key_of(64, 64, 64), key_of(4096, 3584, 3584), key_of(4096, 3584, 3584, DType::e4m3),
                               key_of(4096, 37888, 3584)}) {
    const std::size_t sets = sets_beyond(kCache, key), size = size_of(key.a);
    const std::size_t bytes = (key.m + key.n) * key.k * size + key.m * key.n * 2;
    CAPTURE(key.text());
    CHECK((sets == 1 ? bytes : (sets - 1) * bytes) >= kCache);
    CHECK(sets * bytes <= 2 * kCache + bytes);
  }
}

TEST_CASE("candidates beyond the list compute what listed ones do") {
  Gpu gpu;
  if (!gpu.here) return;
  std::vector<MatmulKey> keys{key_of(1000, 776, 520), key_of(1000, 776, 520), key_of(1000, 776, 520),
                              key_of(1008, 784, 528, DType::e4m3), key_of(768, 896, 640, DType::e4m3)};
  keys[0].bias = true;
  keys[1].transpose_a = keys[1].accumulate = true, keys[1].transpose_b = false;
  keys[2].transpose_b = false, keys[2].y = DType::f32;
  keys[3].fast_accumulation = true;
  keys[4].scales = ScaleMode::block;
  for (const MatmulKey& key : keys) {
    CAPTURE(key.text());
    const MatmulPlan plan(key);
    const std::vector<cublasLtMatmulAlgo_t> listed = plan.candidates(gpu.context.lt, 8);
    REQUIRE_FALSE(listed.empty());
    const UnlistedCandidates found =
        unlisted_candidates(gpu.context.lt, plan, key, listed, gpu.context.traits.multiprocessors);
    std::vector<cublasLtMatmulAlgo_t> unlisted = found.first;
    unlisted.insert(unlisted.end(), found.rest.begin(), found.rest.end());
    std::set<std::string> texts;
    for (const cublasLtMatmulAlgo_t& algorithm : unlisted) CHECK(texts.insert(text_of(algorithm)).second);
    const MatmulScratch scratch(key, gpu.context.setup);
    REQUIRE(static_cast<bool>(scratch));
    std::string differing;
    int wrong = 0;
    for (const cublasLtMatmulAlgo_t& algorithm : unlisted) {
      if (gives_same(gpu.context, plan, key, scratch, listed.front(), algorithm)) continue;
      ++wrong;
      differing += " " + configuration_text(algorithm) + ",";
    }
    // Searches leave such candidates out: they are worth knowing, but no fault.
    if (wrong > 0) MESSAGE(key.text() << ": " << wrong << " of " << unlisted.size() << " fail or differ:" << differing);
    CHECK(gives_same(gpu.context, plan, key, scratch, listed.front(), listed.front()));
    if (key.a == DType::bf16) CHECK(unlisted.size() > 20);
    if (key.a == DType::bf16) CHECK(wrong == 0);
  }
}

TEST_CASE("a wide search is done once, and is not taken for a listed one") {
  Gpu gpu;
  if (!gpu.here) return;
  namespace fs = std::filesystem;
  const fs::path folder = fs::temp_directory_path() / ("quern_search_" + std::to_string(getpid()));
  const std::string file = (folder / "cuda.json").string();
  const MatmulKey key = key_of(2048, 3584, 2048);
  cublasLtMatmulAlgo_t found;
  std::string saved;
  {
    TimedChoices choices("GPU", file);
    MatmulPlans plans(choices, 8, MatmulSearch::wide);
    found = plans.make(gpu.context, key)->algorithm();
    saved = choices.save();
  }
  TimedChoices again("GPU", file), resumed("GPU", "");
  auto any = [](const std::string&) { return true; };
  CHECK_FALSE(again.known(key.text(), "", any));
  CHECK(again.known(key.text(), ", wide", any) == text_of(found));
  CHECK(equal(MatmulPlans(again, 8, MatmulSearch::wide).make(gpu.context, key)->algorithm(), found));
  resumed.load(saved);  // a run that is continued keeps what it took, however it searches now
  CHECK(equal(MatmulPlans(resumed, 8, MatmulSearch::listed).make(gpu.context, key)->algorithm(), found));
  fs::remove_all(folder);
}

TEST_CASE("a large GEMM is searched on a part of it, and the chosen one computes the whole") {
  Gpu gpu;
  if (!gpu.here) return;
  // 0.61 TFLOP, more than is screened whole; its longest dimension is halved to a multiple of 128, and is not one.
  for (const MatmulKey& key : {key_of(4104, 17800, 4168), key_of(4112, 17808, 4176, DType::e4m3)}) {
    CAPTURE(key.text());
    REQUIRE(key.flops() > 6e11);
    const MatmulPlan plan(key);
    const std::vector<cublasLtMatmulAlgo_t> listed = plan.candidates(gpu.context.lt, 8);
    REQUIRE_FALSE(listed.empty());
    const TimedChoice choice = choose_by_time(
        gpu.context, key, listed,
        unlisted_candidates(gpu.context.lt, plan, key, listed, gpu.context.traits.multiprocessors), false);
    CHECK(choice.whole);
    CHECK(choice.tried > listed.size());
    const double rate = key.flops() / choice.ms * 1e-9;  // TFLOP/s; with the time of a part it would be beyond the GPU
    CHECK(rate < (key.a == DType::bf16 ? 1000 : 2000));
    CHECK(choice.ms <= choice.listed_ms);
    const MatmulScratch scratch(key, gpu.context.setup);
    REQUIRE(static_cast<bool>(scratch));
    for (const cublasLtMatmulAlgo_t& finalist : choice.finalists)
      CHECK(gives_same(gpu.context, plan, key, scratch, listed.front(), finalist));
  }
}

TEST_CASE("a GEMM without room to be timed whole is timed smaller, which leaves nothing on disk") {
  Gpu gpu;
  if (!gpu.here) return;
  namespace fs = std::filesystem;
  const fs::path folder = fs::temp_directory_path() / ("quern_busy_" + std::to_string(getpid()));
  const std::string file = (folder / "cuda.json").string();
  const MatmulKey key = key_of(8192, 8192, 8192);  // 448 MiB
  std::size_t free_bytes = 0, total_bytes = 0;
  void* others = nullptr;
  REQUIRE(cudaMemGetInfo(&free_bytes, &total_bytes) == cudaSuccess);
  REQUIRE(cudaMalloc(&others, free_bytes - (std::size_t{320} << 20)) == cudaSuccess);
  TimedChoices busy("GPU", file);
  CHECK(MatmulPlans(busy, 2, MatmulSearch::listed).make(gpu.context, key) != nullptr);
  CHECK(busy.taken(key.text()).has_value());
  REQUIRE(cudaMemGetInfo(&free_bytes, &total_bytes) == cudaSuccess);
  cudaFree(others);
  if (free_bytes > std::size_t{320} << 20) {
    MESSAGE("skipped: another program gave memory back meanwhile");
    fs::remove_all(folder);
    return;
  }
  TimedChoices next("GPU", file);
  CHECK_FALSE(next.known(key.text(), "", [](const std::string&) { return true; }));
  fs::remove_all(folder);
}

TEST_CASE("GEMMs that are searched beyond the list equal the CPU's, and are repeatable") {
  // Multiples of the alignment, but of no tile. Results have a deviation of 0.5, in fp32, in another order;
  // the library may round them to bf16 before it adds them to y.
  const DevicePair pair = open_pair();
  if (!pair.open) return;
  const Attributes output{{"transpose_b", std::int64_t{1}}}, gradient{{"transpose_a", std::int64_t{1}}};
  const Extents y{2056, 2328};
  const std::int64_t m = y[0], n = y[1], k = 2184;
  CHECK(search_mark(MatmulSearch::wide, key_of(m, n, k), CudaTraits{}) == ", wide");
  const testkit::Tolerance tolerance = testkit::one_step(DType::bf16, 1e-2);
  OpComparison("matmul", output)
      .in(normal(DType::bf16, {m, k}, 1, 0.1))
      .in(normal(DType::bf16, {n, k}, 2, 0.1))
      .out(DType::bf16, y, tolerance)
      .run(pair);
  OpComparison("matmul", gradient)
      .in(normal(DType::bf16, {k, m}, 3, 0.1))
      .in(normal(DType::bf16, {k, n}, 4, 0.1))
      .sum(DType::bf16, y, tolerance)
      .run(pair);
}
