// Ops that quantize to 8 bits: to the bit of the oracle.
#include <cmath>
#include <limits>

#include "quern/block_scales.h"
#include "quern/quantized_format.h"
#include "quern/step_state.h"
#include "quern/testkit/op_cases.h"

namespace quern::testkit {

namespace {

constexpr DType kBf16 = DType::bf16, kF32 = DType::f32, kE4m3 = DType::e4m3, kE5m2 = DType::e5m2;

/// Whole tiles, parts of tiles, sizes that packs do not divide.
const Extents kSizes[] = {{1, 1}, {64, 64}, {33, 70}, {129, 8}, {5, 1000}, {256, 128}, {272, 144}, {48, 904}};

Attributes format_of(DType format) { return {{"format", std::string(name_of(format))}}; }
Extents turned(const Extents& size) { return {size[1], size[0]}; }

/// Which values share a scale, and its layout: of quantize_blocks, alone and with `square`, and of quantize_squares.
enum class Blocks { lines, squares, spread_squares };
constexpr Blocks kBlocks[] = {Blocks::lines, Blocks::squares, Blocks::spread_squares};

/// The op of x with all its outputs, or without q or t and their scales.
OpComparison blocks(PoisonedTensor x, DType format, Blocks of, bool q = true, bool t = true) {
  const Extents size = x.view().extents;
  const bool square = of == Blocks::squares;
  Attributes attributes = format_of(format);
  if (square) attributes.set("square", std::int64_t{1});
  OpComparison op(of == Blocks::spread_squares ? "quantize_squares" : "quantize_blocks", attributes);
  op.in(std::move(x));
  auto output = [&op](bool read, DType dtype, const Extents& extents) {
    read ? op.out(dtype, extents, {}) : op.unread(dtype, extents);
  };
  output(q, format, size);
  output(q, kF32, square ? square_scales(size[0], size[1]) : row_block_scales(size[0], size[1]));
  output(t, format, turned(size));
  output(t, kF32, square ? square_scales(size[1], size[0]) : column_block_scales(size[0], size[1]));
  return op;
}

/// quantize_rows and quantize_columns of x(), with every way to round that the format has.
template <class MakeX>
void lines(const OpRunner& runner, MakeX x, std::string_view name) {
  const DType to = quantized_format_named(name)->dtype;
  for (std::int64_t stochastic = 0; stochastic <= (to == DType::i8 ? 1 : 0); ++stochastic) {
    Attributes format{{"format", std::string(name)}};
    if (stochastic) format.set("stochastic", stochastic);
    const Extents size = x().view().extents;
    OpComparison("quantize_rows", format).in(x()).out(to, size, {}).out(kF32, {size[0]}, {}).run(runner);
    OpComparison("quantize_columns", format).in(x()).out(to, turned(size), {}).out(kF32, {size[1]}, {}).run(runner);
  }
}

/// Rows that are longer than what a kernel may hold at once.
void long_rows(const OpRunner& runner) {
  for (const Extents& size : {Extents{3, 40000}, Extents{2, 33333}})
    for (DType from : {kF32, kBf16})
      for (const char* to : {"e4m3", "i8"})
        lines(
            runner, [&] { return normal(from, size, 1, 3); }, to);
}

}  // namespace

void quantize_cases(const OpRunner& runner) {
  long_rows(runner);
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
        OpComparison("quantize_amax", format)
            .in(x())
            .in(PoisonedTensor(kF32, {1}, std::vector<float>{40.5f}))
            .out(to, size, {})
            .out(kF32, {1}, {})
            .unread(to, turned(size))
            .run(runner);
        OpComparison("quantize_by", format)
            .in(x())
            .in(PoisonedTensor(kF32, {1}, std::vector<float>{0.03125f}))
            .out(to, size, {})
            .out(to, turned(size), {})
            .run(runner);
        OpComparison("quantize_rows", format).in(x()).unread(to, size).out(kF32, {size[0]}, {}).run(runner);
        OpComparison("quantize_columns", format).in(x()).unread(to, turned(size)).out(kF32, {size[1]}, {}).run(runner);
      }
      for (const QuantizedFormat& to : kQuantizedFormats)
        lines(
            runner, [&] { return normal(from, size, 1, 3); }, to.name);
    }
  }
}

