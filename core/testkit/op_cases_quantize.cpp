// Ops that write 8-bit codes: to the bit of the oracle.
#include <cmath>
#include <limits>

#include "quern/testkit/op_cases.h"

namespace quern::testkit {

namespace {

constexpr DType kBf16 = DType::bf16, kF32 = DType::f32, kE4m3 = DType::e4m3, kE5m2 = DType::e5m2;

/// Whole tiles, parts of tiles, sizes that packs do not divide.
const Extents kSizes[] = {{1, 1}, {64, 64}, {33, 70}, {129, 8}, {5, 1000}, {256, 128}, {272, 144}, {48, 904}};

Attributes format_of(DType format) { return {{"format", std::string(name_of(format))}}; }
Extents turned(const Extents& size) { return {size[1], size[0]}; }

}  // namespace

void quantize_cases(const OpRunner& runner) {
  for (const Extents& size : kSizes) {
    for (DType from : {kF32, kBf16}) {
      for (DType to : {kE4m3, kE5m2, DType::i8}) {
        const Attributes format = format_of(to);
        auto x = [&] { return normal(from, size, 1, 3); };
        OpComparison("quantize", format)
            .in(x())
            .out(to, size, {})
            .out(kF32, {1}, {})
            .out(to, turned(size), {})
            .run(runner);
        OpComparison("quantize", format)
            .in(x())
            .out(to, size, {})
            .out(kF32, {1}, {})
            .unread(to, turned(size))
            .run(runner);
        OpComparison("quantize", format)
            .in(x())
            .unread(to, size)
            .out(kF32, {1}, {})
            .out(to, turned(size), {})
            .run(runner);
        OpComparison("quantize_by", format)
            .in(x())
            .in(PoisonedTensor(kF32, {1}, std::vector<float>{0.03125f}))
            .out(to, size, {})
            .out(to, turned(size), {})
            .run(runner);
        OpComparison("quantize_rows", format).in(x()).out(to, size, {}).out(kF32, {size[0]}, {}).run(runner);
        OpComparison("quantize_columns", format).in(x()).out(to, turned(size), {}).out(kF32, {size[1]}, {}).run(runner);
      }
    }
  }
}

void quantize_special_cases(const OpRunner& runner) {
  const float infinity = std::numeric_limits<float>::infinity(), nan = std::nanf("");
  const Extents size{16, 16};
  for (std::vector<float> special :
       {std::vector<float>{0, 0}, {infinity, 1}, {nan, 2}, {1e-40f, 0}, {3e38f, -1e-30f}}) {
    std::vector<float> values(256, 0.0f);
    values[17] = special[0], values[200] = special[1];
    for (DType to : {kE4m3, kE5m2})
      OpComparison("quantize", format_of(to))
          .in(PoisonedTensor(kF32, size, values))
          .out(to, size, {})
          .out(kF32, {1}, {})
          .out(to, turned(size), {})
          .run(runner);
  }
}

}  // namespace quern::testkit
