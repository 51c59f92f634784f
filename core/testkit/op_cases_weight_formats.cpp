// Matrices in the formats of quern/weight_format.h, to the bit: scales are of one division, or of sums in fp64.
#include "quern/step_state.h"
#include "quern/testkit/op_cases.h"
#include "quern/weight_format.h"

namespace quern::testkit {

namespace {

constexpr Extents::value_type kRows[] = {1, 7, 64};

Extents scales_of(const WeightFormat& format, const Extents& x) {
  return format.group == 0 ? Extents{x[0]} : Extents{x[0], format.row_scales(x[1])};
}

void cases_of(const OpRunner& runner, const WeightFormat& format, const Extents& x) {
  const Extents q{x[0], format.row_bytes(x[1])}, scale = scales_of(format, x);
  const Attributes name{{"format", std::string(format.name)}};
  auto bytes = [&] {
    PoisonedTensor tensor(format.dtype(), q);
    const std::vector<float> random = random_normal(element_count(q), 5, 40);
    for (std::size_t i = 0; i < random.size(); ++i)
      tensor.view().as<std::uint8_t>()[i] = static_cast<std::uint8_t>(static_cast<int>(random[i]));
    return tensor;
  };
  for (DType from : {DType::f32, DType::bf16})
    OpComparison("quantize_weights", name)
        .in(normal(from, x, 1, 3))
        .out(format.dtype(), q, {})
        .out(DType::f32, scale, {})
        .run(runner);
  for (DType to : {DType::f32, DType::bf16, DType::i8}) {
    Attributes attributes = name;
    attributes.set("dtype", std::string(name_of(to)));
    OpComparison back("dequantize_weights", attributes);
    back.in(bytes());
    if (to != DType::i8) back.in(normal(DType::f32, scale, 2, 0.1));
    back.out(to, x, {}).run(runner);
  }
  for (const bool apply : {true, false}) {
    UpdateState update;
    update.apply = apply ? 1.0f : 0.0f;
    StepState state;
    state.step = 7, state.seed_low = 17, state.seed_high = 3;
    Attributes attributes = name;
    attributes.set("objects", std::vector<double>{5});
    attributes.set("offsets", std::vector<double>{8});
    OpComparison op("requantize_weights", attributes);
    op.in(words(DType::f32, update)).in(words(DType::u32, state)).in(normal(DType::f32, x, 1, 3));
    op.in(bytes()).in(normal(DType::f32, scale, 2, 0.1));
    // A draw may fall between quotients that differ in their last bit.
    op.update(3, apply && format.bits == 8 ? Tolerance{0, 1} : Tolerance{}).update(4, {}).run(runner);
  }
}

}  // namespace

void weight_format_cases(const OpRunner& runner) {
  for (const WeightFormat& format : kWeightFormats)
    for (const std::int64_t rows : kRows)
      for (const std::int64_t columns : {4, 32, 36, 1056, 4100})
        if (format.takes(columns)) cases_of(runner, format, {rows, columns});
}

}  // namespace quern::testkit
