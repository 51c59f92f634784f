#pragma once
// An engine for a tiny model, on the CPU device unless said otherwise, and what tests read from it.

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "engine/engine.h"
#include "engine/host_tensor.h"
#include "plan/test_plans.h"
#include "plugin/plugin_host.h"
#include "quern/random.h"
#include "run/weights.h"

namespace quern::testing {

inline PluginHost& plugin_host() {
  static PluginHost host(PluginHost::standard_folders());
  return host;
}

/// Open; `settings` change options from their defaults.
inline std::unique_ptr<Device> cpu_device(const std::vector<std::pair<std::string, OptionValue>>& settings = {}) {
  OptionValues values = default_values(plugin_host().require("device", "cpu").options);
  for (const auto& [name, value] : settings) values.set(name, value);
  auto device = plugin_host().create<Device>("cpu", values);
  device->open(0);
  return device;
}

inline std::unique_ptr<OffloadStore> host_store(Device& device) {
  auto store =
      plugin_host().create<OffloadStore>("host", default_values(plugin_host().require("offload", "host").options));
  store->open(device);
  return store;
}

/// Random tokens; some targets do not count.
inline Batch random_batch(const Geometry& geometry, std::int64_t vocabulary, std::uint64_t seed) {
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

class TinyRun {
 public:
  TinyRun(testkit::TinyModelOptions form, PlanOptions options, DType dtype = DType::f32)
      : own_device_(cpu_device()), device_(*own_device_) {
    start(plan_of(form, std::move(options), dtype, device_));
  }
  /// `device` is open and outlives the run.
  TinyRun(testkit::TinyModelOptions form, PlanOptions options, DType dtype, Device& device)
      : TinyRun(plan_of(form, std::move(options), dtype, device), device) {}
  TinyRun(Plan plan, Device& device) : device_(device) { start(std::move(plan)); }
  Engine& engine() { return *engine_; }
  const Plan& plan() const { return engine_->plan(); }

  std::vector<float> tensor(const std::string& kind, const std::string& parameter, int layer) const {
    const PlannedTensor& tensor = plan().tensor(kind, parameter, layer);
    std::vector<std::byte> stored(static_cast<std::size_t>(tensor.bytes()));
    engine_->read(tensor, stored.data());
    std::vector<float> values(static_cast<std::size_t>(element_count(tensor.extents)));
    decode(stored.data(), tensor.dtype, values);
    return values;
  }
  /// All tensors of a kind, by "parameter/layer".
  std::map<std::string, std::vector<float>> all(const std::string& kind) const {
    std::map<std::string, std::vector<float>> found;
    for (const PlannedTensor& t : plan().tensors)
      if (t.kind == kind) found[t.parameter + "/" + std::to_string(t.layer)] = tensor(kind, t.parameter, t.layer);
    return found;
  }
  /// Gradients of one micro-batch.
  std::map<std::string, std::vector<float>> gradients(const Batch& batch) {
    engine_->micro_step(batch, {});
    return all("gradient");
  }

 private:
  static Plan plan_of(const testkit::TinyModelOptions& form, PlanOptions options, DType dtype, const Device& device) {
    options.uploads = 4;
    return tiny_plan(options, device, testkit::PlainPrecision(dtype), form);
  }
  void start(Plan plan) {
    std::vector<OffloadStore*> stores;
    for (std::size_t i = 0; i < plan.stores.size(); ++i) {
      stores_.push_back(host_store(device_));
      stores.push_back(stores_.back().get());
    }
    engine_ = std::make_unique<Engine>(device_, std::move(plan), stores);
    initialise_weights(*engine_, 7);
  }

  std::unique_ptr<Device> own_device_;
  Device& device_;
  std::vector<std::unique_ptr<OffloadStore>> stores_;
  std::unique_ptr<Engine> engine_;
};

}  // namespace quern::testing
