// What an optimizer step is made of. Scalars that change from step to step are read from device memory: step_state.h.
#include "program/ops/ops.h"

namespace quern::ops {

namespace {

void add_update(OpSet& set, std::string kind, std::vector<std::string> outputs, UpdateLocality locality) {
  std::vector<std::pair<int, int>> updates;
  for (int i = 0; i < static_cast<int>(outputs.size()); ++i) updates.emplace_back(i, i + 3);
  set.add({.kind = std::move(kind),
           .inputs = {"update", "step", "tensors*"},
           .outputs = std::move(outputs),
           .infer = [](InferContext&) {},  // all are inputs
           .updates = std::move(updates),
           .locality = locality});
}

// Jordan et al., "Muon" (2024). Those with `first` and `rows` take these rows of a packed matrix.
void add_muon(OpSet& set) {
  auto part = [](const InferContext& c, std::size_t of) {
    return Shape{c.attributes.integer("rows"), c.inputs[of]->shape.at(1)};
  };
  set.add({.kind = "muon_direction",
           .inputs = {"update", "step", "gradient", "moment1"},
           .outputs = {"new_moment1", "direction"},
           .infer =
               [part](InferContext& c) {
                 give(c, 1, part(c, 3), dtype_named(c.attributes.word("dtype")).value_or(DType::f32));
               },
           .updates = {{0, 3}},
           .locality = UpdateLocality::element});
  // A stack of matrices, each x / max(root of its sum of squares, 1e-7).
  set.add({.kind = "over_norm", .inputs = {"squares", "x*"}, .outputs = {"stack"}, .infer = [](InferContext& c) {
             const Shape& x = c.inputs[1]->shape;
             for (std::size_t i = 2; i < c.inputs.size(); ++i) need_same(c, i, 1);
             give(c, 0, {static_cast<std::int64_t>(c.inputs.size()) - 1, x[0], x[1]}, c.inputs[1]->dtype);
           }});
  // Of matrix `index` of the stack, whose rows' mean squares enter their average: what rows are multiplied by so that
  // each has the size that it has on average, and all the norm that they had. Li et al., "NorMuon" (2025).
  set.add({.kind = "row_factors",
           .inputs = {"update", "step", "moment2", "stack"},
           .outputs = {"new_moment2", "factors"},
           .infer = [](InferContext& c) { give(c, 1, {c.attributes.integer("rows")}, DType::f32); },
           .updates = {{0, 2}}});
  // Matrix `index` of the stack, its rows by factors.
  set.add({.kind = "muon_apply",
           .inputs = {"update", "step", "master", "stack", "factors?"},
           .outputs = {"new_master"},
           .infer = [](InferContext&) {},
           .updates = {{0, 2}},
           .locality = UpdateLocality::element});
}

}  // namespace

void add_optimizer(OpSet& set) {
  set.add({.kind = "sum_squares", .inputs = {"x*"}, .outputs = {"sums"}, .infer = [](InferContext& c) {
             give(c, 0, {static_cast<std::int64_t>(c.inputs.size())}, DType::f64);
           }});
  set.add(
      {.kind = "clip_scale", .inputs = {"stats", "step", "sums*"}, .outputs = {"update"}, .infer = [](InferContext& c) {
         give(c, 0, {4}, DType::f32);
       }});
  // Any number of tensors: gradient, master and states of each; all but the gradient are updated in place. bf16 results
  // round stochastically. AdamW: Loshchilov & Hutter, "Decoupled Weight Decay Regularization" (2019); Lion: Chen et
  // al., "Symbolic Discovery of Optimization Algorithms" (2023).
  add_update(set, "adamw", {"new_master", "new_moment1", "new_moment2"}, UpdateLocality::element);
  add_update(set, "sgd", {"new_master", "new_moment1"}, UpdateLocality::element);
  add_update(set, "lion", {"new_master", "new_moment1"}, UpdateLocality::element);
  // Defazio et al., "The Road Less Scheduled" (2024). StepState::average is the share of the step.
  add_update(set, "schedule_free", {"new_master", "new_average", "new_iterate", "new_moment2"},
             UpdateLocality::element);
  // Pairs of tensors whose elements change places.
  set.add({.kind = "exchange",
           .inputs = {"tensors*"},
           .outputs = {"first", "second"},
           .infer = [](InferContext&) {},
           .updates = {{0, 0}, {1, 1}},
           .locality = UpdateLocality::element});
  // Moments of i8 or e4m3 have f32 scales of `block` elements of a row; the second is stored as its root.
  add_update(set, "adamw_8bit", {"new_master", "new_moment1", "new_moment2", "new_scales1", "new_scales2"},
             UpdateLocality::row);
  add_muon(set);
}

}  // namespace quern::ops
