#include "plan/schedule/places.h"

#include <algorithm>
#include <utility>

#include "program/names.h"
#include "quern/error.h"

namespace quern {

namespace {

using Flow = Stop::Flow;

int position(const std::vector<ValueId>& list, ValueId id) {
  auto it = std::find(list.begin(), list.end(), id);
  return it == list.end() ? -1 : static_cast<int>(it - list.begin());
}

std::string in_layer(std::string_view name, int layer) {
  return std::string(name) + (layer < 0 ? "" : "@" + std::to_string(layer));
}

/// By a value's role.
std::string_view kind_of(const Value& value) {
  if (value.role == Role::parameter_grad) return names::kGradient;
  return value.role == Role::parameter && value.name == value.parameter ? names::kWorking
                                                                        : std::string_view(value.name);
}

}  // namespace

Places::Places(const Plan& plan, std::vector<std::string>& names) : plan_(plan), names_(names) {
  for (const ParameterPlan& parameter : plan.parameters)
    in_blocks_[parameter.spec.name] = parameter.spec.group == ParameterGroup::block;
}

std::int32_t Places::fresh(std::string name) {
  names_.push_back(std::move(name));
  return static_cast<std::int32_t>(names_.size() - 1);
}

// A shard that is seen in place is the value that it is a part of.
Access Places::at(const Place& place, std::int64_t known_by, std::string_view name, int layer) {
  auto [it, is_new] = settled_.try_emplace({place.space, place.index, known_by}, 0);
  if (is_new) it->second = fresh(in_layer(name, layer));
  return {place, it->second};
}

Access Places::tensor(const PlannedTensor& tensor) {
  if (tensor.owner == TensorOwner::loading) {  // one after another at one place
    auto [it, is_new] = loading_.try_emplace({tensor.kind, tensor.parameter, tensor.layer}, 0);
    if (is_new) it->second = fresh(in_layer("loading " + tensor.parameter, tensor.layer));
    return {tensor.place(), it->second};
  }
  return at(tensor.place(), tensor.part_of < 0 ? tensor.offset : tensor.part_of,
            tensor.parameter.empty() ? tensor.kind : tensor.kind + "." + tensor.parameter, tensor.layer);
}

Access Places::of_rows(const Stop& stop, const PlannedTensor& tensor, const Value& value) {
  if (stop.rows.whole() || tensor.bytes() == plan_.bytes_of(value)) return this->tensor(tensor);
  return this->tensor(tensor.part_at(shard_of_rows(tensor.whole_extents(), stop.rows)));
}

std::vector<Access> Places::of(const Stop& stop) {
  std::vector<Access> accesses;
  const Program& program = stop.program->program;
  accesses.reserve(program.values.size());
  for (std::size_t id = 0; id < program.values.size(); ++id)
    accesses.push_back(of_value(stop, static_cast<ValueId>(id)));
  return accesses;
}

Access Places::of_value(const Stop& stop, ValueId id) {
  const Program& program = stop.program->program;
  const Value& value = program[id];
  const int in = position(program.inputs, id), out = position(program.outputs, id);
  if (in >= 0 || out >= 0)
    if (Access access = boundary(stop, value, in, out); access.place.present()) return access;
  const std::vector<TensorId>& known = stop.program->tensors;
  if (const auto index = static_cast<std::size_t>(id); index < known.size() && !known[index].kind.empty())
    return of_rows(stop, plan_.part(known[index]), value);
  if (!value.parameter.empty()) {
    const auto found = in_blocks_.find(value.parameter);
    const int layer = found != in_blocks_.end() && found->second ? stop.layer : -1;
    const int part = stop.program->own ? TensorId::kOwn : TensorId::kWhole;
    return of_rows(stop, plan_.part({std::string(kind_of(value)), value.parameter, layer, part}), value);
  }
  switch (value.role) {
    case Role::runtime: return tensor(plan_.tensor({value.name}));
    case Role::state: return state(stop, value);
    case Role::observation: return tensor(plan_.tensor({value.name, "", stop.layer}));
    case Role::saved: return saved(stop, value);
    case Role::local: {
      const std::int64_t offset = stop.program->offsets[static_cast<std::size_t>(id)];
      if (offset < 0) return {};
      return {{Space::device, 0, plan_.transient_offset + stop.locals + offset, plan_.bytes_of(value)},
              fresh(in_layer(value.name, stop.layer))};
    }
    case Role::parameter:
    case Role::parameter_grad:
    case Role::boundary: break;
  }
  fail_internal("plan", "value " + value.name + " of " + program.name + " has no place");
}

Access Places::state(const Stop& stop, const Value& value) {
  if (value.name == names::kLossStats && stop.flow == Flow::evaluate) return tensor(plan_.tensor({names::kEvalStats}));
  const PlannedTensor* outside = plan_.find({value.name});
  return of_rows(stop, outside ? *outside : plan_.tensor({value.name, "", stop.layer}), value);
}

Access Places::boundary(const Stop& stop, const Value& value, int in, int out) {
  if (out >= 0 && !stop.result.empty()) return tensor(plan_.tensor({std::string(stop.result)}));
  if (out >= 0 && stop.boundary_out >= 0)
    return stream(stop, streams_out_of(plan_, stop)[static_cast<std::size_t>(out)], plan_.bytes_of(value));
  if (in < 0 || stop.boundary_in < 0) return {};
  return stream(stop, streams_into(plan_, stop)[static_cast<std::size_t>(in)], plan_.bytes_of(value));
}

// Where a neighbour keeps it on the device, else in memory of the run.
Access Places::stream(const Stop& stop, const StreamId& stream, std::int64_t bytes) {
  const PlannedTensor* kept = stop.flow == Flow::evaluate ? nullptr : kept_as(plan_, stream);
  return kept && kept->store < 0 ? tensor(*kept) : passing(stop, stream, bytes);
}

Access Places::passing(const Stop& stop, const StreamId& stream, std::int64_t bytes) {
  const std::size_t number = number_of(plan_, stream);
  const bool evaluated = stop.flow == Flow::evaluate;
  auto [it, is_new] = passing_.try_emplace({number, evaluated}, 0);
  if (is_new)
    it->second = fresh((evaluated         ? "evaluated stream "
                        : stream.gradient ? "stream gradient "
                                          : "stream ") +
                       std::to_string(stream.boundary) + (stream.gradient ? "" : "." + std::to_string(stream.operand)));
  return {{Space::device, 0, plan_.transient_offset + memory_.streams[number], bytes}, it->second};
}

std::vector<Places::KeptStream> Places::kept_streams(const Stop& stop) {
  std::vector<KeptStream> kept;
  const Program& program = stop.program->program;
  const std::vector<StreamId> streams = streams_out_of(plan_, stop);
  for (std::size_t o = 0; o < streams.size(); ++o) {
    const PlannedTensor* tensor = kept_as(plan_, streams[o]);
    if (!tensor || tensor->store < 0) continue;
    if (stop.layer == 0 && position(program.inputs, program.outputs[o]) >= 0) continue;  // put as it came
    kept.push_back({passing(stop, streams[o], tensor->bytes()), this->tensor(*tensor)});
  }
  return kept;
}

// A kept input may live with the neighbour that made it.
Access Places::saved(const Stop& stop, const Value& value) {
  const Program& forward = plan_.layer_class(stop.layer).forward.program;
  const int in = position(forward.inputs, forward.find(value.name));
  const PlannedTensor* kept = in >= 0 ? kept_as(plan_, {stop.layer, in}) : nullptr;
  return tensor(kept ? *kept : plan_.tensor({value.name, "", stop.layer}));
}

}  // namespace quern
