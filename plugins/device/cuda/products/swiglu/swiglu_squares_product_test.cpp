// Products of squares that end in the codes of SwiGLU or of its gradient, on the GPU: the bits of an own product,
// SwiGLU and quantize_squares one after another, whatever results are wanted.
#include <limits>
#include <string>

#include "quern/block_scales.h"
#include "tests/gpu_run.h"
#include "tests/random_scales.h"

using namespace quern;
using namespace quern::cuda;

namespace {

constexpr DType kBf16 = DType::bf16, kF32 = DType::f32, kE4m3 = DType::e4m3;

struct Size {
  std::int64_t rows, width, depth;
};
// One multiplier's rows and less, edges of rows and of sums, more tiles than multiprocessors, many stages. Sums are too
// short for parts, in which own products would take them.
constexpr Size kSizes[] = {{16, 128, 896},     {64, 128, 1024},  {80, 256, 896},   {144, 256, 896},   {304, 384, 1024},
                           {2192, 2048, 1536}, {256, 512, 2048}, {9008, 256, 896}, {2208, 3200, 1536}};

Attributes attributes() {
  return {{"transpose_a", std::int64_t{0}},       {"transpose_b", std::int64_t{1}},
          {"fast_accumulation", std::int64_t{1}}, {"scale_rows_b", kScaleBlock},
          {"square_scales", std::int64_t{1}},     {"format", std::string(name_of(kE4m3))}};
}

/// With codes, and `all` other results or none but transposed codes.
OpInstance fused(const Size& s, bool gradient, bool all, bool transposed) {
  const Extents both{s.rows, 2 * s.width}, half{s.rows, s.width};
  const Extents &values = gradient ? both : half, &product = gradient ? half : both;
  return {gradient ? "matmul_swiglu_grad_quantize_squares" : "matmul_swiglu_quantize_squares",
          {},
          {operand(kBf16, product, all && !gradient), operand(kBf16, values, all), operand(kE4m3, values),
           operand(kF32, row_block_scales(values[0], values[1]), all || transposed),
           operand(kE4m3, {values[1], values[0]}, transposed),
           operand(kF32, column_block_scales(values[0], values[1]), all || transposed)},
          attributes(),
          {}};
}

std::vector<Operand> inputs_of(const Size& s, bool gradient) {
  const std::int64_t of_b = gradient ? s.width : 2 * s.width;
  std::vector<Operand> inputs{operand(kE4m3, {s.rows, s.depth}), operand(kE4m3, {of_b, s.depth}),
                              operand(kF32, row_block_scales(s.rows, s.depth)),
                              operand(kF32, square_scales(of_b, s.depth))};
  if (gradient) inputs.push_back(operand(kBf16, {s.rows, 2 * s.width}));
  return inputs;
}

/// A GPU here that has the kernels; null, with a message, where there is none.
Device* fused_gpu(const DevicePair& pair) {
  OpInstance op = fused({64, 128, 896}, false, true, true);
  op.inputs = inputs_of({64, 128, 896}, false);
  const std::string refusal = pair.gpu->query(op).refusal;
  if (!refusal.empty()) MESSAGE("skipped: " << refusal);
  return refusal.empty() && pair.open ? pair.gpu.get() : nullptr;
}

/// `factor`: of all scales of a.
void compare(Device& gpu, const Size& s, bool gradient, float factor = 0.125f) {
  CAPTURE(s.rows);
  CAPTURE(s.width);
  CAPTURE(s.depth);
  CAPTURE(gradient);
  if (!affordable(s.rows * s.width, 2 * s.rows * s.width * s.depth)) return;
  const Extents both{s.rows, 2 * s.width}, half{s.rows, s.width};
  const std::int64_t of_b = gradient ? s.width : 2 * s.width;
  PoisonedTensor a = normal(kE4m3, {s.rows, s.depth}, 1), b = normal(kE4m3, {of_b, s.depth}, 2);
  PoisonedTensor gate_up = normal(kBf16, both, 3, 2), scale_a = spread_scales(s.rows, s.depth, 4);
  const PoisonedTensor scale_b = block_scales(square_scales(of_b, s.depth), 5);
  for (std::int64_t i = 0; i < scale_a.view().count(); ++i) scale_a.view().as<float>()[i] *= factor;

  const Tensors product =
      testkit::launch_once(gpu, {"matmul", {}, {operand(kBf16, gradient ? half : both)}, attributes(), {}},
                           {a.view(), b.view(), View{}, scale_a.view(), scale_b.view()});
  const Tensors values =
      gradient ? testkit::launch_once(gpu, {"swiglu_grad", {}, {operand(kBf16, both)}, {}, {}},
                                      {product[0].view(), gate_up.view()})
               : testkit::launch_once(gpu, {"swiglu", {}, {operand(kBf16, half)}, {}, {}}, {product[0].view()});
  const OpInstance whole = fused(s, gradient, true, true);
  const Tensors want = testkit::launch_once(
      gpu, {"quantize_squares", {}, {whole.outputs.begin() + 2, whole.outputs.end()}, attributes(), {}},
      {values[0].view()});

  std::vector<View> inputs{a.view(), b.view(), scale_a.view(), scale_b.view()};
  if (gradient) inputs.push_back(gate_up.view());
  for (const bool all : {true, false})
    for (const bool transposed : {false, true}) {
      CAPTURE(all);
      CAPTURE(transposed);
      const Tensors got = testkit::launch_once(gpu, fused(s, gradient, all, transposed), inputs);
      if (all && !gradient) CHECK(difference(got[0], product[0]) == "");
      if (all) CHECK(difference(got[1], values[0]) == "");
      CHECK(difference(got[2], want[0]) == "");
      if (transposed) CHECK(difference(got[4], want[2]) == "");
      if (!all && !transposed) continue;
      for (const std::size_t scales : {3, 5})
        CHECK(testkit::mismatch(got[scales].floats(), want[scales - 2].floats(), 0) == "");  // may be NaN
    }
}

}  // namespace

