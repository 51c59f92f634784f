#pragma once
// Forms of an op: whether it adds up, what a device takes, and the op at other sizes and dtypes as its OpSpec infers
// it.

#include <optional>
#include <vector>

#include "quern/device.h"
#include "quern/op_spec.h"

namespace quern::conformance {

bool adds_up(const OpInstance& op);
OpInstance without_sums(OpInstance op);
/// The device and the kernel take it; a kernel may refuse a form when it is prepared.
bool takes(const OpInstance& op, Device& device);
/// The form in which an op is checked: one that does not add up, if the device takes that.
OpInstance checked_form(const OpInstance& op, Device& device);

/// Shapes of its inputs, with dimensions of the micro-batch.
std::vector<Shape> shapes_of(const OpInstance& op);
/// The op on inputs of these shapes, as its OpSpec says; none where it refuses them.
std::optional<OpInstance> inferred(OpInstance op, const OpSpec& spec, const std::vector<Shape>& shapes,
                                   const Geometry& geometry, DType activation);
/// The dtype of activations with which the OpSpec gives this form; none: something else made the form.
std::optional<DType> activation_of(const OpInstance& op, const OpSpec& spec);
/// The op for another micro-batch, and with `columns` in place of the smallest fixed extent of its operands and
/// multiples of it alike. None where the OpSpec refuses that, where attributes may state sizes, or where extents are
/// related in another way.
std::optional<OpInstance> resized(const OpInstance& op, const OpSpec& spec, const Geometry& geometry,
                                  std::int64_t columns);

}  // namespace quern::conformance
