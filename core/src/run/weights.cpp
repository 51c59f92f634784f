#include "run/weights.h"

#include <algorithm>
#include <cmath>
#include <numbers>
#include <thread>

#include "engine/host_tensor.h"
#include "program/names.h"
#include "quern/error.h"
#include "quern/random.h"

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

// Box-Muller on the counter-based generator: element i depends on the seed, the tensor and i only. Two words give two
// numbers, so a block of four gives four.
float normal(const RandomKey& key, std::uint64_t index) {
  auto words = random_block(key, 0, index / 4);
  std::size_t pair = index % 4 / 2 * 2;
  float radius = std::sqrt(-2.0f * std::log(to_unit(words[pair])));
  float angle = 2.0f * std::numbers::pi_v<float> * to_unit(words[pair + 1]);
  return radius * (index % 2 == 0 ? std::cos(angle) : std::sin(angle));
}

void fill_part(const ParameterPart& part, const RandomKey& key, std::uint64_t first, std::span<float> values) {
  if (part.init.kind != Init::Kind::normal) {
    std::fill(values.begin(), values.end(), part.init.kind == Init::Kind::ones ? 1.0f : 0.0f);
    return;
  }
  for (std::size_t i = 0; i < values.size(); ++i)
    values[i] = static_cast<float>(part.init.deviation) * normal(key, first + i);
}

// Billions of numbers at 32B: all cores, each its own range.
std::vector<float> initial_values(const ParameterSpec& spec, const RandomKey& key) {
  std::vector<float> values(static_cast<std::size_t>(spec.count()));
  std::size_t at = 0;
  for (const ParameterPart& part : spec.parts) {
    std::size_t count = static_cast<std::size_t>(part.rows * spec.columns());
    std::size_t workers = count < 100000 ? 0 : std::max(1u, std::thread::hardware_concurrency());
    if (workers == 0) fill_part(part, key, at, std::span(values).subspan(at, count));
    std::vector<std::jthread> threads;
    for (std::size_t worker = 0; worker < workers; ++worker) {
      std::size_t begin = at + count * worker / workers, end = at + count * (worker + 1) / workers;
      threads.emplace_back(
          [&, begin, end] { fill_part(part, key, begin, std::span(values).subspan(begin, end - begin)); });
    }
    threads.clear();  // joins
    at += count;
  }
  return values;
}

}  // namespace

void initialise_weights(Engine& engine, std::uint64_t seed) {
  std::uint32_t object = 0;
  std::vector<std::byte> stored;
  for_each_parameter(engine.plan(), [&](const ParameterSpec& spec, int layer) {
    const PlannedTensor& tensor = engine.plan().tensor(names::kMaster, spec.name, layer);
    stored.resize(static_cast<std::size_t>(spec.count()) * size_of(tensor.dtype));
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
    const PlannedTensor& tensor = engine.plan().tensor(names::kMaster, spec.name, static_cast<int>(layer));
    stored.resize(values.size() * size_of(tensor.dtype));
    encode(values, tensor.dtype, stored.data());
    engine.write(tensor, first, static_cast<std::int64_t>(values.size()), stored.data());
  };
  import_hf_weights(WeightFiles(path), specs, engine.plan().model.layers, sink);
  engine.refresh();
}

void export_weights(Engine& engine, const std::string& directory, const HfExport& what) {
  std::vector<ParameterSpec> specs;
  for (const ParameterPlan& parameter : engine.plan().parameters) specs.push_back(parameter.spec);
  std::vector<std::byte> stored;
  auto reader = [&](const ParameterSpec& spec, std::int64_t layer, std::int64_t first, std::span<float> values) {
    const PlannedTensor& tensor = engine.plan().tensor(names::kMaster, spec.name, static_cast<int>(layer));
    stored.resize(values.size() * size_of(tensor.dtype));
    engine.read(tensor, first, static_cast<std::int64_t>(values.size()), stored.data());
    decode(stored.data(), tensor.dtype, values);
  };
  export_hf_model(directory, what, specs, engine.plan().model.layers, reader);
}

}  // namespace quern
