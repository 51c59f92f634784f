// GEMMs of operands with block or tile scales that quantize SwiGLU or its gradient, on the GPU: the bits
// of an own GEMM, SwiGLU and quantize_squares or quantize_blocks one after another, whatever results are wanted.
#include <algorithm>
#include <limits>
#include <span>
#include <string>

#include "quern/block_scales.h"
#include "runtime/hopper_kernels.h"
#include "tests/gpu_run.h"
#include "tests/random_scales.h"

using namespace quern;
using namespace quern::cuda;

namespace {

constexpr DType kBf16 = DType::bf16, kF32 = DType::f32, kE4m3 = DType::e4m3;

struct Size {
  std::int64_t rows, width, depth;
};
// One consumer's rows and less, edges of rows and of k, more tiles than multiprocessors, many stages. K is
// too short for split-K, which own GEMMs would use.
constexpr Size kSizes[] = {{16, 128, 896},     {64, 128, 1024},  {80, 256, 896},   {144, 256, 1152},  {304, 384, 1024},
                           {2192, 2048, 1536}, {256, 512, 2048}, {9008, 256, 896}, {2208, 3200, 1536}};

/// Scales of a and of the values, and which GEMM; a gradient's format.
struct Form {
  bool squares, gradient;
  DType format = kE4m3;

  std::string way() const { return squares ? "quantize_squares" : "quantize_blocks"; }
  std::string kind() const { return (gradient ? "matmul_swiglu_grad_" : "matmul_swiglu_") + way(); }
  Attributes attributes() const {
    return {{"transpose_a", std::int64_t{0}},
            {"transpose_b", std::int64_t{1}},
            {"fast_accumulation", std::int64_t{1}},
            {"scale_rows_b", kScaleBlock},
            {"square_scales", squares ? std::int64_t{1} : std::int64_t{0}},
            {"format", std::string(name_of(format))}};
  }
};
constexpr Form kForms[] = {{true, false},  {true, true},  {true, true, DType::e5m2},
                           {false, false}, {false, true}, {false, true, DType::e5m2}};

/// With quantized values, and `all` other results that the form has or none but transposed values.
OpInstance fused(const Size& s, const Form& form, bool all, bool transposed) {
  const Extents both{s.rows, 2 * s.width}, half{s.rows, s.width};
  const Extents &values = form.gradient ? both : half, &product = form.gradient ? half : both;
  return {form.kind(),
          {},
          {operand(kBf16, product, all && !form.gradient), operand(kBf16, values, all && form.squares),
           operand(form.format, values), operand(kF32, row_block_scales(values[0], values[1]), all || transposed),
           operand(form.format, {values[1], values[0]}, transposed),
           operand(kF32, column_block_scales(values[0], values[1]), all || transposed)},
          form.attributes(),
          {}};
}

std::vector<Operand> inputs_of(const Size& s, const Form& form) {
  const std::int64_t of_b = form.gradient ? s.width : 2 * s.width;
  std::vector<Operand> inputs{operand(form.format, {s.rows, s.depth}), operand(kE4m3, {of_b, s.depth}),
                              operand(kF32, row_block_scales(s.rows, s.depth)),
                              operand(kF32, square_scales(of_b, s.depth))};
  if (form.gradient) inputs.push_back(operand(kBf16, {s.rows, 2 * s.width}));
  return inputs;
}

/// A GPU here that has the kernels; null, with a message, where there is none.
Device* fused_gpu(const DevicePair& pair) {
  OpInstance op = fused({64, 128, 896}, kForms[0], true, true);
  op.inputs = inputs_of({64, 128, 896}, kForms[0]);
  const std::string refusal = pair.gpu->query(op).refusal;
  if (!refusal.empty()) MESSAGE("skipped: " << refusal);
  return refusal.empty() && pair.open ? pair.gpu.get() : nullptr;
}

/// Scales of a and of b.
struct Scales {
  PoisonedTensor a, b;

  Scales(const Size& s, const Form& form)
      : a(form.squares ? spread_scales(s.rows, s.depth, 4) : block_scales(row_block_scales(s.rows, s.depth), 4)),
        b(block_scales(square_scales(form.gradient ? s.width : 2 * s.width, s.depth), 5)) {
    for (float& scale : values(a)) scale *= 0.125f;
  }
  static std::span<float> values(const PoisonedTensor& scales) {
    return {scales.view().as<float>(), static_cast<std::size_t>(scales.view().count())};
  }
};

void compare(Device& gpu, const Size& s, const Form& form, const Scales& scales) {
  CAPTURE(s.rows);
  CAPTURE(s.width);
  CAPTURE(s.depth);
  CAPTURE(form.kind());
  CAPTURE(name_of(form.format));
  if (!affordable(s.rows * s.width, 2 * s.rows * s.width * s.depth)) return;
  const Extents both{s.rows, 2 * s.width}, half{s.rows, s.width};
  const std::int64_t of_b = form.gradient ? s.width : 2 * s.width;
  PoisonedTensor a = normal(form.format, {s.rows, s.depth}, 1), b = normal(kE4m3, {of_b, s.depth}, 2);
  PoisonedTensor gate_up = normal(kBf16, both, 3, 2);
  const Tensors product =
      testkit::launch_once(gpu, {"matmul", {}, {operand(kBf16, form.gradient ? half : both)}, form.attributes(), {}},
                           {a.view(), b.view(), View{}, scales.a.view(), scales.b.view()});
  const Tensors values =
      form.gradient ? testkit::launch_once(gpu, {"swiglu_grad", {}, {operand(kBf16, both)}, {}, {}},
                                           {product[0].view(), gate_up.view()})
                    : testkit::launch_once(gpu, {"swiglu", {}, {operand(kBf16, half)}, {}, {}}, {product[0].view()});
  const OpInstance whole = fused(s, form, true, true);
  const Tensors want = testkit::launch_once(
      gpu, {form.way(), {}, {whole.outputs.begin() + 2, whole.outputs.end()}, form.attributes(), {}},
      {values[0].view()});

  std::vector<View> inputs{a.view(), b.view(), scales.a.view(), scales.b.view()};
  if (form.gradient) inputs.push_back(gate_up.view());
  auto check = [&](bool all, bool transposed) {
    CAPTURE(all);
    CAPTURE(transposed);
    const OpInstance op = fused(s, form, all, transposed);
    const Tensors got = testkit::launch_once(gpu, op, inputs);
    if (op.outputs[0].present) CHECK(difference(got[0], product[0]) == "");
    if (op.outputs[1].present) CHECK(difference(got[1], values[0]) == "");
    CHECK(difference(got[2], want[0]) == "");
    if (transposed) CHECK(difference(got[4], want[2]) == "");
    if (!all && !transposed) return;
    for (const std::size_t of : {3, 5})
      CHECK(testkit::mismatch(got[of].floats(), want[of - 2].floats(), 0) == "");  // may be NaN
  };
  for (auto [all, transposed] : all_or_one({std::pair{true, false}, {true, true}, {false, false}, {false, true}}))
    check(all, transposed);
  on_fewer_multiprocessors(gpu, [&] { check(true, true); });
}

}  // namespace

