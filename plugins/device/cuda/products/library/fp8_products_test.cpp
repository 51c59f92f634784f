// Matmuls of 8-bit operands: the LM head's against the CPU device, and refusals.
#include <cmath>

#include "quern/block_scales.h"
#include "quern/step_state.h"
#include "tests/device_pair.h"
#include "tests/random_scales.h"

using namespace quern;
using namespace quern::cuda;

namespace {

constexpr DType kBf16 = DType::bf16, kF32 = DType::f32;

std::int64_t flag(bool value) { return value ? 1 : 0; }

struct Sizes {
  std::int64_t m, n, k;
  bool transpose_a, transpose_b;
};

/// x or a weight with its quantized values, their scale and their transpose.
struct Quantized {
  testkit::PoisonedTensor wide, codes, scale, turned;
};
Quantized quantized(const Extents& size, DType format, std::uint64_t seed) {
  const std::vector<float> values = testkit::random_normal(size[0] * size[1], seed, 0.5);
  constexpr float kScale = 0x1p-4f;
  std::vector<float> scaled, turned(values.size());
  for (float value : values) scaled.push_back(value / kScale);
  for (std::int64_t row = 0; row < size[0]; ++row)
    for (std::int64_t column = 0; column < size[1]; ++column)
      turned[static_cast<std::size_t>(column * size[0] + row)] =
          scaled[static_cast<std::size_t>(row * size[1] + column)];
  using testkit::PoisonedTensor;
  return {PoisonedTensor(kBf16, size, values), PoisonedTensor(format, size, scaled),
          PoisonedTensor(kF32, {1}, std::vector<float>{kScale}), PoisonedTensor(format, {size[1], size[0]}, turned)};
}

}  // namespace

namespace {

/// The figures of the logits' gradients: logits differ in the last bits, so that a few of the least become zero on one
/// device alone.
void check_observed(const DevicePair& pair, const OpComparison& op, DType format) {
  std::vector<std::string> faults;
  auto seen = [&](Device& device) {
    return *op.run_on(device, OpComparison::How::eager, faults)[3].view().as<ScaleObservation>();
  };
  const ScaleObservation want = seen(*pair.cpu), got = seen(*pair.gpu);
  CHECK(faults.empty());
  CHECK(got.elements == want.elements);
  CHECK(got.elements > 0);
  CHECK(got.largest_scale == want.largest_scale);
  CHECK(got.smallest_scale == want.smallest_scale);
  CHECK(got.clipped == 0);
  CHECK(got.amax == doctest::Approx(double{want.amax}).epsilon(format == DType::e4m3 ? 0.125 : 0.25));
  const double few = 0.01 * static_cast<double>(want.elements) + 2;
  CHECK(std::fabs(static_cast<double>(got.underflowed) - static_cast<double>(want.underflowed)) < few);
}

}  // namespace

