// GEMMs fused with SwiGLU, on the GPU: results beside the CPU's matmuls', which differ by the order of sums
// at most, and the same bits again, in place, and without the outputs that no op reads.
#include <string>

#include "runtime/hopper_kernels.h"
#include "tests/gpu_run.h"

using namespace quern;
using namespace quern::cuda;

namespace {

constexpr DType kBf16 = DType::bf16;

struct Size {
  std::int64_t rows, width, depth;
};
// Less than a tile, edges in every direction, more tiles than multiprocessors, many steps of the ring, both.
constexpr Size kSizes[] = {{1, 8, 8},         {64, 128, 64},    {129, 136, 200},   {300, 200, 72},   {517, 1000, 136},
                           {2200, 2048, 320}, {256, 512, 4096}, {1023, 776, 1528}, {2200, 4104, 840}};

std::string text(const Size& s) {
  return std::to_string(s.rows) + " x " + std::to_string(s.width) + " x " + std::to_string(s.depth);
}

Attributes product_attributes(bool transpose_b) {
  return {{"transpose_a", std::int64_t{0}}, {"transpose_b", std::int64_t{transpose_b}}};
}

Operand value(Extents extents, bool present = true) { return operand(kBf16, std::move(extents), present); }

/// The gradient's weight.
Extents stored(const Size& s, bool transposed) {
  return transposed ? Extents{s.width, s.depth} : Extents{s.depth, s.width};
}

/// Empty where the GPU that plans assume, or that is here, has the fused kernels.
std::string fused_refusal(const Device& gpu) {
  OpInstance op{"matmul_swiglu",
                {value({64, 64}), value({128, 64})},
                {value({64, 128}), value({64, 64})},
                product_attributes(true),
                {}};
  return gpu.query(op).refusal;
}

/// A GPU here that has them; null, with a message, where there is none.
Device* fused_gpu(const DevicePair& pair) {
  if (!pair.open) return nullptr;
  const std::string refusal = fused_refusal(*pair.gpu);
  if (!refusal.empty()) MESSAGE("skipped: " << refusal);
  return refusal.empty() ? pair.gpu.get() : nullptr;
}

/// The same sums in another order: bf16 may round the other way, and what nearly cancels differs by what fp32 rounds.
void check_close(const PoisonedTensor& got, const PoisonedTensor& want) {
  CHECK(testkit::mismatch(got.floats(), want.floats(), 1.0 / 128, 1e-3) == "");
}

}  // namespace

TEST_CASE("GEMMs fused with swiglu give the same bits again, in place, and on any number of multiprocessors") {
  DevicePair pair = open_pair();
  if (fused_gpu(pair) == nullptr) return;
  Device& gpu = *pair.gpu;
  for (const Size& s : kSizes) {
    if (!affordable(s.rows * s.width, 2 * s.rows * s.width * s.depth)) continue;
    CAPTURE(text(s));
    const Extents both{s.rows, 2 * s.width}, half{s.rows, s.width};
    PoisonedTensor x = normal(kBf16, {s.rows, s.depth}, 1), w = normal(kBf16, {2 * s.width, s.depth}, 2, 0.1);
    const Run forward{"matmul_swiglu", product_attributes(true), {value(both), value(half)}};
    const Tensors got = forward(gpu, {x.view(), w.view()}), again = forward(gpu, {x.view(), w.view()});
    for (std::size_t i : {0, 1}) CHECK(difference(again[i], got[i]) == "");
    CHECK(difference(got[1], Run{"swiglu", {}, {value(half)}}(gpu, {got[0].view()})[0]) == "");
    const Tensors only =
        Run{"matmul_swiglu", product_attributes(true), {value(both, false), value(half)}}(gpu, {x.view(), w.view()});
    CHECK(difference(only[1], got[1]) == "");
    on_fewer_multiprocessors(gpu, [&] {
      const Tensors results = forward(gpu, {x.view(), w.view()});
      for (std::size_t i : {0, 1}) CHECK(difference(results[i], got[i]) == "");
    });

    for (bool transposed : {false, true}) {
      CAPTURE(transposed);
      const Attributes attributes = product_attributes(transposed);
      PoisonedTensor gate_up = normal(kBf16, both, 3), weight = normal(kBf16, stored(s, transposed), 4, 0.1);
      const std::vector<View> inputs{x.view(), weight.view(), gate_up.view()};
      const Run gradient{"matmul_swiglu_grad", attributes, {value(half), value(both)}};
      const Tensors apart = gradient(gpu, inputs);
      const Tensors slope = Run{"swiglu_grad", {}, {value(both)}}(gpu, {apart[0].view(), gate_up.view()});
      CHECK(difference(apart[1], slope[0]) == "");
      const Run in_place{"matmul_swiglu_grad", attributes, {value(half, false), value(both)}, {}, {{1, 2}}};
      CHECK(difference(in_place(gpu, inputs)[1], apart[1]) == "");
      const Tensors with_y =
          Run{"matmul_swiglu_and_grad", attributes, {value(half), value(half), value(both)}}(gpu, inputs);
      CHECK(difference(with_y[0], apart[0]) == "");
      CHECK(difference(with_y[1], Run{"swiglu", {}, {value(half)}}(gpu, {gate_up.view()})[0]) == "");
      CHECK(difference(with_y[2], apart[1]) == "");
      on_fewer_multiprocessors(gpu, [&] {
        const Tensors results = gradient(gpu, inputs);
        for (std::size_t i : {0, 1}) CHECK(difference(results[i], apart[i]) == "");
      });
    }
  }
}

