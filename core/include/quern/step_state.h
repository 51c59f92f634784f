#pragma once
// Small structs in device memory that kernels read: a captured step has no constants that change, and clipping,
// skipping and the learning-rate schedule need no host synchronisation.

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
  float learning_rate = 0;    ///< of this step
  float clip_norm = 0;        ///< 0: do not clip
  std::uint32_t updates = 0;  ///< earlier steps that changed weights and moments; skipped steps do not count
  /// Share of this step in an average over all steps so far, weighted by the square of the largest rate until each.
  float average = 0;
  std::uint32_t reserved[8] = {};
};
static_assert(sizeof(StepState) == 64);

/// Sums over a step's micro-batches; state value "loss_stats", (4) f64 words.
struct LossStats {
  double loss_sum = 0;  ///< nats, over valid target tokens
  double valid_tokens = 0;
  double correct = 0;  ///< of them those predicted right, where the loss says so (OpSpec::Loss::correct)
  double reserved = 0;
};
static_assert(sizeof(LossStats) == 32);

/// Persistent state of a tensor quantized with a delayed scale, followed by `history` floats, newest first; state value
/// of ops `quantize_delayed` and `advance_scale`. All zero at first. Words marked (device) are a device's bookkeeping
/// within a launch and zero between launches.
struct ScaleState {
  float scale = 0;             ///< of the next launch; 0: nothing is known yet
  float amax = 0;              ///< largest since the last advance, over micro-steps
  std::uint32_t redo = 0;      ///< (device) the launch clipped and is repeated
  std::uint32_t ticket = 0;    ///< (device) blocks that are done
  std::uint32_t amax_now = 0;  ///< (device) bits of the launch's amax so far
  std::uint32_t redone = 0;    ///< repeated launches since the last advance
  std::uint32_t filled = 0;    ///< entries of the history in use
  float assumed = 0;           ///< `scale` as the last launch found it; zero after an advance
  std::uint32_t reserved[8] = {};
};
static_assert(sizeof(ScaleState) == 64);
inline constexpr std::int64_t kScaleStateWords = 16;

/// Statistics of a quantized tensor's values and scales, over the micro-steps of an observed step; written by
/// `observe_scale`, (16) u32 words.
struct ScaleObservation {
  float amax = 0;            ///< largest finite magnitude
  float largest_scale = 0;   ///< of finite scales with a nonzero value, as the next
  float smallest_scale = 0;  ///< infinite before any
  std::uint32_t reserved = 0;
  std::uint64_t elements = 0;
  std::uint64_t underflowed = 0;  ///< nonzero values that became zero
  std::uint64_t clipped = 0;      ///< beyond the range; under a delayed scale, before its repair
  std::uint64_t non_finite = 0;   ///< not finite, or with such a scale; in neither of the two before
  std::uint32_t reserved_too[4] = {};
};
static_assert(sizeof(ScaleObservation) == 64);
inline constexpr std::int64_t kScaleObservationWords = 16;

/// Written by `clip_scale`, read by optimizer ops; state value "update", (4) f32 words.
struct UpdateState {
  float gradient_scale = 0;  ///< raw gradient sums are multiplied by it: clip / (valid tokens * seed)
  float gradient_norm = 0;   ///< before clipping, of the mean loss
  float apply = 0;           ///< 1: finite, update; 0: skip
  float reserved = 0;
};
static_assert(sizeof(UpdateState) == 16);

}  // namespace quern
