#pragma once
// Small checkpoints that tests of this folder write, one for each step.

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <numeric>
#include <string>
#include <vector>

#include "checkpoint/checkpoint.h"

namespace quern {

inline CheckpointMeta meta_of(std::int64_t step) {
  return {step,
          "data at " + std::to_string(step),
          "device \"x\"\n\xc3\xa4",
          "[train]\nsteps = 5\n",
          "0.1.0",
          0,
          64 * step,
          true,
          {{"quern", "0.1.0", "0123456789abcdef"}, {"plugin x", "2", "f"}}};
}

/// Tensors of several types, whose content depends on the step.
struct State {
  explicit State(std::int64_t step) : bytes(7), weights(6), count(1, step) {
    std::iota(bytes.begin(), bytes.end(), static_cast<std::uint8_t>(step));
    std::iota(weights.begin(), weights.end(), static_cast<float>(step));
  }
  std::vector<NamedView> views() {
    return {{"moments", {bytes.data(), DType::e4m3, {7}}},
            {"weights", {weights.data(), DType::f32, {2, 3}}},
            {"empty", {nullptr, DType::bf16, {0}}},
            {"count", {count.data(), DType::i64, {}}}};
  }
  std::vector<std::uint8_t> bytes;
  std::vector<float> weights;
  std::vector<std::int64_t> count;
};

inline std::string write_step(const std::string& run, std::int64_t step) {
  return write_checkpoint(run, meta_of(step), State(step).views());
}

inline std::vector<std::string> names_in(const std::string& directory) {
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(directory)) names.push_back(entry.path().filename());
  std::sort(names.begin(), names.end());
  return names;
}

}  // namespace quern
