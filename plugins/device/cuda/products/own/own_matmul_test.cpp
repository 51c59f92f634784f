// quern's own GEMMs: against the CPU device, and which the library keeps.
#include <algorithm>
#include <cmath>

#include "products/library/matmul_scratch.h"
#include "products/own/own_matmul.h"
#include "quern/testkit/op_cases.h"
#include "runtime/check.h"
#include "runtime/hopper_kernels.h"
#include "tests/device_pair.h"

using namespace quern;
using namespace quern::cuda;

namespace {

constexpr DType kBf16 = DType::bf16, kF32 = DType::f32, kE4m3 = DType::e4m3, kE5m2 = DType::e5m2, kI8 = DType::i8;

struct Size {
  std::int64_t m, n, k;
};
// Less than a tile, edges in every direction, rows that no tile divides, more tiles than multiprocessors, many stages,
// tiles of each width, sums in parts.
constexpr Size kSizes[] = {{1, 8, 16},        {64, 128, 128},   {129, 136, 208}, {304, 208, 80},  {517, 1000, 144},
                           {2208, 4096, 320}, {256, 512, 4096}, {8448, 448, 80}, {8448, 512, 80}, {304, 464, 8208}};

/// 1/2, 1 and 2, by which results of i8 stay exact and errors of sums become at most four times as large.
testkit::PoisonedTensor scales(std::int64_t count, std::uint64_t seed) {
  std::vector<float> values = testkit::random_normal(count, seed, 0.7);
  for (float& value : values) value = std::exp2(std::clamp(std::round(value), -1.0f, 1.0f));
  return {kF32, {count}, values};
}

struct Form {
  DType a, b;
  bool by_row, bias;
  bool a_across = false, b_across = false;  ///< of the sums
  bool fast = true;
};

OpComparison product(const Form& form, const Size& s) {
  OpComparison op("matmul", {{"transpose_a", std::int64_t{form.a_across}},
                             {"transpose_b", std::int64_t{!form.b_across}},
                             {"fast_accumulation", std::int64_t{form.fast}}});
  const double deviation = form.a == kI8 ? 40 : 1;
  op.in(normal(form.a, form.a_across ? Extents{s.k, s.m} : Extents{s.m, s.k}, 1, deviation));
  op.in(normal(form.b, form.b_across ? Extents{s.k, s.n} : Extents{s.n, s.k}, 2, deviation));
  form.bias ? op.in(normal(kBf16, {s.n}, 3)) : op.absent();
  if (form.a == kBf16) return op;
  return op.in(scales(form.by_row ? s.m : 1, 4)).in(scales(form.by_row ? s.n : 1, 5));
}

/// Accumulators of i8 are exact below 2^24 on both devices. Accumulators of floats keep about 14 bits at each of k / 32
/// additions, of a sum of order sqrt(k), twice that in one of millions; scales multiply it by 4 at most. Accumulators
/// of bf16 are cut to fp32 at each of k / 16 additions, all one way: by 2^-22 of a sum or a term, 16 sqrt(k) at most.
Tolerance tolerance(const Form& form, const Size& s) {
  if (form.a == kI8) return {};
  const auto k = static_cast<double>(s.k);
  if (form.a == kBf16) return {0x1p-7, 0x1p-18 * std::fmax(k / 16, 1) * std::sqrt(k)};
  // Of 128 terms at a time, whose sums are added in fp32.
  if (!form.fast) return {0x1p-7, 0x1p-10 * std::sqrt(k) * std::sqrt(128)};
  return {0x1p-7, 0x1p-10 * std::fmax(k / 32, 1) * std::sqrt(k)};
}
/// The result rounds before it is added (docs/numerics.md): by 2^-8 of itself and of the value it is added to, up to 5.
Tolerance added(const Tolerance& written) { return {0x1.8p-7, written.absolute + 0x1p-5}; }

MatmulKey key_of(DType a, DType b, const Size& s) {
  MatmulKey key;
  key.m = s.m, key.n = s.n, key.k = s.k, key.transpose_b = true, key.a = a, key.b = b, key.fast_accumulation = true;
  return key;
}

}  // namespace

