#pragma once
// Formats of ops with a scale for each row or column (quern/quantized_format.h), whose integers may have fewer bits
// than their bytes, and may be drawn.

#include "primitives/scale.cuh"
#include "quern/quantized_format.h"
#include "runtime/operand_check.h"

namespace quern::cuda {

/// The attribute "format", which the check refuses unless the table has it.
inline QuantizedFormat check_line_format(OperandCheck& check, const OpInstance& op) {
  const QuantizedFormat* format =
      op.attributes.has("format") ? quantized_format_named(op.attributes.word("format")) : nullptr;
  check.that(format, "needs a format of quern/quantized_format.h");
  return format ? *format : QuantizedFormat{};
}
/// Of an op that was checked.
inline QuantizedFormat line_format(const OpInstance& op) {
  return *quantized_format_named(op.attributes.word("format"));
}

/// format_scale of a row of the table.
__device__ __forceinline__ float line_scale(float amax, DType type, float largest) {
  const bool plain = amax > 0 && __float_as_uint(amax) < 0x7f800000u;
  return type == DType::i8 && plain ? fmaxf(__fdiv_rn(amax, largest), 0x1p-126f) : format_scale(amax, type);
}

/// An integer that was drawn, at most `largest`; NaN stays.
__device__ __forceinline__ float bounded(float integer, float largest) {
  return integer > largest ? largest : integer < -largest ? -largest : integer;
}

/// Values of consecutive places in a line, the first of which is `place`, as bounded integers: encode_codes with an
/// `inverse` of 1 writes them.
template <int kCount>
__device__ __forceinline__ void draw_integers(float (&values)[kCount], float inverse, float largest, int place) {
  draw_integers(values, inverse, place);
#pragma unroll
  for (int i = 0; i < kCount; ++i) values[i] = bounded(values[i], largest);
}

}  // namespace quern::cuda
