#pragma once
// Real model plugins against transformers, on any device: logits, loss and every gradient of the committed goldens,
// which tests/goldens/make_goldens.py made in double precision.

#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "plugin/plugin_host.h"
#include "training_fixture.h"

namespace quern::testing {

/// Folders with config.json, model.safetensors and golden.safetensors.
std::vector<std::filesystem::path> golden_cases();

/// The engine of a folder's model.
struct PluginRun {
  /// `device` is open and outlives the run.
  PluginRun(const std::filesystem::path& folder, Device& device, const std::string& precision = "fp32");
  void start(Geometry geometry);

  PluginHost host;
  std::unique_ptr<Model> model;
  std::unique_ptr<PrecisionBackend> precision;
  AdamW optimizer{AdamWOptions{}};
  std::vector<OpSpec> custom_ops;
  Device& device;
  std::unique_ptr<Engine> engine;
};

/// Largest errors that are let pass: of an element, relative to its tensor's largest (small elements are sums that
/// cancel); and of a tensor, the norm of the difference over the norm.
struct GoldenTolerance {
  double element = 0, tensor = 0, loss = 0;
};
/// fp32 sums of some hundred terms, in another order than double precision's.
inline constexpr GoldenTolerance kFp32{1e-5, 1e-5, 1e-5};
/// Every value is rounded to bf16 (2^-9 of it) on its way through the layers and back, some thirty times; on the CPU
/// that comes to 6% of an element and 4% of a tensor at worst, in gradients of norms and biases. Twice that for other
/// sums.
inline constexpr GoldenTolerance kBf16{0.12, 0.08, 2e-3};

void check_golden(const std::filesystem::path& folder, Device& device, const std::string& precision,
                  const GoldenTolerance& tolerance);

}  // namespace quern::testing
