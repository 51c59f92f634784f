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
#include "runtime/kernels.h"

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
void see(ScaleObservation& seen, float value, float scale, float limit, DType format) {
  if (!std::isfinite(value) || !std::isfinite(scale)) {
    ++seen.non_finite;
    return;
  }
  if (value == 0) return;  // a part that is all zero has a scale that says nothing
  const float magnitude = std::fabs(value);
  seen.amax = std::max(seen.amax, magnitude);
  seen.largest_scale = std::max(seen.largest_scale, scale);
  seen.smallest_scale = std::min(seen.smallest_scale, scale);
  seen.underflowed += round_to(format, value * (1.0f / scale)) == 0;
  seen.clipped += magnitude > limit;
}

Launch prepare(const OpInstance& op) {
  const DType format = *dtype_named(op.attributes.word("format"));
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
                                                      : (delayed ? assumed : scale) * largest_of(format);
          see(part, values[column], scale, limit, format);
        }
      }
#pragma omp critical
      merge(part, seen);
    }
    seen.elements += static_cast<std::uint64_t>(x.count());
  };
}

OpSupport query(const OpInstance& op) {
  const bool delayed = op.inputs.size() == 3 && op.inputs[2].present;
  auto refuse = [](const char* what) { return OpSupport{std::string("observe_scale: ") + what, 0}; };
  if (op.inputs.size() < 2 || op.inputs.size() > 3 || op.outputs.size() != 1)
    return refuse("takes x, its scales and perhaps their state, and gives what it observed");
  const Operand &x = op.inputs[0], &scale = op.inputs[1], &seen = op.outputs[0];
  const DType format =
      dtype_named(op.attributes.has("format") ? op.attributes.word("format") : "").value_or(DType::f32);
  if (format != DType::e4m3 && format != DType::e5m2 && format != DType::i8)
    return refuse("the format must be e4m3, e5m2 or i8");
  const auto layout = scale_layout_named(op.attributes.has("layout") ? op.attributes.word("layout") : "");
  if (!layout) return refuse("unknown layout of scales");
  if (x.extents.size() != 2 || (x.dtype != DType::f32 && x.dtype != DType::bf16))
    return refuse("x must be a matrix in f32 or bf16");
  if (scale.dtype != DType::f32 || scale.extents != scale_extents(*layout, x.extents[0], x.extents[1]))
    return refuse("the scales do not fit x and their layout");
  if (delayed && (op.inputs[2].dtype != DType::f32 || op.inputs[2].count() < kScaleStateWords))
    return refuse("the state is none of a delayed scale");
  if (!seen.present || seen.dtype != DType::u32 || seen.count() != kScaleObservationWords)
    return refuse("gives u32 (16)");
  return {};
}

}  // namespace

void add_observe_op(OpTable& table) { table["observe_scale"] = {prepare, query}; }

}  // namespace quern::cpu