TEST_CASE("plans take every form of own GEMMs, with a GPU or without") {
  const DevicePair pair = open_pair({.products = "own"});
  auto refusal = [&](const Form& form) {
    return pair.gpu->query(product(form, {64, 128, 256}).out(kBf16, {64, 128}, {}).instance()).refusal;
  };
  if (!has_hopper_kernels()) {
    CHECK(refusal({kE4m3, kE4m3, false, false, true, false, true}).find("Hopper") != std::string::npos);
    return;
  }
  for (const bool bias : {false, true}) {
    for (const auto& [a_across, b_across] : {std::pair{false, false}, {false, true}, {true, true}, {true, false}})
      CHECK(refusal({kBf16, kBf16, false, bias, a_across, b_across}) == "");
    for (const bool by_row : {false, true})
      for (auto [a, b] : {std::pair{kI8, kI8}, {kE4m3, kE4m3}, {kE5m2, kE4m3}})
        CHECK(refusal({a, b, by_row, bias}) == "");
  }
  for (const bool fast : {false, true})
    for (auto a : {kE4m3, kE5m2}) CHECK(refusal({a, kE4m3, false, false, true, false, fast}) == "");
  for (auto b : {kE4m3, kE5m2}) CHECK(refusal({kE4m3, b, false, false, false, true}) == "");
}

TEST_CASE("own GEMMs of bf16 equal the CPU's, written and added, with a bias") {
  const DevicePair pair = open_pair({.products = "own"});
  if (!runs_hopper_kernels(pair)) return;
  std::vector<Size> sizes(std::begin(kSizes), std::end(kSizes));
  // Besides, sums that end inside a step of 16, rows and columns that end inside a box.
  sizes.insert(sizes.end(), {{8, 8, 8}, {136, 264, 72}, {72, 904, 1000}, {1000, 200, 1544}});
  for (const auto& [a_across, b_across] : {std::pair{false, false}, {false, true}, {true, true}, {true, false}})
    for (const Size& s : sizes) {
      if (!affordable(s.m * s.n, s.m * s.n * s.k)) continue;
      const Form form{kBf16, kBf16, false, false, a_across, b_across},
          biased{kBf16, kBf16, false, true, a_across, b_across};
      CAPTURE(s.m);
      CAPTURE(s.n);
      CAPTURE(s.k);
      product(form, s).out(kBf16, {s.m, s.n}, tolerance(form, s)).run(pair);
      product(form, s).sum(kBf16, {s.m, s.n}, added(tolerance(form, s))).run(pair);
      product(biased, s).out(kBf16, {s.m, s.n}, tolerance(form, s)).run(pair);
    }
  testkit::matmul_cases(pair);
  testkit::matmul_bias_cases(pair);
}

TEST_CASE("the LM head's own GEMMs take rows that are strides apart") {
  const DevicePair pair = open_pair({.products = "own"});
  if (!runs_hopper_kernels(pair)) return;
  constexpr testkit::LossShape kChunks[] = {{300, 64, 1001, 128}};  // an odd vocabulary, and a shorter chunk
  testkit::loss_cases(pair, testkit::kLossShapes);
  testkit::loss_cases(pair, kChunks);
  testkit::capped_logits_cases(pair, testkit::kLossShapes);
}

