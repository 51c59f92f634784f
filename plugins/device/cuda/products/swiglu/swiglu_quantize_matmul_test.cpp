// GEMMs that quantize SwiGLU or its gradient, on the GPU: the bits of an own GEMM, SwiGLU and
// quantize_delayed one after another, whatever results are wanted, and the same state behind them.
#include <cstring>
#include <limits>
#include <string>

#include "quern/numeric.h"
#include "quern/step_state.h"
#include "runtime/hopper_kernels.h"
#include "tests/gpu_run.h"

using namespace quern;
using namespace quern::cuda;

namespace {

constexpr DType kBf16 = DType::bf16, kF32 = DType::f32, kE4m3 = DType::e4m3, kE5m2 = DType::e5m2;

struct Size {
  std::int64_t rows, width, depth;
};
// Less than a tile, edges in every direction, whole 16 rows and others, more tiles than multiprocessors, many stages.
// K is too short for split-K, which own GEMMs would use.
constexpr Size kSizes[] = {{1, 32, 512},       {64, 128, 1024},  {129, 96, 800},   {300, 416, 896},   {517, 992, 1040},
                           {2203, 2048, 1536}, {256, 512, 2048}, {9008, 224, 896}, {2208, 3104, 1552}};

constexpr std::int64_t kHistory = 2;

std::int64_t padded(std::int64_t rows) { return (rows + 15) / 16 * 16; }

Attributes attributes(DType format) {
  return {{"transpose_a", std::int64_t{0}},
          {"transpose_b", std::int64_t{1}},
          {"fast_accumulation", std::int64_t{1}},
          {"format", std::string(name_of(format))},
          {"history", kHistory},
          {"margin", std::int64_t{0}}};
}

PoisonedTensor state_of(float scale) {
  PoisonedTensor state(kF32, {kScaleStateWords + kHistory});
  std::memset(state.view().data, 0, state.view().bytes());
  state.view().as<ScaleState>()->scale = scale;
  return state;
}

PoisonedTensor scale(float value) { return {kF32, {1}, std::vector<float>{value}}; }

/// The first rows of a matrix.
View first_rows(const PoisonedTensor& matrix, std::int64_t rows) {
  return {matrix.view().data, matrix.view().dtype, {rows, matrix.view().extents[1]}};
}

/// With quantized values, and `all` other results or none; transposed ones are taken of whole 16 rows.
OpInstance fused(const Size& s, bool gradient, DType format, bool all, bool transposed = false) {
  const Extents both{s.rows, 2 * s.width}, half{s.rows, s.width};
  const Extents &values = gradient ? both : half, &product = gradient ? half : both;
  return {gradient ? "matmul_swiglu_grad_quantize_delayed" : "matmul_swiglu_quantize_delayed",
          {},
          {operand(kBf16, product, all && !gradient), operand(kBf16, values, all), operand(format, values),
           operand(kF32, {1}), operand(format, {values[1], values[0]}, transposed)},
          attributes(format),
          {}};
}

/// A GPU here that has the kernels; null, with a message, where there is none.
Device* fused_gpu(const DevicePair& pair) {
  OpInstance op = fused({64, 64, 896}, false, kE4m3, true);
  op.inputs = {operand(kE4m3, {64, 896}), operand(kE4m3, {128, 896}), operand(kF32, {1}), operand(kF32, {1}),
               operand(kF32, {kScaleStateWords + kHistory})};
  const std::string refusal = pair.gpu->query(op).refusal;
  if (!refusal.empty()) MESSAGE("skipped: " << refusal);
  return refusal.empty() && pair.open ? pair.gpu.get() : nullptr;
}

/// `factor`: a's scale.
void compare(Device& gpu, const Size& s, bool gradient, DType a_type, const PoisonedTensor& state,
             float factor = 0.125f) {
  if (!affordable(s.rows * s.width, 2 * s.rows * s.width * s.depth)) return;
  const Extents both{s.rows, 2 * s.width};
  const DType format = gradient ? a_type : kE4m3;
  PoisonedTensor a = normal(a_type, {padded(s.rows), s.depth}, 1);
  PoisonedTensor b = normal(kE4m3, {gradient ? s.width : 2 * s.width, s.depth}, 2);
  PoisonedTensor gate_up = normal(kBf16, both, 3, 2);
  const PoisonedTensor scale_a = scale(factor), scale_b = scale(0.5f);

  const OpInstance matmul{
      "matmul",
      {},
      {operand(kBf16, {padded(s.rows), b.view().extents[0]})},
      {{"transpose_a", std::int64_t{0}}, {"transpose_b", std::int64_t{1}}, {"fast_accumulation", std::int64_t{1}}},
      {}};
  const Tensors product =
      testkit::launch_once(gpu, matmul, {a.view(), b.view(), View{}, scale_a.view(), scale_b.view()});
  const View made = first_rows(product[0], s.rows);
  Tensors values =
      gradient ? testkit::launch_once(gpu, {"swiglu_grad", {}, {operand(kBf16, both)}, {}, {}}, {made, gate_up.view()})
               : testkit::launch_once(gpu, {"swiglu", {}, {operand(kBf16, {s.rows, s.width})}, {}, {}}, {made});
  OpInstance quantize{"quantize_delayed", {}, {}, attributes(format), {}};
  const OpInstance whole = fused(s, gradient, format, true, true);
  quantize.outputs = {whole.outputs.begin() + 2, whole.outputs.end()};
  const Tensors want = testkit::launch_once(gpu, quantize, {values[0].view(), state.view()});

  std::vector<View> inputs{first_rows(a, s.rows), b.view(), scale_a.view(), scale_b.view()};
  if (gradient) inputs.push_back(gate_up.view());
  inputs.push_back(state.view());
  auto check = [&](bool all, bool transposed) {
    if (transposed && s.rows % 16 != 0) return;
    CAPTURE(all);
    CAPTURE(transposed);
    const OpInstance op = fused(s, gradient, format, all, transposed);
    const Tensors got = testkit::launch_once(gpu, op, inputs);
    if (all && !gradient) CHECK(std::memcmp(got[0].view().data, made.data, got[0].view().bytes()) == 0);
    if (all) CHECK(difference(got[1], values[0]) == "");
    CHECK(difference(got[2], want[0]) == "");
    if (transposed) CHECK(difference(got[4], want[2]) == "");
    CHECK(testkit::mismatch(got[3].floats(), want[1].floats(), 0) == "");  // may be NaN
    CHECK(difference(got.back(), want.back()) == "");
  };
  for (auto [all, transposed] : all_or_one({std::pair{true, false}, {false, false}, {true, true}, {false, true}}))
    check(all, transposed);
  on_fewer_multiprocessors(gpu, [&] { check(true, s.rows % 16 == 0); });
}

}  // namespace

