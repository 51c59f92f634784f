#include "conformance/harness/trial.h"

#include <cmath>
#include <cstring>

#include "checkpoint/saved_state.h"
#include "conformance/report.h"
#include "engine/host_tensor.h"
#include "optimizer/adamw.h"
#include "quern/testkit/compare.h"
#include "quern/testkit/tiny_model.h"
#include "run/weights.h"

namespace quern::conformance {

namespace {

std::unique_ptr<OffloadStore> make_store(PluginHost& host, const std::string& id) {
  return host.create<OffloadStore>(id, default_values(host.require("offload", id).options));
}

Plan plan_of(const TrialParts& parts, PlanOptions options, PluginHost& host) {
  static const testkit::PlainPrecision plain;
  static const AdamW adamw{AdamWOptions{}};
  options.uploads = 4;
  const std::vector<OpSpec> ops = host.ops();
  PlanParts all{parts.model, parts.precision ? *parts.precision : plain, parts.device,
                parts.optimizer ? *parts.optimizer : adamw, ops};
  all.stores = traits_of_stores(host, options.state);
  return make_plan(all, options);
}

template <class Map>
std::string different(const Map& got, const Map& want) {
  for (const auto& [name, values] : want) {
    auto found = got.find(name);
    if (found == got.end() || found->second.size() != values.size() ||
        std::memcmp(found->second.data(), values.data(), values.size() * sizeof values[0]) != 0)
      return name;
  }
  return got.size() == want.size() ? "" : "the list of tensors";
}

}  // namespace

std::string tensor_name(const PlannedTensor& tensor) {
  return tensor.parameter + (tensor.layer < 0 ? "" : "/" + std::to_string(tensor.layer));
}

std::string first_difference(const State& got, const State& want) { return different(got, want); }
std::string first_difference(const Tensors& got, const Tensors& want) { return different(got, want); }

std::vector<OffloadTraits> traits_of_stores(PluginHost& host, const StatePlacement& state) {
  std::map<std::string, OffloadTraits> found;
  for (const PlacedKey& key : kPlacedKeys)
    if (const std::string& id = (state.*key.placement).memory; id != kOnDevice && !found.contains(id))
      found[id] = make_store(host, id)->traits();
  std::vector<OffloadTraits> traits;
  for (const auto& [id, known] : found) traits.push_back(known);
  return traits;
}

Batch random_batch(const Geometry& geometry, std::int64_t vocabulary, std::uint64_t seed) {
  Batch batch;
  for (std::int64_t i = 0; i < geometry.tokens(); ++i) {
    std::uint32_t word = random_word({seed, RandomPurpose::sample, 0}, 0, static_cast<std::uint64_t>(i));
    batch.tokens.push_back(static_cast<std::int32_t>(word % static_cast<std::uint32_t>(vocabulary)));
    batch.targets.push_back(
        word % 11 == 0 ? -1 : static_cast<std::int32_t>((word >> 8) % static_cast<std::uint32_t>(vocabulary)));
    batch.positions.push_back(static_cast<std::int32_t>(i % geometry.sequence));
  }
  return batch;
}

namespace {

std::vector<std::int32_t> integers_of(const Value& input, std::int64_t count, std::uint64_t seed) {
  if (input.below < 1)
    broken("input " + input.name, "no bound", "ProgramBuilder::input with a bound that all integers are below");
  std::vector<std::int32_t> values;  // all values in turn, so that few elements have many of them
  for (std::int64_t i = 0; i < count; ++i)
    values.push_back(static_cast<std::int32_t>((i + static_cast<std::int64_t>(seed)) % input.below));
  return values;
}

}  // namespace

Batch random_batch(const Plan& plan, std::uint64_t seed) {
  const Geometry& geometry = plan.options.geometry;
  const std::int64_t vocabulary = plan.model.vocabulary;
  Batch batch = random_batch(geometry, std::max<std::int64_t>(vocabulary, 1), seed);
  for (const Value& input : plan.uploaded) {
    const std::int64_t count = element_count(extents_at(input.shape, geometry));
    const bool targets = input.name == "targets";
    if (input.name == "tokens" || input.name == "positions" || input.name == "documents" || input.name == "step" ||
        (targets && input.below == 0 && vocabulary > 0))
      continue;
    if (input.dtype == DType::f32) {
      batch.set(input.name, std::span<const float>(testkit::random_normal(count, seed)));
    } else if (input.dtype == DType::u8) {
      std::vector<std::uint8_t> values;
      for (std::int64_t i = 0; i < count; ++i)
        values.push_back(static_cast<std::uint8_t>(7 * i + i / 256 + static_cast<std::int64_t>(seed)));
      batch.set(input.name, std::span<const std::uint8_t>(values));
    } else if (input.dtype == DType::i32) {
      std::vector<std::int32_t> values = integers_of(input, count, seed);
      if (targets) {
        if (count > 2) values[static_cast<std::size_t>(seed) % values.size()] = -1;
        batch.targets = std::move(values);
      } else {
        batch.set(input.name, std::span<const std::int32_t>(values));
      }
    } else {
      throw Skipped{"input " + input.name + " is of none of f32, i32 and u8"};
    }
  }
  return batch;
}

Trial::Trial(PluginHost& host, const TrialParts& parts, PlanOptions options)
    : Trial(host, plan_of(parts, std::move(options), host), parts.device) {}

Trial::Trial(PluginHost& host, Plan plan, Device& device) {
  std::vector<OffloadStore*> stores;
  for (const StorePlan& wanted : plan.stores) {
    stores_.push_back(make_store(host, wanted.id));
    stores_.back()->open(device, {});
    stores.push_back(stores_.back().get());
  }
  engine_ = std::make_unique<Engine>(device, std::move(plan), stores);
  initialise_weights(*engine_, 7);
}

std::vector<float> Trial::tensor(const std::string& kind, const std::string& parameter, int layer) {
  const PlannedTensor& tensor = plan().tensor({kind, parameter, layer});
  std::vector<std::byte> stored(static_cast<std::size_t>(tensor.bytes()));
  engine_->read(tensor, stored.data());
  std::vector<float> values(static_cast<std::size_t>(element_count(tensor.extents)));
  decode(stored.data(), tensor.dtype, values);
  return values;
}

void Trial::write(const std::string& kind, const std::string& parameter, int layer, const std::vector<float>& values) {
  const PlannedTensor& tensor = plan().tensor({kind, parameter, layer});
  std::vector<std::byte> stored(static_cast<std::size_t>(tensor.bytes()));
  encode(values, tensor.dtype, stored.data());
  engine_->write(tensor, stored.data());
  engine_->refresh();
}

Tensors Trial::all(const std::string& kind) {
  Tensors found;
  for (const PlannedTensor& t : plan().tensors)
    if (t.kind == kind) found[tensor_name(t)] = tensor(kind, t.parameter, t.layer);
  return found;
}

Tensors Trial::gradients(const Batch& batch, std::uint32_t micro_steps_before) {
  engine_->micro_step(batch, {.micro_step = micro_steps_before}, {.first = micro_steps_before == 0});
  return all("gradient");
}

void Trial::stir(std::string_view ending) {
  for (const PlannedTensor& master : plan().tensors) {
    if (master.kind != "master" || master.owner == TensorOwner::loading || !master.parameter.ends_with(ending))
      continue;
    std::vector<float> values = tensor("master", master.parameter, master.layer);
    const auto noise = testkit::random_normal(static_cast<std::int64_t>(values.size()), 11, 0.1);
    for (std::size_t i = 0; i < values.size(); ++i) values[i] += noise[i];
    write("master", master.parameter, master.layer, values);
  }
}

double Trial::loss(const Batch& batch) {
  LossStats stats = engine_->evaluate(batch);
  return stats.loss_sum / stats.valid_tokens;
}

double Trial::train(std::uint32_t first, std::uint32_t end) {
  double loss = std::nan("");
  for (std::uint32_t step = first; step < end; ++step) {
    StepState state{.step = step, .seed_low = 5, .learning_rate = 1e-2f, .clip_norm = 1.0f, .updates = step};
    state.average = 1.0f / static_cast<float>(step + 1);
    engine_->micro_step(random_batch(plan(), step), state);
    engine_->update();
    Engine::StepResult result = engine_->result();
    loss = result.loss.loss_sum / result.loss.valid_tokens;
  }
  return loss;
}

State Trial::state() {
  State state;
  for (const PlannedTensor& tensor : training_state(plan())) {
    std::vector<std::byte>& bytes = state[state_name(tensor)];
    bytes.resize(static_cast<std::size_t>(tensor.bytes()));
    engine_->read(tensor, bytes.data());
  }
  return state;
}

void Trial::restore(const State& state) {
  for (const PlannedTensor& tensor : training_state(plan()))
    engine_->write(tensor, state.at(state_name(tensor)).data());
  engine_->refresh();
}

std::string resumes(const std::function<std::unique_ptr<Trial>()>& make) {
  auto straight = make();
  const double want = straight->train(0, 3);
  State saved;
  {
    auto first = make();
    first->train(0, 2);
    saved = first->state();
  }
  auto second = make();
  second->restore(saved);
  const double got = second->train(2, 3);
  need(got == want, "loss of step 3 after a restart", number(got), number(want) + ", bit for bit");
  const std::string difference = first_difference(second->state(), straight->state());
  need(difference.empty(), difference + " after a restart at step 2 and one more step", "other bits",
       "the bits of three steps without a restart");
  return std::to_string(saved.size()) + " tensors of state";
}

}  // namespace quern::conformance