TEST_CASE("lm_loss and its gradients from quantized values") {
  DevicePair pair = open_pair();
  struct Shape {
    std::int64_t tokens, width, vocabulary, chunk;
    double cap = 0;
  };
  for (Shape s : {Shape{64, 32, 256, 64}, Shape{48, 32, 1008, 16}, Shape{48, 32, 1008, 16, 1.5},
                  Shape{80, 64, 9008, 48}, Shape{16, 16, 152064, 16}, Shape{16, 16, 152064, 16, 1.5}}) {
    CAPTURE(s.cap);
    CAPTURE(s.vocabulary);
    for (DType gradient_format : {DType::e4m3, DType::e5m2}) {
      Attributes attributes{{"chunk", s.chunk},
                            {"seed", 4.0},
                            {"z_loss", 0.001},
                            {"cap", s.cap},
                            {"gradient_format", std::string(name_of(gradient_format))}};
      const Quantized x = quantized({s.tokens, s.width}, DType::e4m3, 1),
                      weight = quantized({s.vocabulary, s.width}, DType::e4m3, 2);
      auto inputs = [&](const char* kind) {
        OpComparison op(kind, attributes);
        op.in(x.wide).in(weight.wide).in(integers(s.tokens, -1, s.vocabulary, 3));
        op.in(x.codes).in(x.scale).in(x.turned).in(weight.codes).in(weight.scale).in(weight.turned);
        return op;
      };
      std::string refusal = pair.gpu->query(inputs("lm_loss").out(kF32, {s.tokens}, {}).instance()).refusal;
      if (refusal.find("compute capability") != std::string::npos) {
        MESSAGE("skipped: " << refusal);
        return;
      }
      // As for bf16 operands; besides, tensor cores accumulate in fewer bits, and a gradient may round to either of two
      // values, an eighth or a quarter apart.
      const Tolerance loss{1e-3, 0.07};
      const double step = gradient_format == DType::e4m3 ? 0.125 : 0.25;
      const Tolerance gradient{0.03 + step / 4, 0.06 + step / 4};
      inputs("lm_loss").out(kF32, {s.tokens}, loss).run(pair);
      auto train = [&] { return inputs("lm_loss_train").out(kF32, {s.tokens}, loss); };
      const Extents dx{s.tokens, s.width}, dweight{s.vocabulary, s.width};
      train().out(kBf16, dx, gradient).out(kBf16, dweight, gradient).run(pair);
      train().out(kBf16, dx, gradient).sum(kF32, dweight, gradient).run(pair);
      train().unread(kBf16, dx).sum(kBf16, dweight, gradient).run(pair);
      const OpComparison observed =
          train().out(kBf16, dx, gradient).out(kBf16, dweight, gradient).opaque(DType::u32, {kScaleObservationWords});
      CHECK(pair.gpu->query(observed.instance()).refusal == "");
      if (pair.open && has_libraries()) check_observed(pair, observed, gradient_format);
    }
  }
}

namespace {

/// `squares`: scales are of 128 x 128 elements of both operands.
OpComparison block_product(DType a, DType b, const Sizes& s, std::int64_t scale_rows, bool squares = false) {
  OpComparison op("matmul", {{"transpose_a", flag(s.transpose_a)},
                             {"transpose_b", std::int64_t{1}},
                             {"scale_rows_b", scale_rows},
                             {"square_scales", flag(squares)},
                             {"fast_accumulation", std::int64_t{1}}});
  op.in(normal(a, s.transpose_a ? Extents{s.k, s.m} : Extents{s.m, s.k}, 1)).in(normal(b, {s.n, s.k}, 2)).absent();
  auto of_lines = [&](std::int64_t rows, std::uint64_t seed) {
    return squares ? spread_scales(rows, s.k, seed) : block_scales(row_block_scales(rows, s.k), seed);
  };
  op.in(of_lines(s.m, 3));
  op.in(scale_rows == 1 ? of_lines(s.n, 4) : block_scales(square_scales(s.n, s.k), 4));
  return op;
}

/// Written and added, to y of each type. `slack`: error of the sums; `added`: more, where the result is rounded before
/// it is added.
void check_block_product(const DevicePair& pair, DType a, DType b, std::int64_t scale_rows, const Sizes& s,
                         std::initializer_list<DType> of, double slack, double added, bool squares = false) {
  CAPTURE(name_of(a));
  CAPTURE(scale_rows);
  CAPTURE(squares);
  CAPTURE(s.transpose_a);
  CAPTURE(s.m);
  CAPTURE(s.n);
  CAPTURE(s.k);
  if (!affordable(s.m * s.n, s.m * s.n * s.k)) return;
  for (DType out : of) {
    const double relative = out == kBf16 ? 0x1p-7 : 0x1p-10;
    block_product(a, b, s, scale_rows, squares).out(out, {s.m, s.n}, {relative, slack}).run(pair);
    block_product(a, b, s, scale_rows, squares).sum(out, {s.m, s.n}, {relative, slack + added}).run(pair);
  }
}

bool takes_blocks(const DevicePair& pair) {
  const OpComparison op = block_product(DType::e4m3, DType::e4m3, {128, 128, 128, false, true}, 1);
  const std::string refusal = pair.gpu->query(OpComparison(op).out(kBf16, {128, 128}, {}).instance()).refusal;
  if (refusal.find("compute capability") == std::string::npos) return true;
  MESSAGE("skipped: " << refusal);
  return false;
}

}  // namespace

