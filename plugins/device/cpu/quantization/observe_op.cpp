// observe_scale: what a tensor's values are and what the scales made of it lose. Steps that observe run it; simple
// rather than fast.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include "primitives/rows.h"
#include "quantization/observe.h"
#include "quern/block_scales.h"
#include "quern/numeric.h"
#include "quern/quantized_format.h"
#include "runtime/kernels.h"
#include "shared/operands/op_checks.h"

namespace quern::cpu {

void merge(const ScaleObservation& more, ScaleObservation& into) {
  into.amax = std::max(into.amax, more.amax);
  into.largest_scale = std::max(into.largest_scale, more.largest_scale);
  into.smallest_scale = std::min(into.smallest_scale, more.smallest_scale);
  into.elements += more.elements;
  into.underflowed += more.underflowed;
  into.clipped += more.clipped;
  into.non_finite += more.non_finite;
}

ScaleObservation no_observation() { return {.smallest_scale = std::numeric_limits<float>::infinity()}; }

namespace {

/// `limit`: of the magnitudes, the largest that was in range.
void see(ScaleObservation& seen, float value, float scale, float limit, DType type) {
  if (!std::isfinite(value) || !std::isfinite(scale)) {
    ++seen.non_finite;
    return;
  }
  if (value == 0) return;  // a part that is all zero has a scale that says nothing
  const float magnitude = std::fabs(value);
  seen.amax = std::max(seen.amax, magnitude);
  seen.largest_scale = std::max(seen.largest_scale, scale);
  seen.smallest_scale = std::min(seen.smallest_scale, scale);
  seen.underflowed += round_to(type, value * (1.0f / scale)) == 0;
  seen.clipped += magnitude > limit;
}

Launch prepare(const OpInstance& op) {
  const QuantizedFormat format = *quantized_format_named(op.attributes.word("format"));
  const ScaleLayout layout = *scale_layout_named(op.attributes.word("layout"));
  const bool delayed = op.inputs.size() > 2 && op.inputs[2].present, add = op.outputs[0].accumulate;
  return [=](std::span<const View> in, std::span<const View> out, const Exec&) {
    const View& x = in[0];
    const std::int64_t rows = x.extents[0], columns = x.extents[1];
    const auto* scales = in[1].as<float>();
    const float assumed = delayed ? in[2].as<ScaleState>()->assumed : 0;
    auto& seen = *out[0].as<ScaleObservation>();
    if (!add) seen = no_observation();
#pragma omp parallel
    {
      ScaleObservation part = no_observation();
#pragma omp for schedule(static)
      for (std::int64_t row = 0; row < rows; ++row) {
        const float* values = load_row(x, row, scratch(0, columns));
        for (std::int64_t column = 0; column < columns; ++column) {
          const float scale = scales[scale_index(layout, row, column, rows, columns)];
          const float limit = delayed && assumed == 0 ? std::numeric_limits<float>::infinity()
                                                      : (delayed ? assumed : scale) * format.largest;
          see(part, values[column], scale, limit, format.dtype);
        }
      }
#pragma omp critical
      merge(part, seen);
    }
    seen.elements += static_cast<std::uint64_t>(x.count());
  };
}

}  // namespace

void add_observe_op(OpTable& table) { table["observe_scale"] = {prepare, operands::query_observe_scale}; }

}  // namespace quern::cpu