TEST_CASE("bits of an own GEMM are the same on any number of multiprocessors") {
  const DevicePair pair = open_pair({.products = "own"});
  if (!runs_hopper_kernels(pair)) return;
  auto bf16 = [](const Size& s, bool across) {
    MatmulKey key = key_of(kBf16, kBf16, s);
    key.transpose_a = across, key.transpose_b = !across;
    return key;
  };
  auto float8 = [](DType a, const Size& s, ScaleMode scales, bool squares = false) {
    MatmulKey key = key_of(a, kE4m3, s);
    key.scales = scales;
    key.squares = squares;
    return key;
  };
  auto turned = [](MatmulKey key) {
    key.transpose_a = true;
    return key;
  };
  // In parts, in tiles of each width.
  for (const Size& s : {Size{48, 208, 6400}, Size{520, 512, 8192}, Size{304, 464, 8192}, Size{1024, 1808, 8192},
                        Size{1024, 1552, 8192}}) {
    if (!affordable(s.m * s.n, s.m * s.n * s.k)) continue;
    for (const MatmulKey& key :
         {bf16(s, false), bf16(s, true), float8(kE4m3, s, ScaleMode::vector), float8(kE4m3, s, ScaleMode::block),
          float8(kE4m3, s, ScaleMode::square_block), float8(kE4m3, s, ScaleMode::square_block, true),
          float8(kE5m2, s, ScaleMode::block), float8(kE5m2, s, ScaleMode::square_block),
          float8(kE5m2, s, ScaleMode::square_block, true), turned(float8(kE4m3, s, ScaleMode::square_block, true)),
          turned(float8(kE5m2, s, ScaleMode::square_block, true))}) {
      if (key.transpose_a && key.a != kBf16 && s.m % 16 != 0) continue;  // rows of bytes begin at multiples of 16
      CAPTURE(key.text());
      CHECK(own_tiling(s.m, s.n, s.k, key.a).parts > 1);
      const MatmulScratch scratch(key, nullptr);
      REQUIRE(static_cast<bool>(scratch));
      hopper_kernels().load_own_matmul(key);
      auto result = [&](int multiprocessors) {
        scratch.reset_result(0xff);
        hopper_kernels().run_own_matmul(key, scratch.operands(), multiprocessors, nullptr);
        std::vector<std::uint16_t> y(static_cast<std::size_t>(s.m * s.n));
        QUERN_CUDA(cudaMemcpy(y.data(), scratch.operands().y, 2 * y.size(), cudaMemcpyDeviceToHost));
        return y;
      };
      const std::vector<std::uint16_t> all = result(132);
      for (const int fewer : all_or_one({2, 14, 66})) CHECK(result(fewer) == all);
    }
  }
}

TEST_CASE("own GEMMs of 8-bit operands equal the CPU's, written and added") {
  const DevicePair pair = open_pair({.products = "own"});
  if (!runs_hopper_kernels(pair)) return;
  for (auto [a, b] : {std::pair{kI8, kI8}, {kE4m3, kE4m3}, {kE5m2, kE4m3}}) {
    for (bool by_row : {false, true}) {
      for (const Size& s : kSizes) {
        // The library's GEMMs of floats, which take multiples of 16 only, stand behind the same op.
        if (a != kI8 && (s.m % 16 != 0 || s.n % 16 != 0)) continue;
        if (!affordable(s.m * s.n, s.m * s.n * s.k)) continue;
        const Form form{a, b, by_row, false}, biased{a, b, by_row, true};
        product(form, s).out(kBf16, {s.m, s.n}, tolerance(form, s)).run(pair);
        product(form, s).sum(kBf16, {s.m, s.n}, added(tolerance(form, s))).run(pair);
        product(biased, s).out(kBf16, {s.m, s.n}, tolerance(form, s)).run(pair);
      }
    }
  }
}

TEST_CASE("GEMMs of an operand that is not K-major equal the CPU's, written and added") {
  DevicePair pair = open_pair({});
  // Besides, tiles that end inside an eight, sums that end inside a stage and in an odd number of stages.
  std::vector<Size> sizes(std::begin(kSizes), std::end(kSizes));
  sizes.insert(sizes.end(), {{16, 16, 16}, {144, 16, 400}, {912, 272, 272}, {4864, 896, 2064}});
  const Form forms[] = {
      {kE4m3, kE4m3, false, false, true, false},        {kE5m2, kE4m3, false, false, true, false},
      {kE4m3, kE4m3, false, false, false, true},        {kE4m3, kE4m3, false, false, true, false, false},
      {kE5m2, kE4m3, false, false, true, false, false}, {kE4m3, kE4m3, false, false, false, true},
      {kE4m3, kE5m2, false, false, false, true}};
  if (!runs_hopper_kernels(pair)) return;
  for (const Form& form : forms)
    for (const Size& s : sizes) {
      if (s.m % 16 != 0 || s.n % 16 != 0 || !affordable(s.m * s.n, s.m * s.n * s.k)) continue;
      CAPTURE(s.m);
      CAPTURE(s.n);
      CAPTURE(s.k);
      product(form, s).out(kBf16, {s.m, s.n}, tolerance(form, s)).run(pair);
      product(form, s).sum(kBf16, {s.m, s.n}, added(tolerance(form, s))).run(pair);
    }
}