TEST_CASE("GEMMs that quantize swiglu give the bits of their parts") {
  DevicePair pair = open_pair({.products = "own"});
  Device* gpu = fused_gpu(pair);
  if (gpu == nullptr) return;
  for (const Size& s : kSizes) {
    CAPTURE(s.rows);
    CAPTURE(s.width);
    CAPTURE(s.depth);
    for (const float scale : all_or_one({0.0f, 64.0f, 0x1p-10f})) {  // nothing known, fits, clips
      CAPTURE(scale);
      compare(*gpu, s, false, kE4m3, state_of(scale));
      compare(*gpu, s, true, kE4m3, state_of(scale));
      compare(*gpu, s, true, kE5m2, state_of(scale == 64.0f ? 1.0f : scale / 64));
    }
  }
}

TEST_CASE("GEMMs that quantize swiglu find values that are not finite as their parts do") {
  DevicePair pair = open_pair({.products = "own"});
  Device* gpu = fused_gpu(pair);
  if (gpu == nullptr) return;
  for (bool gradient : {false, true})
    for (float factor : {0x1p126f, std::numeric_limits<float>::quiet_NaN()})  // sums beyond bf16; no number
      for (const float scale : all_or_one({0.0f, 64.0f}))
        for (std::int64_t rows : {129, 144})  // 144 rows are transposed too
          compare(*gpu, {rows, 96, 800}, gradient, kE4m3, state_of(scale), factor);
}

TEST_CASE("GEMMs that quantize swiglu refuse unsupported forms") {
  DevicePair pair = open_pair();
  auto refusal = [&pair](bool gradient, const Size& s, auto change) {
    OpInstance op = fused(s, gradient, kE4m3, false);
    op.inputs = {operand(kE4m3, {s.rows, s.depth}), operand(kE4m3, {gradient ? s.width : 2 * s.width, s.depth}),
                 operand(kF32, {1}), operand(kF32, {1})};
    if (gradient) op.inputs.push_back(operand(kBf16, {s.rows, 2 * s.width}));
    op.inputs.push_back(operand(kF32, {kScaleStateWords + kHistory}));
    change(op);
    return pair.gpu->query(op).refusal;
  };
  auto nothing = [](OpInstance&) {};
  if (const std::string text = refusal(false, {64, 64, 896}, nothing); !text.empty()) {
    CHECK(text.find(has_hopper_kernels() ? "Hopper" : "no kernel for the op") != std::string::npos);
    return;
  }
  auto refuses = [&](bool gradient, const Size& s, auto change, const char* why) {
    CHECK(refusal(gradient, s, change).find(why) != std::string::npos);
  };
  for (bool gradient : {false, true}) refuses(gradient, {64, 64, 496}, nothing, "512 terms or more");
  refuses(false, {0, 64, 896}, nothing, "takes rows");
  refuses(false, {64, 80, 896}, nothing, "multiple of 32");
  refuses(false, {64, 64, 904}, nothing, "multiple of 16");
  for (bool gradient : {false, true})
    refuses(
        gradient, {72, 64, 896}, [](OpInstance& op) { op.outputs[4].present = true; }, "multiple of 16 rows");
  refuses(
      true, {64, 64, 896}, [](OpInstance& op) { op.outputs[0].present = true; }, "does not write dy");
  refuses(
      false, {64, 64, 896}, [](OpInstance& op) { op.inputs[0].dtype = kE5m2; }, "takes e4m3");
  refuses(
      false, {64, 64, 896}, [](OpInstance& op) { op.attributes.set("fast_accumulation", std::int64_t{0}); },
      "fewer bits");
  refuses(
      true, {64, 64, 896}, [](OpInstance& op) { op.attributes.set("transpose_b", std::int64_t{0}); }, "K-major");
}