TEST_CASE("matmul: operands with block scales") {
  DevicePair pair = open_pair({.products = "library"});
  if (!takes_blocks(pair) || !has_libraries()) return;
  for (auto [a, b] : {std::pair{DType::e4m3, DType::e4m3}, {DType::e5m2, DType::e4m3}})
    for (std::int64_t scale_rows : {1, 128})
      for (Sizes s : {Sizes{128, 128, 128, false, true}, Sizes{256, 384, 640, false, true},
                      Sizes{1024, 1152, 896, false, true}, Sizes{272, 144, 1408, false, true}}) {
        // Tensor cores keep about 14 bits of each block's sum, of order sqrt(128) times scales of up to 64.
        const double slack = 0x1p-12 * 64 * std::sqrt(static_cast<double>(s.k));
        check_block_product(pair, a, b, scale_rows, s, {kBf16, kF32}, slack, 0);
      }
}

TEST_CASE("own GEMMs with block and tile scales equal the CPU's, written and added") {
  DevicePair pair = open_pair({.products = "own"});
  if (!pair.open || !takes_blocks(pair)) return;
  // Less than a tile, edges in every direction, tiles of each width, sums of one block, in parts.
  constexpr Sizes kSizes[] = {{16, 16, 128, false, true},    {128, 128, 256, false, true},
                              {272, 144, 1408, false, true}, {304, 464, 8192, false, true},
                              {8448, 448, 128, false, true}, {8448, 512, 256, false, true},
                              {2208, 4096, 384, false, true}};
  // A sum of order 3 sqrt(k) loses up to 2^-13 of itself at each of k / 32 additions; the worst of millions is five
  // times as large. Scales of 128 x 128 elements are the same for many of them: there, four times that.
  auto check = [&pair](const Sizes& s, std::int64_t scale_rows, bool squares) {
    const auto k = static_cast<double>(s.k);
    for (DType a : {DType::e4m3, DType::e5m2})
      check_block_product(pair, a, DType::e4m3, scale_rows, s, {kBf16},
                          (squares ? 4 : 1) * 0x1p-9 * k / 32 * std::sqrt(k), 0x1p-5, squares);
  };
  for (std::int64_t scale_rows : {1, 128})
    for (Sizes s : kSizes) {
      for (bool squares : {false, true}) check(s, scale_rows, squares);
      s.transpose_a = true;
      check(s, scale_rows, true);
    }
}

TEST_CASE("blocks of zeros, whose scale is 1, leave the sums of blocks with small scales alone") {
  constexpr std::int64_t kM = 144, kN = 272, kK = 1024;
  constexpr double kSmall = 0x1p-40, kLarge = 80;  // values of b up to 400
  for (const char* products : {"library", "own"}) {
    CAPTURE(products);
    DevicePair pair = open_pair({.products = products});
    if (!pair.open || !takes_blocks(pair)) return;
    std::vector<float> codes = testkit::random_normal(kM * kK, 1, 1), scales(kM * kK / kScaleBlock, kSmall);
    for (std::int64_t block = 1; block < kK / kScaleBlock; block += 2)
      for (std::int64_t row = 0; row < kM; ++row) {
        scales[static_cast<std::size_t>(block * kM + row)] = 1;
        std::fill_n(codes.begin() + row * kK + block * kScaleBlock, kScaleBlock, 0.0f);
      }
    std::vector<float> turned(codes.size());
    for (std::int64_t row = 0; row < kM; ++row)
      for (std::int64_t i = 0; i < kK; ++i)
        turned[static_cast<std::size_t>(i * kM + row)] = codes[static_cast<std::size_t>(row * kK + i)];
    auto check = [&](DType a, std::int64_t scale_rows, bool squares, bool transpose_a) {
      CAPTURE(name_of(a));
      CAPTURE(scale_rows);
      CAPTURE(squares);
      CAPTURE(transpose_a);
      OpComparison op("matmul", {{"transpose_a", flag(transpose_a)},
                                 {"transpose_b", std::int64_t{1}},
                                 {"scale_rows_b", scale_rows},
                                 {"square_scales", flag(squares)},
                                 {"fast_accumulation", std::int64_t{1}}});
      op.in(testkit::PoisonedTensor(a, transpose_a ? Extents{kK, kM} : Extents{kM, kK}, transpose_a ? turned : codes))
          .in(normal(DType::e4m3, {kN, kK}, 2, kLarge))
          .absent();
      op.in(testkit::PoisonedTensor(kF32, row_block_scales(kM, kK), scales))
          .in(squares           ? spread_scales(kN, kK, 4)
              : scale_rows == 1 ? block_scales(row_block_scales(kN, kK), 4)
                                : block_scales(square_scales(kN, kK), 4));
      const double slack = (squares ? 4 : 1) * kSmall * kLarge * 0x1p-9 * kK / 32 * std::sqrt(kK);
      op.out(kBf16, {kM, kN}, {0x1p-7, slack}).run(pair);
    };
    for (DType a : {DType::e4m3, DType::e5m2}) {
      for (std::int64_t scale_rows : {1, 128}) check(a, scale_rows, false, false);
      for (bool transpose_a : {false, true}) check(a, 1, true, transpose_a);
    }
  }
}

