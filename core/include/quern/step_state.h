#pragma once
// Small blocks that live in device memory so that kernels read them there: nothing of a captured step is baked in, and
// no host synchronisation is needed to clip, skip or schedule.

#include <cstdint>

namespace quern {

/// The gradient seed: every dlogits is multiplied by it, and the optimizer divides it out. A power of two, so exact.
inline constexpr float kGradientSeed = 1.0f;

/// Written by the host before each micro-step; runtime value "step", (16) u32 words.
struct StepState {
  std::uint32_t step = 0;  ///< optimizer steps finished before this one
  std::uint32_t micro_step = 0;
  std::uint32_t seed_low = 0;  ///< of the run's RandomKey
  std::uint32_t seed_high = 0;
  float learning_rate = 0;  ///< of this step
  float clip_norm = 0;      ///< 0: do not clip
  std::uint32_t reserved[10] = {};
};
static_assert(sizeof(StepState) == 64);

/// Sums over a step's micro-batches; state value "loss_stats", (4) f64 words.
struct LossStats {
  double loss_sum = 0;  ///< nats, over valid target tokens
  double valid_tokens = 0;
  double reserved[2] = {};
};
static_assert(sizeof(LossStats) == 32);

/// Written by `clip_scale`, read by optimizer ops; state value "update", (4) f32 words.
struct UpdateState {
  float gradient_scale = 0;  ///< raw gradient sums are multiplied by it: clip / (valid tokens * seed)
  float gradient_norm = 0;   ///< before clipping, of the mean loss
  float apply = 0;           ///< 1: finite, update; 0: skip
  float reserved = 0;
};
static_assert(sizeof(UpdateState) == 16);

}  // namespace quern