TEST_CASE("GEMMs with block scales that quantize swiglu give the bits of their parts") {
  DevicePair pair = open_pair({.products = "own"});
  Device* gpu = fused_gpu(pair);
  if (gpu == nullptr) return;
  for (const Size& s : kSizes)
    for (const Form& form : kForms) compare(*gpu, s, form, Scales(s, form));
}

TEST_CASE("GEMMs with block scales that quantize swiglu find values that are not finite as their parts do") {
  DevicePair pair = open_pair({.products = "own"});
  Device* gpu = fused_gpu(pair);
  if (gpu == nullptr) return;
  constexpr Size kSize{144, 256, 896};
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  for (const Form& form : kForms) {
    for (const float factor : all_or_one({0x1p120f, kNan})) {
      const Scales scales(kSize, form);
      for (float& scale : Scales::values(scales.a)) scale *= factor;
      compare(*gpu, kSize, form, scales);
    }
    // A row among others, or, with squares, 128; then 128 columns.
    for (const float value : all_or_one({kNan, std::numeric_limits<float>::infinity()})) {
      const Scales of_rows(kSize, form), of_columns(kSize, form);
      std::fill_n(Scales::values(of_rows.a).begin() + (form.squares ? 0 : 37), form.squares ? kScaleBlock : 1, value);
      compare(*gpu, kSize, form, of_rows);
      Scales::values(of_columns.b)[0] = value;
      compare(*gpu, kSize, form, of_columns);
    }
  }
}

TEST_CASE("GEMMs with block scales that quantize swiglu refuse unsupported forms") {
  DevicePair pair = open_pair();
  auto refusal = [&pair](const Form& form, const Size& s, auto change) {
    OpInstance op = fused(s, form, false, true);
    op.inputs = inputs_of(s, form);
    change(op);
    return pair.gpu->query(op).refusal;
  };
  auto nothing = [](OpInstance&) {};
  if (const std::string text = refusal(kForms[0], {64, 128, 896}, nothing); !text.empty()) {
    CHECK(text.find(has_hopper_kernels() ? "Hopper" : "no kernel for the op") != std::string::npos);
    return;
  }
  for (const Form& form : kForms) {
    constexpr Size kSize{64, 128, 896};
    auto refuses = [&](const Size& s, auto change, const char* why) {
      const std::string text = refusal(form, s, change);
      CAPTURE(text);
      CHECK(text.find(why) != std::string::npos);
    };
    auto refuses_attribute = [&](const char* name, std::int64_t value, const char* why) {
      refuses(
          kSize, [&](OpInstance& op) { op.attributes.set(name, value); }, why);
    };
    refuses({64, 128, 768}, nothing, "896 terms or more");
    refuses({64, 128, 912}, nothing, "whole blocks");
    refuses({72, 128, 896}, nothing, "multiple of 16 rows");
    refuses({64, 96, 896}, nothing, "multiple of 128");
    refuses(
        kSize, [](OpInstance& op) { op.inputs[0].dtype = DType::i8; }, "takes e4m3");
    refuses_attribute("square_scales", form.squares ? 0 : 1, "tile scales");
    refuses_attribute("scale_rows_b", 1, "tile scales");
    refuses_attribute("square", 1, "tile scales");
    refuses(
        kSize, [](OpInstance& op) { op.outputs[2].present = false; }, "writes quantized values");
    auto change_format = [](OpInstance& op, DType to) {
      op.attributes.set("format", std::string(name_of(to)));
      op.outputs[2].dtype = op.outputs[4].dtype = to;
    };
    const DType other = form.format == kE4m3 ? DType::e5m2 : kE4m3;
    refuses(
        kSize, [&](OpInstance& op) { change_format(op, other); }, "format of a");
    if (!form.gradient)
      refuses(
          kSize,
          [&](OpInstance& op) {
            change_format(op, DType::e5m2);
            op.inputs[0].dtype = DType::e5m2;
          },
          "a gradient in e5m2");
    if (form.gradient)
      refuses(
          kSize, [](OpInstance& op) { op.outputs[0].present = true; }, "does not write dy");
    if (!form.squares)
      refuses(
          kSize, [](OpInstance& op) { op.outputs[1].present = true; }, "the unquantized values");
  }
}