// More tensors than one launch takes, of which some have a NaN and one nothing.
void amax_cases(const OpRunner& runner) {
  for (DType from : {kF32, kBf16})
    for (DType format : {kE4m3, DType::i8})
      for (int tensors : {1, 300}) {
        OpComparison list("amax", format_of(format));
        for (int i = 0; i < tensors; ++i) {
          std::vector<float> x = random_normal(i == 17 ? 0 : 1 + i * i * 7 % 1000 + (i == 19 ? 70000 : 0), 1 + i);
          if (i % 5 == 0 && !x.empty()) x.back() = std::nanf("");
          list.in(PoisonedTensor(from, {static_cast<std::int64_t>(x.size())}, x));
        }
        list.out(kF32, {tensors}, {}).run(runner);
      }
}

void observe_scale_cases(const OpRunner& runner) {
  ScaleState state;
  state.scale = 2, state.assumed = 0x1p-9f;
  for (const Extents& size : kSizes) {
    for (DType from : {kF32, kBf16}) {
      for (const QuantizedFormat& format : kQuantizedFormats) {
        for (const char* layout : {"tensor", "rows", "columns", "row_blocks", "column_blocks", "squares"}) {
          const Extents scales = scale_extents(*scale_layout_named(layout), size[0], size[1]);
          std::vector<float> values = random_normal(element_count(scales), 4);
          for (float& value : values) value = std::exp2(std::round(2 * value) - 2);
          Attributes attributes{{"format", std::string(format.name)}};
          attributes.set("layout", std::string(layout));
          auto op = [&] {
            OpComparison op("observe_scale", attributes);
            op.in(normal(from, size, 1, 3)).in(PoisonedTensor(kF32, scales, values));
            return op;
          };
          op().out(DType::u32, {kScaleObservationWords}, {}).run(runner);
          std::vector<float> x = random_normal(element_count(size), 1);
          x[x.size() / 2] = std::nanf(""), x.back() = std::numeric_limits<float>::infinity();
          values.back() = std::nanf("");  // of a part that has an infinity
          OpComparison("observe_scale", attributes)
              .in(PoisonedTensor(from, size, x))
              .in(PoisonedTensor(kF32, scales, values))
              .out(DType::u32, {kScaleObservationWords}, {})
              .run(runner);
          if (scales == Extents{1})
            op().in(words(kF32, state)).out(DType::u32, {kScaleObservationWords}, {}).run(runner);
        }
      }
    }
  }
}

void quantize_blocks_cases(const OpRunner& runner) {
  std::vector<Extents> sizes(std::begin(kSizes), std::end(kSizes));
  for (const Extents& more : {Extents{128, 128}, Extents{400, 640}, Extents{1040, 136}, Extents{3, 4104}})
    sizes.push_back(more);
  for (const Extents& size : sizes) {
    for (DType from : {kF32, kBf16}) {
      for (DType to : {kE4m3, kE5m2}) {
        for (Blocks of : kBlocks) {
          blocks(normal(from, size, 1, 3), to, of).run(runner);
          blocks(normal(from, size, 1, 3), to, of, true, false).run(runner);
          blocks(normal(from, size, 1, 3), to, of, false, true).run(runner);
        }
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
    auto x = [&] { return PoisonedTensor(kF32, size, values); };
    for (DType to : {kE4m3, kE5m2, DType::i8}) {
      const Attributes format = format_of(to);
      OpComparison("quantize", format)
          .in(x())
          .out(to, size, {})
          .out(kF32, {1}, {})
          .out(to, turned(size), {})
          .run(runner);
    }
    for (const QuantizedFormat& to : kQuantizedFormats) lines(runner, x, to.name);
    for (Blocks of : kBlocks) blocks(x(), kE4m3, of).run(runner);
  }
}

}  // namespace quern::testkit