TEST_CASE("unsupported matmuls with block scales are refused when planning, with the reason") {
  DevicePair pair = open_pair();
  auto refusal = [&](const Sizes& s, std::int64_t scale_rows) {
    return pair.gpu->query(block_product(DType::e4m3, DType::e4m3, s, scale_rows).out(kBf16, {s.m, s.n}, {}).instance())
        .refusal;
  };
  const std::string fits = refusal({32, 32, 128, false, true}, 1);
  if (fits.find("compute capability") != std::string::npos) return;
  CHECK(fits == "");
  CHECK(refusal({32, 48, 256, false, true}, 128) == "");
  CHECK(refusal({32, 32, 192, false, true}, 1) ==
        "matmul: block scales need a contracted dimension that is a multiple of 128, found 192");
  CHECK(refusal({32, 32, 128, false, true}, 64) == "matmul: scale_rows_b must be 1 or 128");
  OpComparison wrong("matmul", {{"transpose_b", std::int64_t{1}}, {"scale_rows_b", std::int64_t{1}}});
  wrong.in(normal(DType::e4m3, {32, 256}, 1)).in(normal(DType::e4m3, {48, 256}, 2)).absent();
  wrong.in(normal(kF32, {1}, 3)).in(normal(kF32, {2, 48}, 4)).out(kBf16, {32, 48}, {});
  CHECK(pair.gpu->query(wrong.instance()).refusal == "matmul: block scales must be f32 (2, 32) and (2, 48)");
}

TEST_CASE("unsupported 8-bit matmuls are refused when planning, with the reason") {
  DevicePair pair = open_pair();
  auto refusal = [&](DType a, DType b, const Sizes& s, std::vector<std::int64_t> scales = {1, 1}) {
    OpComparison op("matmul", {{"transpose_a", flag(s.transpose_a)}, {"transpose_b", flag(s.transpose_b)}});
    Extents left = s.transpose_a ? Extents{s.k, s.m} : Extents{s.m, s.k};
    Extents right = s.transpose_b ? Extents{s.n, s.k} : Extents{s.k, s.n};
    op.in(normal(a, left, 1)).in(normal(b, right, 2)).absent();
    op.in(normal(kF32, {scales[0]}, 3)).in(normal(kF32, {scales[1]}, 4)).out(kBf16, {s.m, s.n}, {});
    return pair.gpu->query(op.instance()).refusal;
  };
  const DType e4m3 = DType::e4m3, e5m2 = DType::e5m2;
  if (refusal(e4m3, e4m3, {32, 32, 32, false, true}).find("compute capability") != std::string::npos) return;
  CHECK(refusal(e4m3, e4m3, {32, 32, 32, false, true}) == "");
  auto says = [](const std::string& text, const char* word) { return text.find(word) != std::string::npos; };
  CHECK(says(refusal(e5m2, e5m2, {32, 32, 32, false, true}), "at most one"));
  CHECK(says(refusal(e4m3, e4m3, {32, 32, 32, false, false}), "come last"));
  CHECK(says(refusal(e4m3, e4m3, {32, 32, 32, true, false}), "come last"));
  CHECK(says(refusal(e4m3, e4m3, {32, 24, 32, false, true}), "multiples of 16"));
  CHECK(says(refusal(e4m3, e4m3, {32, 32, 40, false, true}), "multiples of 16"));
  CHECK(says(refusal(e4m3, e4m3, {32, 32, 32, false, true}, {1, 32}), "scales must be"));
}