TEST_CASE("GEMMs of i8 that quern's own do not take equal the CPU's through the library, written and added") {
  DevicePair pair = open_pair({});
  if (!has_libraries()) return;
  for (bool by_row : {false, true}) {
    // Columns that own GEMMs do not take; several slabs of rows, the last shorter.
    for (const Size& s : {Size{1, 4, 16}, {129, 12, 208}, {517, 1004, 144}, {300, 70004, 32}}) {
      const Form form{kI8, kI8, by_row, false}, biased{kI8, kI8, by_row, true};
      product(form, s).out(kBf16, {s.m, s.n}, {}).run(pair);
      product(form, s).sum(kBf16, {s.m, s.n}, added({})).run(pair);
      product(biased, s).out(kBf16, {s.m, s.n}, {}).run(pair);
    }
  }
}

TEST_CASE("own GEMMs leave unsupported matmuls to the library") {
  CudaTraits hopper;
  hopper.wgmma = true;
  auto refusal = [&](DType a, DType b, const Size& s, auto change) {
    MatmulKey key = key_of(a, b, s);
    change(key);
    return refuse_own_matmul(key, hopper);
  };
  const Size even{128, 128, 128};
  auto as_it_is = [](MatmulKey&) {};
  auto both_across = [](MatmulKey& key) { key.transpose_a = true, key.transpose_b = false; };
  for (auto [a, b] : {std::pair{kI8, kI8}, {kE4m3, kE4m3}, {kE5m2, kE4m3}}) CHECK(refusal(a, b, even, as_it_is) == "");
  CHECK(refusal(kI8, kI8, {127, 8, 16}, as_it_is) == "");
  CHECK(refusal(kE4m3, kE5m2, even, as_it_is) != "");
  CHECK(refusal(kBf16, kBf16, even, as_it_is) == "");
  CHECK(refusal(kBf16, kBf16, {127, 8, 24}, as_it_is) == "");
  CHECK(refusal(kBf16, kE4m3, even, as_it_is) != "");
  CHECK(refusal(kBf16, kBf16, {16, 16, 20}, as_it_is) != "");
  CHECK(refusal(kBf16, kBf16, {16, 12, 16}, as_it_is) != "");
  CHECK(refusal(kBf16, kBf16, even, [](MatmulKey& key) { key.y = kF32; }) != "");
  CHECK(refusal(kBf16, kBf16, even, [](MatmulKey& key) { key.alignment = 8; }) != "");
  CHECK(refusal(kBf16, kBf16, {8, 8, 9}, both_across) == "");
  CHECK(refusal(kBf16, kBf16, {9, 8, 8}, both_across) != "");
  CHECK(refusal(kBf16, kBf16, even, [](MatmulKey& key) { key.transpose_a = true; }) != "");
  CHECK(refusal(kBf16, kBf16, {8, 9, 8}, [](MatmulKey& key) { key.stride_y = 16; }) == "");
  CHECK(refusal(kBf16, kBf16, {8, 9, 8}, [](MatmulKey& key) { key.stride_y = 16, key.bias = true; }) != "");
  CHECK(refusal(kBf16, kBf16, even, [](MatmulKey& key) { key.stride_a = 132; }) != "");
  CHECK(refusal(kI8, kI8, {16, 16, (1 << 17) + 16}, as_it_is) != "");
  CHECK(refusal(kE4m3, kE4m3, {16, 16, 24}, as_it_is) != "");
  CHECK(refusal(kE4m3, kE4m3, {16, 12, 32}, as_it_is) != "");
  CHECK(refusal(kE4m3, kE4m3, even, [](MatmulKey& key) { key.fast_accumulation = false; }) != "");
  CHECK(refusal(kI8, kI8, even, [](MatmulKey& key) { key.fast_accumulation = false; }) == "");
  auto of_blocks = [](MatmulKey& key) { key.scales = ScaleMode::block; };
  auto across = [](bool squares, bool of_b = false) {
    return [squares, of_b](MatmulKey& key) {
      key.scales = ScaleMode::block;
      key.squares = squares;
      (of_b ? key.transpose_b : key.transpose_a) = !of_b;
    };
  };
  for (DType a : {kE4m3, kE5m2}) {
    CHECK(refusal(a, kE4m3, even, of_blocks) == "");
    CHECK(refusal(a, kE4m3, even, [](MatmulKey& key) { key.scales = ScaleMode::square_block; }) == "");
    CHECK(refusal(a, kE4m3, even, across(true)) == "");
    CHECK(refusal(a, kE4m3, even, across(false)) != "");
    CHECK(refusal(a, kE4m3, even, across(true, true)) != "");
  }
  CHECK(refusal(kE4m3, kE5m2, even, of_blocks) != "");
  CHECK(refusal(kI8, kI8, even, of_blocks) != "");
  CHECK(refusal(kE4m3, kE4m3, even, [](MatmulKey& key) { key.y = kF32; }) != "");
  CHECK(refusal(kE4m3, kE4m3, even, [](MatmulKey& key) { key.transpose_b = false; }) == "");
  CHECK(refusal(kE4m3, kE5m2, even, [](MatmulKey& key) { key.transpose_b = false; }) == "");
  CHECK(refusal(kE5m2, kE4m3, even, [](MatmulKey& key) { key.transpose_b = false; }) != "");
  CHECK(refusal(kE5m2, kE4m3, even, [](MatmulKey& key) { key.transpose_a = true; }) == "");
  CHECK(refusal(kE4m3, kE4m3, even, both_across) != "");
  CHECK(refusal(kE4m3, kE4m3, {24, 32, 32}, [](MatmulKey& key) { key.transpose_a = true; }) != "");
  CHECK(refusal(kI8, kI8, even, [](MatmulKey& key) { key.transpose_a = true; }) != "");
  CHECK(refusal(kE4m3, kE4m3, even, [](MatmulKey& key) { key.stride_y = 132; }) != "");
  hopper.wgmma = false;
  CHECK(refusal(kE4m3, kE4m3, even, as_it_is).find("Hopper") != std::string::npos);
}

