#pragma once
// A tiny model's training, on the CPU device unless said otherwise.

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "conformance/trial.h"
#include "plan/test_plans.h"

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

using conformance::random_batch;

struct OwnDevice {
  std::unique_ptr<Device> own_device;
};

class TinyRun : private OwnDevice, public conformance::Trial {
 public:
  TinyRun(const testkit::TinyModelOptions& form, const PlanOptions& options, DType dtype = DType::f32)
      : OwnDevice{cpu_device()}, Trial(plugin_host(), plan_of(form, options, dtype, *own_device), *own_device) {}
  /// `device` is open and outlives the run.
  TinyRun(const testkit::TinyModelOptions& form, const PlanOptions& options, DType dtype, Device& device)
      : Trial(plugin_host(), plan_of(form, options, dtype, device), device) {}
  TinyRun(Plan plan, Device& device) : Trial(plugin_host(), std::move(plan), device) {}

 private:
  static Plan plan_of(const testkit::TinyModelOptions& form, PlanOptions options, DType dtype, const Device& device) {
    options.uploads = 4;
    return tiny_plan(options, device, testkit::PlainPrecision(dtype), form,
                     conformance::traits_of_stores(plugin_host(), options.state));
  }
};

}  // namespace quern::testing