TEST_CASE("GEMMs fused with swiglu give the CPU's results") {
  DevicePair pair = open_pair();
  if (fused_gpu(pair) == nullptr) return;
  Device& gpu = *pair.gpu;
  for (const Size& s : kSizes) {
    if (!affordable(s.rows * s.width, 2 * s.rows * s.width * s.depth)) continue;
    CAPTURE(text(s));
    const Extents both{s.rows, 2 * s.width}, half{s.rows, s.width};
    PoisonedTensor x = normal(kBf16, {s.rows, s.depth}, 1), w = normal(kBf16, {2 * s.width, s.depth}, 2, 0.1);
    const Attributes forward = product_attributes(true);
    check_close(Run{"matmul_swiglu", forward, {value(both), value(half)}}(gpu, {x.view(), w.view()})[0],
                Run{"matmul", forward, {value(both)}}(*pair.cpu, {x.view(), w.view()})[0]);
    for (bool transposed : {false, true}) {
      CAPTURE(transposed);
      const Attributes attributes = product_attributes(transposed);
      PoisonedTensor gate_up = normal(kBf16, both, 3), weight = normal(kBf16, stored(s, transposed), 4, 0.1);
      const Run fused{"matmul_swiglu_grad", attributes, {value(half), value(both)}};
      check_close(fused(gpu, {x.view(), weight.view(), gate_up.view()})[0],
                  Run{"matmul", attributes, {value(half)}}(*pair.cpu, {x.view(), weight.view()})[0]);
    }
  }
}

TEST_CASE("GEMMs fused with swiglu refuse unsupported forms") {
  DevicePair pair = open_pair();
  const Device& gpu = *pair.gpu;
  auto refusal = [&gpu](DType type, std::int64_t width, std::int64_t depth, bool transpose_a, bool transpose_b) {
    auto of = [type](Extents extents) { return operand(type, std::move(extents)); };
    Attributes attributes = product_attributes(transpose_b);
    attributes.set("transpose_a", std::int64_t{transpose_a});
    return gpu
        .query({"matmul_swiglu",
                {of({64, depth}), of({2 * width, depth})},
                {of({64, 2 * width}), of({64, width})},
                attributes,
                {}})
        .refusal;
  };
  if (!fused_refusal(gpu).empty()) {
    const char* why = has_hopper_kernels() ? "Hopper" : "no kernel for the op";
    CHECK(refusal(kBf16, 64, 64, false, true).find(why) != std::string::npos);
    return;
  }
  CHECK(refusal(DType::f32, 64, 64, false, true).find("bf16") != std::string::npos);
  CHECK(refusal(kBf16, 68, 64, false, true).find("multiples of 8") != std::string::npos);
  CHECK(refusal(kBf16, 64, 60, false, true).find("multiples of 8") != std::string::npos);
  CHECK(refusal(kBf16, 64, 64, true, true).find("transposed a") != std::string::npos);
  CHECK(refusal(kBf16, 64, 64, false, false) != "");
  CHECK(gpu.query({"matmul_swiglu", {}, {}, {}, {}}).refusal.find("takes 2 inputs") != std::string::npos);
}
