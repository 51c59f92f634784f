// Matrices in the formats of quern/weight_format.h: x (R, C) to packed integers and scales, and back.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include "optimizer/update.h"
#include "primitives/blocks.h"
#include "primitives/rows.h"
#include "quern/numeric.h"
#include "quern/weight_format.h"
#include "runtime/kernels.h"
#include "runtime/operand_check.h"
#include "shared/operands/op_checks.h"

namespace quern::cpu {

namespace {

enum Slot : int { kX, kRowScales };  // scratch

const WeightFormat& format_of(const OpInstance& op) { return *weight_format_named(op.attributes.word("format")); }

/// Of a group's elements. Zeros have the scale 1; a NaN or infinity makes it NaN.
float scale_of(const WeightFormat& format, const float* x, std::int64_t count) {
  float largest = 0;
  double sum = 0;
  for (std::int64_t i = 0; i < count; ++i) {
    if (!std::isfinite(x[i])) return std::numeric_limits<float>::quiet_NaN();
    largest = std::max(largest, std::fabs(x[i]));
    sum += std::fabs(double{x[i]});
  }
  if (largest == 0) return 1.0f;
  const float scale = format.scale == WeightFormat::Scale::mean ? static_cast<float>(sum / static_cast<double>(count))
                                                                : largest / static_cast<float>(format.largest);
  return std::max(scale, 0x1p-126f);
}

/// `draw(i)` gives 32 random bits for element i of the row.
template <class Round>
void quantize_row(const WeightFormat& format, const float* x, std::int64_t columns, std::uint8_t* q, float* scales,
                  const Round& round) {
  const std::int64_t group = format.group == 0 ? columns : format.group;
  for (std::int64_t g = 0; g < columns / group; ++g) scales[g] = scale_of(format, x + g * group, group);
  const std::int64_t in_byte = 8 / format.bits;
  const auto most = static_cast<float>(format.largest);
  const unsigned mask = (1u << format.bits) - 1;
  for (std::int64_t byte = 0; byte < columns / in_byte; ++byte) {
    unsigned packed = 0;
    for (std::int64_t j = 0; j < in_byte; ++j) {
      const std::int64_t i = byte * in_byte + j;
      const float value = round(x[i] * (1.0f / scales[i / group]), i);
      const int integer = value == value ? static_cast<int>(std::clamp(value, -most, most)) : 0;
      packed |= (static_cast<unsigned>(integer) & mask) << (j * format.bits);
    }
    q[byte] = static_cast<std::uint8_t>(packed);
  }
}

int integer_at(const WeightFormat& format, const std::uint8_t* q, std::int64_t i) {
  const std::int64_t in_byte = 8 / format.bits;
  const int up = 32 - format.bits, at = static_cast<int>(i % in_byte) * format.bits;
  return static_cast<std::int32_t>(std::uint32_t{q[i / in_byte]} >> at << up) >> up;  // its sign extended
}

// x (R, C) any -> q, scale
Launch prepare_quantize(const OpInstance& op) {
  return [&format = format_of(op)](std::span<const View> in, std::span<const View> out, const Exec&) {
    const std::int64_t columns = in[0].columns(), bytes = format.row_bytes(columns),
                       scales = format.row_scales(columns);
    for_blocks(in[0].extents[0], 1, [&](std::int64_t row, std::int64_t, std::int64_t) {
      float* own = out[1] ? out[1].as<float>() + row * scales : scratch(kRowScales, scales);
      quantize_row(format, load_row(in[0], row, scratch(kX, columns)), columns, out[0].as<std::uint8_t>() + row * bytes,
                   own, [](float value, std::int64_t) { return std::nearbyint(value); });
    });
  };
}

// q, scale -> x (R, C) f32 or bf16; q -> x i8
Launch prepare_dequantize(const OpInstance& op) {
  return [&format = format_of(op)](std::span<const View> in, std::span<const View> out, const Exec&) {
    const std::int64_t columns = out[0].columns(), bytes = format.row_bytes(columns);
    const std::int64_t scales = format.row_scales(columns), group = columns / scales;
    for_blocks(out[0].extents[0], 1, [&](std::int64_t row, std::int64_t, std::int64_t) {
      const std::uint8_t* q = in[0].as<std::uint8_t>() + row * bytes;
      if (out[0].dtype == DType::i8) {
        for (std::int64_t i = 0; i < columns; ++i)
          out[0].as<std::int8_t>()[row * columns + i] = static_cast<std::int8_t>(integer_at(format, q, i));
        return;
      }
      const float* own = in[1].as<float>() + row * scales;
      float* x = target_row(out[0], row, scratch(kX, columns));
      for (std::int64_t i = 0; i < columns; ++i) x[i] = static_cast<float>(integer_at(format, q, i)) * own[i / group];
      store_row(out[0], row, x);
    });
  };
}

// update, step, x (R, C), q, scale -> q, scale
Launch prepare_requantize(const OpInstance& op) {
  const auto object = static_cast<std::uint32_t>(op.attributes.list("objects")[0]);
  const auto offset = static_cast<std::uint64_t>(op.attributes.list("offsets")[0]);
  return [=, &format = format_of(op)](std::span<const View> in, std::span<const View> out, const Exec&) {
    need_in_place("requantize_weights", in[3], out[0]);
    need_in_place("requantize_weights", in[4], out[1]);
    if (read<UpdateState>(in[0]).apply == 0) return;
    const StepState state = read<StepState>(in[1]);
    const RandomKey key{seed_of(state), RandomPurpose::round_master, object};
    const std::int64_t columns = in[2].columns(), bytes = format.row_bytes(columns),
                       scales = format.row_scales(columns);
    for_blocks(in[2].extents[0], 1, [&](std::int64_t row, std::int64_t, std::int64_t) {
      const std::uint64_t first = offset + static_cast<std::uint64_t>(row * columns);
      quantize_row(format, load_row(in[2], row, scratch(kX, columns)), columns, out[0].as<std::uint8_t>() + row * bytes,
                   out[1].as<float>() + row * scales, [&](float value, std::int64_t i) {
                     return to_integer_stochastic(value,
                                                  random_word(key, state.step, first + static_cast<std::uint64_t>(i)));
                   });
    });
  };
}

}  // namespace

void add_weight_ops(OpTable& table) {
  auto check = [](const OpInstance& op) {
    OperandCheck check(op, op.inputs.size(), op.outputs.size());
    operands::check_weight_format(check, op);
    return check.support();
  };
  table["quantize_weights"] = {prepare_quantize, check};
  table["dequantize_weights"] = {prepare_dequantize, check};
  table["requantize_weights"] = {prepare_requantize, check};
}

}  // namespace quern::cpu
