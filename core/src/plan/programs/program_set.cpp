#include "plan/programs/program_set.h"

#include <algorithm>
#include <map>
#include <optional>
#include <tuple>
#include <utility>

#include "hf/hf_weights.h"
#include "plan/time/estimate.h"
#include "program/heads.h"
#include "program/inputs.h"
#include "program/names.h"
#include "program/passes/observe.h"
#include "program/passes/read_as_stored.h"
#include "program/passes/rewrite.h"
#include "quern/error.h"
#include "quern/step_state.h"

namespace quern {

namespace {

/// The program's output with the cap that the loss has.
void cap_logits(Program& program, const Op& loss, const OpSet& ops, DType activation) {
  if (!loss.attributes.has("cap")) return;
  const ValueId logits = program.outputs[0];
  const std::string name = program[logits].name;
  program[logits].name += ".uncapped";
  program.outputs =
      append_op(program, ops, activation,
                {.kind = "soft_cap", .inputs = {logits}, .attributes = {{"cap", loss.attributes.real("cap")}}}, name);
}

const Op& loss_of(const Program& head) { return head.ops[static_cast<std::size_t>(head.producer(head.outputs[0]))]; }

/// The head without what adds to the objective.
Program without_losses(Program head, const OpSet& ops) {
  const ValueId loss = head.outputs[0];
  std::erase_if(head.ops, [&](const Op& op) { return op.outputs[0] == loss || ops.at(op.kind).objective; });
  return head;
}

/// The head with a plain matmul of unquantized operands in place of the loss, so that it hands on logits. With `rows`,
/// so many, of one token of each row: the input `rows` says which, counted over the whole micro-batch. The matmul's
/// results are then kept as they are, so that close tokens do not tie.
Program logits_program(const Program& head, const OpSet& ops, DType activation, std::optional<std::int64_t> rows) {
  const Op loss = loss_of(head);
  Program program = without_losses(head, ops);
  ValueId x = loss.inputs[0];
  if (rows) {
    const ValueId taken =
        program.add_value({.name = names::kRows, .shape = {*rows}, .dtype = DType::i32, .role = Role::runtime});
    x = append_op(program, ops, activation, {.kind = "embedding", .inputs = {taken, x}}, "last")[0];
  }
  program.outputs = append_op(program, ops, activation,
                              {.kind = "matmul",
                               .inputs = {x, loss.inputs[1], kNoValue},
                               .outputs = {},
                               .attributes = {{"transpose_a", std::int64_t{0}}, {"transpose_b", std::int64_t{1}}}},
                              rows ? names::kNextLogits : names::kLogits);
  if (rows) program[program.outputs[0]].dtype = DType::f32;
  cap_logits(program, loss, ops, activation);
  drop_unused(program);
  return program;
}

const ParameterSpec* spec_named(const std::vector<ParameterSpec>& specs, std::string_view name) {
  auto it = std::find_if(specs.begin(), specs.end(), [&](const ParameterSpec& spec) { return spec.name == name; });
  return it == specs.end() ? nullptr : &*it;
}

/// `outer` for the matmuls of the parameters named, `inner` for all others but those that are not quantized.
class ByParameter final : public PrecisionBackend {
 public:
  ByParameter(const PrecisionBackend& inner, const PrecisionBackend* outer, const std::vector<std::string>& names,
              const std::vector<ParameterSpec>& specs)
      : inner_(inner), outer_(outer), names_(names), specs_(specs) {}
  const PrecisionTraits& traits() const override { return inner_.traits(); }
  void lower(const ProductSite& site, Lowering& lowering) const override {
    if (const ParameterSpec* spec = spec_named(specs_, site.parameter); spec && !spec->quantized)
      return lower_to_matmul(site, lowering);
    const bool is_outer = outer_ && std::find(names_.begin(), names_.end(), site.parameter) != names_.end();
    (is_outer ? *outer_ : inner_).lower(site, lowering);
  }