TEST_CASE("products of squares that end in the codes of swiglu give the bits of their parts") {
  DevicePair pair = open_pair({.products = "own"});
  Device* gpu = fused_gpu(pair);
  if (gpu == nullptr) return;
  for (const Size& s : kSizes)
    for (const bool gradient : {false, true}) compare(*gpu, s, gradient);
}

TEST_CASE("products of squares that end in the codes of swiglu find what is not finite as their parts do") {
  DevicePair pair = open_pair({.products = "own"});
  Device* gpu = fused_gpu(pair);
  if (gpu == nullptr) return;
  for (const bool gradient : {false, true})
    for (const float factor : {0x1p120f, std::numeric_limits<float>::quiet_NaN()})
      compare(*gpu, {144, 256, 896}, gradient, factor);
}

TEST_CASE("products of squares that end in the codes of swiglu refuse what they cannot do") {
  DevicePair pair = open_pair();
  auto refusal = [&pair](bool gradient, const Size& s, auto change) {
    OpInstance op = fused(s, gradient, false, true);
    op.inputs = inputs_of(s, gradient);
    change(op);
    return pair.gpu->query(op).refusal;
  };
  auto nothing = [](OpInstance&) {};
  if (const std::string text = refusal(false, {64, 128, 896}, nothing); !text.empty()) {
    CHECK(text.find("Hopper") != std::string::npos);
    return;
  }
  auto refuses = [&](bool gradient, const Size& s, auto change, const char* why) {
    CHECK(refusal(gradient, s, change).find(why) != std::string::npos);
  };
  for (const bool gradient : {false, true}) {
    refuses(gradient, {64, 128, 768}, nothing, "769 terms or more");
    refuses(gradient, {72, 128, 896}, nothing, "multiple of 16 rows");
    refuses(gradient, {64, 96, 896}, nothing, "multiple of 128");
    refuses(
        gradient, {64, 128, 896}, [](OpInstance& op) { op.inputs[0].dtype = DType::e5m2; }, "takes e4m3");
    refuses(
        gradient, {64, 128, 896}, [](OpInstance& op) { op.attributes.set("square_scales", std::int64_t{0}); },
        "scales of squares");
  }
  refuses(
      true, {64, 128, 896}, [](OpInstance& op) { op.outputs[0].present = true; }, "does not write dy");
}
