#include "plan/programs/state_programs.h"

#include <algorithm>
#include <bit>
#include <set>
#include <utility>

#include "optimizer/stack_matrices.h"
#include "program/names.h"

namespace quern {

namespace {

Value parameter_value(const std::string& name, const ParameterSpec& spec, DType dtype, Role role) {
  return {.name = name,
          .shape = Shape(spec.extents.begin(), spec.extents.end()),
          .dtype = dtype,
          .role = role,
          .parameter = spec.name};
}

ValueId add_update_state(Program& program) {
  return program.add_value({.name = names::kUpdate, .shape = {4}, .dtype = DType::f32, .role = Role::state});
}

ValueId add_step(Program& program, const char* name) {
  return program.add_value({.name = name, .shape = {16}, .dtype = DType::u32, .role = Role::runtime});
}

/// Of the stages, and of the programs that make logits, whose matmuls read what the loss's may not.
std::set<std::string> parameters_read(const std::vector<const Stage*>& stages, const ProgramSet& set) {
  std::vector<const Program*> programs{&set.logits, &set.next_logits};
  for (const Stage* stage : stages)
    programs.insert(programs.end(), {&stage->forward, &stage->backward, &stage->evaluate});
  std::set<std::string> names;
  for (const Program* program : programs)
    for (const Value& value : program->values)
      if (value.role == Role::parameter) names.insert(value.name);
  return names;
}

ValueId add_named(Program& program, std::vector<TensorId>& tensors, TensorId id, const Extents& extents, DType dtype) {
  program.values.push_back({.name = text_of(id),  // they differ: no need to look among thousands
                            .shape = Shape(extents.begin(), extents.end()),
                            .dtype = dtype,
                            .role = Role::state});
  tensors.resize(program.values.size());
  tensors.back() = std::move(id);
  return static_cast<ValueId>(program.values.size() - 1);
}

}  // namespace

ValueId StatePrograms::add_tensor(Program& program, std::vector<TensorId>& tensors, const std::string& kind,
                                  const ParameterPlan& parameter, int layer, DType dtype, const Extents& whole,
                                  const RowSlice& rows) const {
  Extents extents = whole;
  if (!rows.whole())
    extents = shard_of_rows(whole, rows).extents;
  else if (!parameter.bounds.empty())
    extents = shard_of_rows(whole, parameter.bounds, plan_.options.state.rank).extents;
  return add_named(program, tensors, {kind, parameter.spec.name, layer, TensorId::kOwn}, extents, dtype);
}

// Layer by layer, so that each layer's sums are contiguous.
Op StatePrograms::squares_of(PlacedProgram& to, const Takes& takes) const {
  Op squares{.kind = "sum_squares", .inputs = {}, .outputs = {}, .attributes = {}};
  for (int layer = -1; layer < plan_.model.layers; ++layer)
    for (const ParameterPlan& parameter : plan_.parameters) {
      const ParameterSpec& spec = parameter.spec;
      if (spec.trainable && (spec.group == ParameterGroup::block) == (layer >= 0) && takes(parameter, layer))
        squares.inputs.push_back(add_tensor(to.program, to.tensors, names::kGradient, parameter, layer,
                                            plan_.options.gradient, spec.extents));
    }
  return squares;
}

void StatePrograms::add_clip(Program& program, const std::vector<ValueId>& sums) {
  Op clip{.kind = "clip_scale", .inputs = {}, .outputs = {}, .attributes = {}};
  clip.inputs.push_back(
      program.add_value({.name = names::kLossStats, .shape = {4}, .dtype = DType::f64, .role = Role::state}));
  clip.inputs.push_back(add_step(program, names::kStep));
  clip.inputs.insert(clip.inputs.end(), sums.begin(), sums.end());
  clip.outputs.push_back(add_update_state(program));
  program.ops.push_back(std::move(clip));
}

PlacedProgram StatePrograms::norm() const {
  PlacedProgram norm;
  Program& program = norm.program;
  program.name = "norm";
  Op squares = squares_of(norm, [](const ParameterPlan&, int) { return true; });
  squares.outputs.push_back(program.add_value({.name = names::kSquares,
                                               .shape = {static_cast<std::int64_t>(squares.inputs.size())},
                                               .dtype = DType::f64,
                                               .role = Role::local}));
  const ValueId sums = squares.outputs[0];
  program.ops.push_back(std::move(squares));
  add_clip(program, {sums});
  return norm;
}

// f64 elements, one for each tensor.
PlacedProgram StatePrograms::squares(const TensorId& sums, const Takes& takes) const {
  PlacedProgram to;
  Op op = squares_of(to, takes);
  return squares(sums, std::move(to), std::move(op));
}

PlacedProgram StatePrograms::squares(const TensorId& sums, PlacedProgram to, Op squares) {
  to.program.name = "squares";
  if (squares.inputs.empty()) return to;
  squares.outputs.push_back(
      add_named(to.program, to.tensors, sums, {static_cast<std::int64_t>(squares.inputs.size())}, DType::f64));
  to.program.ops.push_back(std::move(squares));
  return to;
}

PlacedProgram StatePrograms::squares(int layer) const {
  return squares({names::kSquares, "", layer}, [layer](const ParameterPlan&, int wanted) { return wanted == layer; });
}

// Piece by piece, so that a rank's are neighbours.
Op StatePrograms::squares_of_pieces(PlacedProgram& to) const {
  Op squares{.kind = "sum_squares", .inputs = {}, .outputs = {}, .attributes = {}};
  const StatePlacement& state = plan_.options.state;
  const int count = state.shards() ? kPieces / state.ranks : kPieces, first = state.shards() ? state.rank * count : 0;
  for (int piece = first; piece < first + count; ++piece)
    for (const ParameterPlan& parameter : plan_.parameters) {
      const ParameterSpec& spec = parameter.spec;
      if (parameter.pieces.empty() || !spec.trainable) continue;
      const Extents extents = shard_of_rows(spec.extents, parameter.pieces, piece).extents;
      for_each_layer(spec, static_cast<int>(plan_.model.layers), [&](int layer) {
        squares.inputs.push_back(add_named(to.program, to.tensors, {names::kGradient, spec.name, layer, piece}, extents,
                                           plan_.options.gradient));
      });
    }
  return squares;
}

Program StatePrograms::sum_tree(ParameterGroup group) const {
  Program program;
  program.name = "sum_tree";
  const std::int64_t block = block_of(plan_.options.state);
  if (block == 1) return program;
  const std::int64_t levels = std::bit_width(static_cast<std::uint64_t>(block)) - 1;
  const ValueId step = add_step(program, names::kStep);
  const Attributes attributes{{"block", block}, {"count", plan_.options.state.in_tree}};
  auto add = [&](Op& op, Value sum) {
    Value partials = sum;
    partials.name = names::kPartials;
    partials.shape = {levels, element_count(fixed_extents(sum.shape))};
    for (Value* value : {&sum, &partials}) {
      program.values.push_back(*value);
      op.inputs.push_back(static_cast<ValueId>(program.values.size() - 1));
      op.outputs.push_back(op.inputs.back());
    }
  };
  Op gradients{.kind = "sum_tree", .inputs = {step}, .outputs = {}, .attributes = attributes}, losses = gradients;
  for (const ParameterSpec& spec : set_.parameters())
    if (spec.group == group && spec.trainable)
      add(gradients, parameter_value(names::kGradient, spec, plan_.options.gradient, Role::state));
  if (group == ParameterGroup::head)
    add(losses, {.name = names::kLossStats, .shape = {4}, .dtype = DType::f64, .role = Role::state});
  for (Op* op : {&gradients, &losses})
    if (!op->outputs.empty()) program.ops.push_back(std::move(*op));
  return program;
}

PlacedProgram StatePrograms::squares(Split split) const {
  if (plan_.options.state.in_tree > 0) {
    if (split == Split::whole)
      return squares({names::kWholeSquares},
                     [](const ParameterPlan& parameter, int) { return parameter.pieces.empty(); });
    PlacedProgram to;
    Op op = squares_of_pieces(to);
    return squares({plan_.options.state.shards() ? names::kOwnSquares : names::kShardSquares}, std::move(to),
                   std::move(op));
  }
  return squares(
      {split == Split::shards ? names::kShardSquares : names::kWholeSquares},
      [&](const ParameterPlan& parameter, int) { return parameter.bounds.empty() == (split == Split::whole); });
}

PlacedProgram StatePrograms::shard_squares(int layer) const {
  return squares({names::kShardSquares, "", layer, TensorId::kOwn}, [&](const ParameterPlan& parameter, int wanted) {
    return wanted == layer && !parameter.bounds.empty();
  });
}

PlacedProgram StatePrograms::norm_of_squares(const std::vector<PlacedProgram>& squares) const {
  PlacedProgram norm;
  norm.program.name = "norm";
  std::vector<ValueId> sums;
  std::int64_t shards = 0;  // layer by layer
  auto add = [&](TensorId id, std::int64_t count) {
    return add_named(norm.program, norm.tensors, std::move(id), {count}, DType::f64);
  };
  for (const PlacedProgram& part : squares)
    for (const Op& op : part.program.ops) {
      const TensorId id = part.id_of(op.outputs[0]);
      const std::int64_t count = element_count(fixed_extents(part.program[op.outputs[0]].shape));
      if (is_part_of_shard_squares(id))
        shards += count;
      else if (id.kind == names::kOwnSquares)  // gathered by now
        sums.push_back(add({names::kShardSquares}, count * plan_.options.state.ranks));
      else
        sums.push_back(add(id, count));
    }
  if (shards > 0) sums.insert(sums.begin(), add({names::kShardSquares}, shards));
  add_clip(norm.program, sums);
  return norm;
}

PlacedProgram StatePrograms::amaxes(const std::vector<ScaledMaster>& masters) const {
  PlacedProgram amaxes;
  Program& program = amaxes.program;
  program.name = "amaxes";
  if (masters.empty()) return amaxes;
  Op op{.kind = "amax", .inputs = {}, .outputs = {}, .attributes = {}};
  std::string format = masters.front().format;
  for (const ScaledMaster& master : masters) {
    op.inputs.push_back(add_tensor(program, amaxes.tensors, names::kMaster, plan_.parameter(master.spec.name),
                                   master.layer, plan_.options.master, master.spec.extents));
    if (master.format == name_of(DType::i8)) format = master.format;
  }
  op.attributes.set("format", std::move(format));
  op.outputs.push_back(program.add_value({.name = names::kAmaxes,
                                          .shape = {static_cast<std::int64_t>(masters.size())},
                                          .dtype = DType::f32,
                                          .role = Role::state}));
  program.ops.push_back(std::move(op));
  return amaxes;
}

PlacedProgram StatePrograms::update(const std::vector<UpdatePart>& parts, const char* step) const {
  UpdateBuilder builder = update_builder(set_.ops(), step);
  PlacedProgram update;
  for (const UpdatePart& part : parts) {
    const ParameterPlan& parameter = plan_.parameters[part.parameter];
    const ParameterSpec& spec = parameter.spec;
    const std::vector<OptimizerState>& states = parameter.update.states;
    auto add = [&](const std::string& kind, DType dtype, const Extents& whole) {
      return add_tensor(builder.program(), update.tensors, kind, parameter, part.layer, dtype, whole, part.rows);
    };
    UpdateBuilder::Tensors tensors{.spec = &spec, .states = states, .suffix = text_of({"", spec.name, part.layer})};
    tensors.gradient = add(names::kGradient, plan_.options.gradient, spec.extents);
    tensors.master = add(names::kMaster, parameter.master, spec.extents);
    for (const OptimizerState& state : states)
      tensors.state_values.push_back(add(state.name, state.dtype, state.extents));
    // Random numbers have a key for each tensor, with room for one a layer, and one for each element of the whole.
    tensors.object = static_cast<std::int64_t>(part.parameter) * (plan_.model.layers + 1) + std::max(part.layer, 0);
    if (!part.rows.whole())
      tensors.offset = part.rows.begin * spec.columns();
    else if (!parameter.bounds.empty())
      tensors.offset = shard_of_rows(spec.extents, parameter.bounds, plan_.options.state.rank).first;
    const bool has_master = parameter.quantized.empty();
    const ValueId master = tensors.master;
    const ValueId scale = has_master ? kNoValue : add(names::kMasterScale, DType::f32, {spec.extents[0]});
    builder.begin(std::move(tensors));
    const Attributes format{{"format", std::string("int8")}};
    if (!has_master) {
      Attributes wide = format;
      wide.set("dtype", std::string("f32"));
      builder.take_for_master(builder.op("dequantize_weights", {master, scale}, names::kMaster, std::move(wide))[0]);
    }
    parts_.optimizer.update(builder, spec);
    if (!has_master)
      builder.op("requantize_weights", {builder.update(), builder.step(), builder.master(), master, scale}, "", format);
  }
  update.program = stack_matrices(builder.take(), kStackBytes);
  return update;
}

PlacedProgram StatePrograms::exchange(const std::vector<UpdatePart>& parts) const {
  PlacedProgram exchange;
  Program& program = exchange.program;
  program.name = "exchange";
  Op op{.kind = "exchange", .inputs = {}, .outputs = {}, .attributes = {}};
  for (const UpdatePart& part : parts) {
    const ParameterPlan& parameter = plan_.parameters[part.parameter];
    for (const OptimizerState& state : parameter.update.states) {
      if (!state.evaluated) continue;
      auto add = [&](const std::string& kind, DType dtype, const Extents& whole) {
        op.inputs.push_back(
            add_tensor(program, exchange.tensors, kind, parameter, part.layer, dtype, whole, part.rows));
      };
      add(names::kMaster, plan_.options.master, parameter.spec.extents);
      add(state.name, state.dtype, state.extents);
    }
  }
  op.outputs = op.inputs;
  if (!op.inputs.empty()) program.ops.push_back(std::move(op));
  return exchange;
}

std::vector<Value> StatePrograms::quantized_master(const ParameterSpec& spec) const {
  if (plan_.options.masters || !spec.trainable) return {};
  std::vector<const Stage*> stages{&set_.embed, &set_.head};
  for (const Stage& stage : set_.classes) stages.push_back(&stage);
  if (parameters_read(stages, set_).contains(spec.name)) return {};
  std::vector<Value> values;
  for (const Stage* stage : stages)
    for (const WorkingCopy& copy : stage->lowered.working_copies) {
      if (copy.parameter != spec.name) continue;
      const bool int8 = copy.kind == "quantize_weights" && copy.values[0].dtype == DType::i8;
      if (!int8 || (!values.empty() && values[0].name != copy.values[0].name)) return {};
      values = copy.values;
    }
  return values;
}

DType StatePrograms::master_dtype(const ParameterSpec& spec) const {
  if (!quantized_master(spec).empty()) return DType::i8;
  return spec.trainable ? plan_.options.master : parts_.precision.traits().working;
}

Program StatePrograms::refresh(const ParameterSpec& spec, const std::vector<const Stage*>& stages) const {
  std::set<std::string> used = parameters_read(stages, set_);
  Program program;
  program.name = "refresh";
  const DType working = parts_.precision.traits().working, dtype = master_dtype(spec);
  if (!quantized_master(spec).empty()) return program;  // which is what ops read
  ValueId master = program.add_value(parameter_value(names::kMaster, spec, dtype, Role::state));
  if (working != dtype && used.contains(spec.name)) {
    ValueId copy = program.add_value(parameter_value(spec.name, spec, working, Role::parameter));
    program.ops.push_back({.kind = "cast",
                           .inputs = {master},
                           .outputs = {copy},
                           .attributes = {{"dtype", std::string(name_of(working))}}});
  }
  std::set<std::string> seen;
  for (const Stage* stage : stages)
    for (const WorkingCopy& copy : stage->lowered.working_copies) {
      if (copy.parameter != spec.name || !seen.insert(copy.kind + copy.values[0].name).second) continue;
      if (plan_.options.state.shards())  // of shards a transposed copy is made by way of the other
        for (const auto& [to, from] : set_.ops().at(copy.kind).transposed)
          if (used.contains(copy.values[static_cast<std::size_t>(to)].name))
            used.insert(copy.values[static_cast<std::size_t>(from)].name);
      Op op{.kind = copy.kind, .inputs = {master}, .outputs = {}, .attributes = copy.attributes};
      for (const Value& value : copy.values)
        op.outputs.push_back(used.contains(value.name) ? program.add_value(value) : kNoValue);
      program.ops.push_back(std::move(op));
    }
  return program;
}

bool StatePrograms::reads_master(const ParameterSpec& spec, const std::vector<const Stage*>& stages) const {
  return parts_.precision.traits().working == master_dtype(spec) && parameters_read(stages, set_).contains(spec.name);
}

Program StatePrograms::advance(const std::vector<const Stage*>& stages) {
  Program program;
  program.name = "advance";
  for (const Stage* stage : stages) {
    const Program& read = stage->lowered.joint.program;
    for (const StateSpec& state : read.states) {
      const ValueId known = read.find(state.name);
      if (state.advance.empty() || known == kNoValue) continue;
      const ValueId id = program.add_value(read[known]);
      program.states.push_back(state);
      program.states.back().written = true;
      Op advance{.kind = state.advance, .inputs = {id}, .outputs = {id}, .attributes = state.attributes};
      if (!state.statistics.empty()) advance.inputs.push_back(program.add_value(read[read.find(state.statistics)]));
      program.ops.push_back(std::move(advance));
    }
  }
  return program;
}

Program StatePrograms::amax_of(const Value& tensor, const std::string& name, const std::string& format) {
  Program program;
  program.name = "amax";
  const ValueId input = program.add_value(tensor);
  const ValueId amax = program.add_value(
      {.name = name, .shape = {1}, .dtype = DType::f32, .role = Role::state, .parameter = tensor.parameter});
  program.ops.push_back({.kind = "amax", .inputs = {input}, .outputs = {amax}, .attributes = {{"format", format}}});
  return program;
}

}  // namespace quern