 private:
  const PrecisionBackend& inner_;
  const PrecisionBackend* outer_;
  const std::vector<std::string>& names_;
  const std::vector<ParameterSpec>& specs_;
};

/// The program without dropout, which only training has.
Program without_dropout(Program program) {
  std::vector<ValueId> now(program.values.size());
  for (std::size_t i = 0; i < now.size(); ++i) now[i] = static_cast<ValueId>(i);
  std::erase_if(program.ops, [&](Op& op) {
    for (ValueId& id : op.inputs)
      if (id != kNoValue) id = now[static_cast<std::size_t>(id)];
    if (op.kind != "dropout") return false;
    now[static_cast<std::size_t>(op.outputs[0])] = op.inputs[0];
    return true;
  });
  for (ValueId& id : program.outputs) id = now[static_cast<std::size_t>(id)];
  drop_unused(program);
  return program;
}

void count_loss(Program& program, const OpSet& ops) {
  std::vector<ValueId> inputs{program.outputs[0], program.find(names::kTargets)};
  for (const Op& op : program.ops)
    if (const int correct = ops.at(op.kind).loss.correct; correct >= 0 && inputs.size() == 2)
      inputs.push_back(op.outputs[static_cast<std::size_t>(correct)]);
  append_loss_stats(program, ops, std::move(inputs));
  program.outputs.clear();
}

/// A head ends with a loss for each target.
void check_head(const Program& head) {
  const Value& loss = head[head.outputs[0]];
  const ValueId targets = head.find(names::kTargets);
  if (loss.dtype == DType::f32 && targets != kNoValue && head[targets].shape == loss.shape &&
      head.producer(head.outputs[0]) >= 0)
    return;
  throw Error(
      ErrorCode::config,
      {.where = "program " + head.name,
       .what = "its output is not a loss for each of the input " + std::string(names::kTargets),
       .found = loss.name + " " + to_string(loss.shape) + " " + std::string(name_of(loss.dtype)),
       .expected = targets == kNoValue ? "a program that reads the input" : to_string(head[targets].shape) + " f32",
       .next = "correct the model's head"});
}

}  // namespace

ProgramSet::ProgramSet(const PlanParts& parts, const PlanOptions& options)
    : parts_(parts), options_(options), ops_(builtin_ops()) {
  for (const OpSpec& spec : parts.custom_ops) ops_.add(spec);
  patterns_ = add_fusions(ops_, parts.device.fusions());
  parameters_ = parts.model.parameters();

  check_names();
  const ModelPrograms as_written = written();
  check_head(as_written.head);
  check_loss(as_written.head);
  std::vector<const Program*> programs{&as_written.embed};
  for (const Program& block : as_written.blocks) programs.push_back(&block);
  programs.push_back(&as_written.head);
  inputs_ = declared_inputs(programs);
  for (const Program* program : programs)
    for (const StateSpec& state : program->states) states_.insert(state.name);
  written_ = rotate(as_written, ops_);

  if (ops_.at(loss_of(written_.head).kind).training_kind.empty()) count_loss(written_.head, ops_);
  check_outer();
  check_trainable();
  embed = make_stage(written_.embed, parts.precision, false);
  for (const StateSpec& state : embed.lowered.joint.program.states)
    if (options_.train && !states_.contains(state.name))  // evaluations, which run the same program, would move it
      throw Error(ErrorCode::config, {.where = "precision",
                                      .what = "the model's embedding has a matmul whose scale has a history",
                                      .found = state.name,
                                      .expected = "scales of the current values, or a matmul that is not quantized",
                                      .next = "choose current scales, or set `quantized` of its parameter to false"});
  head = make_stage(written_.head, parts.precision, make_layer_stages());
}

bool ProgramSet::trains(const Program& program) const {
  return options_.train && std::any_of(program.values.begin(), program.values.end(), [&](const Value& value) {
           const ParameterSpec* spec =
               value.role == Role::parameter ? spec_named(parameters_, value.parameter) : nullptr;
           return spec && spec->trainable;
         });
}

void ProgramSet::check_names() const {
  const std::int64_t layers = parts_.model.traits().layers;
  std::set<std::string> names;
  auto refuse = [](const ParameterSpec& spec, const std::string& what, const std::string& found) {
    throw Error(ErrorCode::config, {.where = "model, parameter " + spec.name,
                                    .what = what,
                                    .found = found,
                                    .expected = "a name of its own for each part of a parameter in each layer",
                                    .next = "correct the model's parameters()"});
  };
  for (const ParameterSpec& spec : parameters_)
    for (const ParameterPart& part : spec.parts) {
      if (const std::string fault = heads_fault(part); !fault.empty())
        throw Error(ErrorCode::config, {.where = "model, parameter " + spec.name,
                                        .what = "heads of " + part.hf_name + " " + fault,
                                        .expected = "whole groups of heads, with all rows of the part",
                                        .next = "correct the model's parameters()"});
      if (part.hf_name.empty()) refuse(spec, "a part has no name in checkpoints and exports", "an empty hf_name");
      const std::int64_t instances = spec.group == ParameterGroup::block ? layers : 1;
      for (std::int64_t layer = 0; layer < instances; ++layer)
        if (const std::string name = hf_tensor_name(part, layer); !names.insert(name).second)
          refuse(spec, "two tensors have one name in checkpoints and exports", name);
    }
}

void ProgramSet::check_trainable() const {
  const std::vector<Program>& blocks = written_.blocks;
  if (!options_.train || trains(written_.embed) || trains(written_.head) ||
      std::any_of(blocks.begin(), blocks.end(), [&](const Program& block) { return trains(block); }))
    return;
  throw Error(ErrorCode::config, {.where = "train.groups",
                                  .what = "all parameters are frozen",
                                  .expected = "at least one that trains",
                                  .next = "set trainable = true in a group, or use an adapter"});
}

ModelPrograms ProgramSet::written() const {
  const Model& model = parts_.model;
  const ProgramBuilder::Context context{&ops_, parameters_, parts_.precision.traits().activation, options_.documents};
  auto write = [&](const std::string& name, auto program) {
    try {
      ProgramBuilder builder(name, context);
      program(builder);
      return builder.take();
    } catch (const Error& error) {
      if (error.code() != ErrorCode::internal) throw;
      ErrorDetail detail = error.detail();
      detail.where = "the model's program " + name + ": " + detail.where;
      throw Error(error.code(), std::move(detail));
    }
  };
  ModelPrograms programs{.embed = write("embed", [&](ProgramBuilder& b) { model.embed(b); }),
                         .blocks = {},
                         .block_of_layer = {},
                         .head = write("head", [&](ProgramBuilder& b) { model.head(b); })};
  std::map<std::int64_t, int> known;  // kind -> index
  for (std::int64_t layer = 0; layer < model.traits().layers; ++layer) {
    auto [it, fresh] = known.try_emplace(model.block_kind(layer), static_cast<int>(programs.blocks.size()));
    if (fresh) {
      const std::string name = it->second == 0 ? "block" : "block_" + std::to_string(it->second + 1);
      programs.blocks.push_back(write(name, [&](ProgramBuilder& b) { model.block(b, layer); }));
    }
    programs.block_of_layer.push_back(it->second);
  }
  return programs;
}

void ProgramSet::check_loss(const Program& head) const {
  const Op& loss = loss_of(head);
  const OpSpec::Loss takes = ops_.at(loss.kind).loss;
  auto refuse = [&](const std::string& where, const std::string& what, const std::string& next) {
    throw Error(ErrorCode::config, {.where = where, .what = what, .found = "loss " + loss.kind, .next = next});
  };
  if (options_.z_loss > 0 && !takes.z_loss)
    refuse("train.z_loss", "the model's loss has no such term", "set it to 0, or use a model that ends with lm_loss");
  if (!options_.logits && !options_.next_logits) return;
  const char* next = "set sample.every = 0, and make no texts with this model";
  if (!takes.logits || ops_.at(loss.kind).training_kind.empty())
    refuse("model", "its loss gives no logits of tokens", next);
  if (!parts_.model.traits().causal) refuse("model", "it is not causal, so it continues no text", next);
}

void ProgramSet::check_outer() const {
  const PrecisionBackend* outer = parts_.outer_precision;
  if (outer && (outer->traits().activation != parts_.precision.traits().activation ||
                outer->traits().working != parts_.precision.traits().working))
    throw Error(ErrorCode::config, {.where = "precision.outer",
                                    .what = "its activations or compute weights have another dtype",
                                    .found = std::string(name_of(outer->traits().activation)),
                                    .expected = std::string(name_of(parts_.precision.traits().activation)),
                                    .next = "choose a backend with the same activation dtype"});
  for (auto [key, count] :
       {std::pair("precision.first_layers", options_.first_layers), {"precision.last_layers", options_.last_layers}})
    if (count > parts_.model.traits().layers)
      throw Error(ErrorCode::config, {.where = key,
                                      .what = "more than the model's layers",
                                      .found = std::to_string(count),
                                      .expected = "at most " + std::to_string(parts_.model.traits().layers)});
  std::string matrices;
  std::set<std::string> known;
  for (const ParameterSpec& spec : parameters_)
    if (spec.extents.size() == 2) known.insert(spec.name), matrices += (matrices.empty() ? "" : ", ") + spec.name;
  for (const std::string& name : options_.outer_parameters)
    if (!known.contains(name))
      throw Error(ErrorCode::config, {.where = "precision.outer_parameters",
                                      .what = "the model has no such matrix",
                                      .found = name,
                                      .expected = "names among " + matrices});
}

// One stage for each combination of rotated program, precision, and whether its stream has a gradient, that occurs.
bool ProgramSet::make_layer_stages() {
  const PrecisionBackend* outer = parts_.outer_precision;
  std::int64_t layers = parts_.model.traits().layers;
  std::map<std::tuple<int, bool, bool>, int> known;
  bool below = trains(written_.embed);
  for (std::int64_t layer = 0; layer < layers; ++layer) {
    const int index = written_.block_of_layer[static_cast<std::size_t>(layer)];
    const Program& block = written_.blocks[static_cast<std::size_t>(index)];
    bool is_outer = outer && (layer < options_.first_layers || layer >= layers - options_.last_layers);
    auto [it, fresh] = known.try_emplace({index, is_outer, below}, static_cast<int>(stages_.size()));
    if (fresh) {
      stages_.push_back(make_stage(block, is_outer ? *outer : parts_.precision, below));
      if (is_outer) stages_.back().name += ".outer";
    }
    stage_of_layer_.push_back(it->second);
    below = below || trains(block);
  }
  return below;
}

std::set<std::string> ProgramSet::recomputed(const std::vector<std::string>& policy) const {
  std::set<std::string> names;
  if (options_.train)
    for (const Stage& stage : stages_) names.merge(recomputed_values(stage.lowered.joint, ops_, policy));
  return names;
}

Stage ProgramSet::make_stage(const Program& program, const PrecisionBackend& inner, bool below) {
  const ByParameter precision(inner, parts_.outer_precision, options_.outer_parameters, parameters_);
  Stage stage{.name = program.name, .model = program};
  LoweredProgram evaluate = as_stored(lower_precision({.program = without_dropout(program)}, ops_, precision));
  stage.evaluate = std::move(evaluate.joint.program);
  auto set_chunk = [&](Op& op) {
    if (ops_.at(op.kind).loss.chunk && options_.loss_chunk > 0) op.attributes.set("chunk", options_.loss_chunk);
  };
  for (Op& op : stage.evaluate.ops) set_chunk(op);
  stage.lowered.working_copies = std::move(evaluate.working_copies);
  if (!options_.train) return stage;
  const WantedGradients wanted{
      .trainable = [&](const std::string& name) { return spec_named(parameters_, name)->trainable; },
      .of_input = below};
  stage.joint = differentiate(program, ops_, precision.traits().activation, options_.gradient, wanted);
  for (Op& op : stage.joint.program.ops) {
    set_chunk(op);
    if (!ops_.at(op.kind).loss.z_loss) continue;
    op.attributes.set("z_loss", options_.z_loss);
    op.attributes.set("seed", double{kGradientSeed});
  }
  LoweredProgram lowered = lower_precision(stage.joint, ops_, precision);
  stage.transposing = lowered.joint.program;
  stage.lowered = as_stored(std::move(lowered));
  if (options_.observe) observe_scales(stage.lowered.joint.program, ops_);
  return stage;
}

LoweredProgram ProgramSet::as_stored(LoweredProgram lowered) const {
  const StoredCosts costs{.takes = [this](const OpInstance& op) { return takes(op); },
                          .seconds =
                              [this](const Program& program) {
                                return program_seconds(fused(program), ops_, options_.geometry, parts_.device);
                              }};
  lowered.joint = read_as_stored(std::move(lowered.joint), ops_, options_.geometry, costs);
  return lowered;
}

Program ProgramSet::fused(const Program& program) const {
  return fuse(program, ops_, patterns_, options_.geometry, [this](const OpInstance& op) { return takes(op); });
}

void ProgramSet::finish_stage(Stage& stage, const std::set<std::string>& recomputed) {
  stage.evaluate = fused(stage.evaluate);
  if (!options_.train) return;
  stage.split = partition(stage.lowered.joint, ops_, recomputed);
  stage.forward = fused(stage.split.forward);
  stage.backward = fused(stage.split.backward);
}

LayerClasses ProgramSet::layer_classes(const RecomputeChoice& choice) const {
  LayerClasses classes;
  for (std::size_t layer = 0; layer < stage_of_layer_.size(); ++layer) {
    const bool richer = options_.train && static_cast<std::int64_t>(layer) < choice.richer_layers;
    const std::pair stage{stage_of_layer_[layer], richer};
    const auto known = std::find(classes.stages.begin(), classes.stages.end(), stage);
    classes.of_layer.push_back(static_cast<int>(known - classes.stages.begin()));
    if (known == classes.stages.end()) classes.stages.push_back(stage);
  }
  return classes;
}

void ProgramSet::finish(const RecomputeChoice& choice) {
  DType activation = parts_.precision.traits().activation;
  // Its inputs are there in the backward pass, and nothing has a place for what it would keep.
  finish_stage(embed, recomputed_values(embed.lowered.joint, ops_, {"block"}));
  for (const auto& [stage, richer] : layer_classes(choice).stages) {
    classes.push_back(stages_[static_cast<std::size_t>(stage)]);
    if (richer) classes.back().name += ".richer";
    finish_stage(classes.back(), richer ? choice.fewer : choice.recomputed);
  }

  auto lowered = [&](const Program& program) {
    return as_stored(lower_precision({.program = program}, ops_, parts_.precision)).joint.program;
  };
  auto logits_of = [&](std::optional<std::int64_t> rows) {
    return fused(lowered(logits_program(head.model, ops_, activation, rows)));
  };
  if (options_.logits) logits = logits_of({});
  if (options_.next_logits) next_logits = logits_of(options_.geometry.batch);
  if (!head.evaluate.outputs.empty()) count_loss(head.evaluate, ops_);
  head.evaluate = fused(head.evaluate);
  if (!options_.train) return;
  head.forward = head.lowered.joint.program;
  if (!head.forward.outputs.empty()) count_loss(head.forward, ops_);
  // The gradient of the stream is what the head hands on.
  head.forward.outputs.clear();
  if (head.lowered.joint.gradient_out != kNoValue) head.forward.outputs = {head.lowered.joint.gradient_out};
  head.forward = fused(head.forward);
}

}  // namespace quern