TEST_CASE("how a GEMM is divided is a property of its shape") {
  struct Case {
    Size size;
    OwnTiling tiling;
    DType operands = kE4m3;
  };
  // Tiles as wide as leaves the fewest columns empty and the fewest clusters idle; parts only where sums are long.
  const Case cases[] = {{{32768, 9728, 896}, {.columns = 256, .divided = 0, .parts = 1}},
                        {{32768, 896, 4864}, {.columns = 224, .divided = 0, .parts = 1}},
                        {{32768, 1152, 896}, {.columns = 192, .divided = 0, .parts = 1}},
                        {{896, 896, 32768}, {.columns = 224, .divided = 16, .parts = 4}},
                        {{896, 4864, 32768}, {.columns = 256, .divided = 10, .parts = 6}},
                        {{9728, 896, 32768}, {.columns = 224, .divided = 20, .parts = 3}},
                        {{8448, 448, 80}, {.columns = 224, .divided = 0, .parts = 1}},
                        {{8448, 512, 80}, {.columns = 256, .divided = 0, .parts = 1}},
                        {{304, 464, 8208}, {.columns = 192, .divided = 6, .parts = 2}},
                        // K in bf16 has twice as many stages.
                        {{4096, 3584, 3584}, {.columns = 224, .divided = 0, .parts = 1}},
                        {{4096, 3584, 3584}, {.columns = 256, .divided = 26, .parts = 2}, kBf16}};
  for (const Case& c : cases) {
    CAPTURE(c.size.m);
    CAPTURE(c.size.n);
    CAPTURE(c.size.k);
    const OwnTiling found = own_tiling(c.size.m, c.size.n, c.size.k, c.operands);
    CHECK(found.columns == c.tiling.columns);
    CHECK(found.divided == c.tiling.divided);
    CHECK(found.parts == c.tiling.parts);
  }
}
