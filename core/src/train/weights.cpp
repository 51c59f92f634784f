#include "train/weights.h"

#include <cmath>
#include <numbers>

#include "quern/error.h"
#include "quern/random.h"
#include "train/host_tensor.h"

namespace quern {

namespace {

// Calls visit(parameter plan, layer) for every parameter tensor, layer -1 outside the blocks.
template <class Visit>
void for_each_parameter(const Plan& plan, Visit visit) {
  for (const ParameterPlan& parameter : plan.parameters) {
    bool in_layers = parameter.spec.group == ParameterGroup::block;
    for (int layer = in_layers ? 0 : -1; layer < (in_layers ? static_cast<int>(plan.model.layers) : 0); ++layer)
      visit(parameter.spec, layer);
  }
}

// Box-Muller on the counter-based generator: element i depends on the seed, the tensor and i only.
float normal(const RandomKey& key, std::uint64_t index) {
  auto words = random_block(key, 0, index);
  double radius = std::sqrt(-2.0 * std::log(double{to_unit(words[0])}));
  return static_cast<float>(radius * std::cos(2.0 * std::numbers::pi * double{to_unit(words[1])}));
}

std::vector<float> initial_values(const ParameterSpec& spec, const RandomKey& key) {
  std::vector<float> values(static_cast<std::size_t>(spec.count()));
  std::size_t at = 0;
  for (const ParameterPart& part : spec.parts) {
    std::size_t end = at + static_cast<std::size_t>(part.rows * spec.columns());
    for (; at < end; ++at) {
      switch (part.init.kind) {
        case Init::Kind::zeros: values[at] = 0; break;
        case Init::Kind::ones: values[at] = 1; break;
        case Init::Kind::normal: values[at] = static_cast<float>(part.init.deviation) * normal(key, at); break;
      }
    }
  }
  return values;
}

}  // namespace

void initialise_weights(Engine& engine, std::uint64_t seed) {
  std::uint32_t object = 0;
  std::vector<std::byte> stored;
  for_each_parameter(engine.plan(), [&](const ParameterSpec& spec, int layer) {
    const PlannedTensor& tensor = engine.plan().tensor("master", spec.name, layer);
    stored.resize(static_cast<std::size_t>(tensor.bytes()));
    encode(initial_values(spec, {seed, RandomPurpose::init, object++}), tensor.dtype, stored.data());
    engine.write(tensor, stored.data());
  });
  engine.refresh();
}

void import_weights(Engine& engine, const std::string& path) {
  std::vector<ParameterSpec> specs;
  for (const ParameterPlan& parameter : engine.plan().parameters) specs.push_back(parameter.spec);
  std::vector<std::byte> stored;
  auto sink = [&](const ParameterSpec& spec, std::int64_t layer, std::int64_t first, std::span<const float> values) {
    PlannedTensor piece = engine.plan().tensor("master", spec.name, static_cast<int>(layer));
    piece.offset += first * static_cast<std::int64_t>(size_of(piece.dtype));
    piece.extents = {static_cast<std::int64_t>(values.size())};
    stored.resize(static_cast<std::size_t>(piece.bytes()));
    encode(values, piece.dtype, stored.data());
    engine.write(piece, stored.data());
  };
  import_hf_weights(WeightFiles(path), specs, engine.plan().model.layers, sink);
  engine.refresh();
}

void export_weights(Engine& engine, const std::string& directory, const HfExport& what) {
  std::vector<ParameterSpec> specs;
  for (const ParameterPlan& parameter : engine.plan().parameters) specs.push_back(parameter.spec);
  std::vector<std::byte> stored;
  auto reader = [&](const ParameterSpec& spec, std::int64_t layer, std::int64_t first, std::span<float> values) {
    PlannedTensor piece = engine.plan().tensor("master", spec.name, static_cast<int>(layer));
    piece.offset += first * static_cast<std::int64_t>(size_of(piece.dtype));
    piece.extents = {static_cast<std::int64_t>(values.size())};
    stored.resize(static_cast<std::size_t>(piece.bytes()));
    engine.read(piece, stored.data());
    decode(stored.data(), piece.dtype, values);
  };
  export_hf_model(directory, what, specs, engine.plan().model.layers, reader);
}

std::vector<PlannedTensor> training_state(const Plan& plan) {
  std::vector<PlannedTensor> state;
  for (const PlannedTensor& tensor : plan.tensors) {
    bool weights = tensor.kind == "master" || tensor.owner == TensorOwner::optimizer;
    if (weights || tensor.owner == TensorOwner::precision) state.push_back(tensor);
  }
  return state;
}

std::string state_name(const PlannedTensor& tensor) {
  std::string name = tensor.kind;
  if (!tensor.parameter.empty()) name += "/" + tensor.parameter;
  if (tensor.layer >= 0) name += "/" + std::to_string(tensor.layer);
  return name;
}

void load_state(Engine& engine, const Checkpoint& checkpoint) {
  for (const PlannedTensor& tensor : training_state(engine.plan())) {
    std::string name = state_name(tensor);
    const StoredTensor& stored = checkpoint.tensors.at(name);
    if (stored.extents != tensor.extents || stored.type != stored_type_of(tensor.dtype))
      throw Error(
          ErrorCode::input,
          {.where = checkpoint.path + ": " + name,
           .what = "does not fit this run",
           .found = std::string(name_of(stored.type)) + " " + to_string(stored.extents),
           .expected = std::string(name_of(tensor.dtype)) + " " + to_string(tensor.extents),
           .next = "resume with the model and optimizer settings of the checkpoint, or choose another log directory"});
    engine.write(tensor, checkpoint.tensors.bytes(stored).data());
  }
  engine.refresh();
}

}  // namespace quern
