#pragma once
// What the optimizers' ops share: words read from memory, lists of tensors, and stochastic rounding. Draws depend on an
// element's global index, so shards agree with the whole.

#include <cstdint>
#include <cstring>
#include <span>

#include "quern/random.h"
#include "quern/step_state.h"
#include "runtime/kernels.h"

namespace quern::cpu {

void add_element_update_ops(OpTable& table);  // adamw, sgd, lion, schedule_free, exchange
void add_adamw_8bit_op(OpTable& table);
void add_muon_ops(OpTable& table);  // muon_direction, over_norm, weighted_sum, muon_apply

template <class Block>
Block read(const View& view) {
  Block block;
  std::memcpy(&block, view.data, sizeof block);
  return block;
}

inline std::uint64_t seed_of(const StepState& step) { return std::uint64_t{step.seed_high} << 32 | step.seed_low; }

/// Masters and states of an update, by the purpose that rounds them.
inline constexpr RandomPurpose kRounding[] = {RandomPurpose::round_master, RandomPurpose::round_moment1,
                                              RandomPurpose::round_moment2};

/// Words for elements [first, first + count) of a stream. `space` holds count + 8.
const std::uint32_t* random_words(const RandomKey& key, std::uint32_t step, std::uint64_t first, std::int64_t count,
                                  std::uint32_t* space);

/// Rounds to elements [begin, begin + count) of a bf16 view; f32 values are in place already. `first` is the global
/// index of the view's element 0.
void store_stochastic(const View& to, std::int64_t begin, std::int64_t count, const float* values, const RandomKey& key,
                      std::uint32_t step, std::uint64_t first);

/// Every output is the memory of its input.
void need_in_place(const char* kind, const View& input, const View& output);

// ---- AdamW, whatever its moments are stored in ----

struct AdamwStep {
  float gradient_scale, beta1, one_minus_beta1, beta2, one_minus_beta2, keep, rate, inverse_root2, eps;
};
AdamwStep adamw_step(const Attributes& attributes, const StepState& step, const UpdateState& update);
/// old, fresh: master, moment1, moment2.
void adamw_row(const AdamwStep& step, const float* gradient, const float* const* old, std::int64_t count,
               float* const* fresh);

}  // namespace quern::cpu
