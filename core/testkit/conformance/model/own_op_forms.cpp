#include "conformance/model/own_op_forms.h"

#include <algorithm>
#include <set>

#include "quern/error.h"

namespace quern::conformance {

namespace {

/// Extents of operands as dimensions of the micro-batch, so that they hold for another one.
Shape shape_of(const Operand& operand, const Geometry& geometry) {
  Shape shape;
  for (const std::int64_t extent : operand.extents)
    shape.push_back(extent == geometry.tokens()                      ? Dim::tokens()
                    : extent == geometry.batch && geometry.batch > 1 ? Dim::rows()
                                                                     : Dim(extent));
  return shape;
}

}  // namespace

bool adds_up(const OpInstance& op) {
  return std::any_of(op.outputs.begin(), op.outputs.end(), [](const Operand& output) { return output.accumulate; });
}

OpInstance without_sums(OpInstance op) {
  for (Operand& output : op.outputs) output.accumulate = false;
  return op;
}

bool takes(const OpInstance& op, Device& device) {
  if (!device.query(op).refusal.empty()) return false;
  try {
    return device.prepare(op) != nullptr;
  } catch (const Error&) {
    return false;
  }
}

OpInstance checked_form(const OpInstance& op, Device& device) {
  OpInstance alone = without_sums(op);
  return takes(alone, device) ? alone : op;
}

std::optional<OpInstance> inferred(OpInstance op, const OpSpec& spec, const std::vector<Shape>& shapes,
                                   const Geometry& geometry, DType activation) {
  std::vector<Value> inputs(op.inputs.size()), outputs(op.outputs.size());
  std::vector<const Value*> present;
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    inputs[i].shape = shapes[i], inputs[i].dtype = op.inputs[i].dtype;
    present.push_back(op.inputs[i].present ? &inputs[i] : nullptr);
    if (op.inputs[i].present) op.inputs[i].extents = extents_at(shapes[i], geometry);
  }
  try {
    InferContext context{present, op.attributes, outputs, activation, op.kind};
    spec.infer(context);
  } catch (const Error&) {
    return std::nullopt;
  }
  for (std::size_t o = 0; o < outputs.size(); ++o) {
    op.outputs[o].dtype = outputs[o].dtype;
    op.outputs[o].extents = extents_at(outputs[o].shape, geometry);
  }
  op.geometry = geometry;
  return op;
}

std::vector<Shape> shapes_of(const OpInstance& op) {
  std::vector<Shape> shapes;
  for (const Operand& input : op.inputs) shapes.push_back(shape_of(input, op.geometry));
  return shapes;
}

std::optional<DType> activation_of(const OpInstance& op, const OpSpec& spec) {
  for (const DType activation : {DType::f32, DType::bf16})
    if (const auto same = inferred(op, spec, shapes_of(op), op.geometry, activation);
        same && same->outputs == op.outputs)
      return activation;
  return std::nullopt;
}

std::optional<OpInstance> resized(const OpInstance& op, const OpSpec& spec, const Geometry& geometry,
                                  std::int64_t columns) {
  for (const auto& [name, value] : op.attributes.all())
    if (std::holds_alternative<std::int64_t>(value) || std::holds_alternative<std::vector<double>>(value))
      return std::nullopt;
  std::vector<Shape> shapes = shapes_of(op);
  std::set<std::int64_t> sizes;
  for (std::size_t i = 0; i < shapes.size(); ++i)
    for (const Dim& dim : shapes[i]) {
      if (!dim.is_fixed() || dim.fixed <= 1) continue;
      if (op.inputs[i].dtype != DType::f32 && op.inputs[i].dtype != DType::bf16) return std::nullopt;
      sizes.insert(dim.fixed);
    }
  if (std::ranges::any_of(sizes, [&](std::int64_t size) { return size % *sizes.begin() != 0; })) return std::nullopt;
  const std::optional<DType> activation = activation_of(op, spec);
  if (!activation) return std::nullopt;
  for (Shape& shape : shapes)
    for (Dim& dim : shape)
      if (dim.is_fixed() && dim.fixed > 1) dim = Dim(dim.fixed / *sizes.begin() * columns);
  return inferred(op, spec, shapes, geometry, *activation);
}

}  // namespace quern::conformance
