// Updates of elements one by one: AdamW (Loshchilov & Hutter, "Decoupled Weight Decay Regularization", 2019), SGD with
// momentum, Lion (Chen et al., "Symbolic Discovery of Optimization Algorithms", 2023), and schedule-free AdamW (Defazio
// et al., "The Road Less Scheduled", 2024). The master's update uses the states before they are rounded for storage.
// bf16 masters and states round stochastically.

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <string>

#include "optimizer/update.h"
#include "primitives/blocks.h"
#include "primitives/rows.h"
#include "primitives/simd.h"
#include "quern/error.h"
#include "quern/numeric.h"
#include "runtime/operand_check.h"
#include "shared/operands/op_checks.h"

namespace quern::cpu {

namespace {

constexpr int kGradient = 0, kWords = 1, kFirst = 2;  // scratch

/// The words of `random_block` for blocks of four elements from block `first`: its rounds again, in a form that is
/// inlined whole and so vectorises. The 64-bit block index may cross a multiple of 2^32.
QUERN_CPU_CLONES void random_blocks(const RandomKey& key, std::uint32_t step, std::uint64_t first, std::int64_t blocks,
                                    std::uint32_t* words) {
  const auto seed_low = static_cast<std::uint32_t>(key.seed), seed_high = static_cast<std::uint32_t>(key.seed >> 32);
  const std::uint32_t purpose = static_cast<std::uint32_t>(key.purpose) << 24, object = key.object;
  const auto low = static_cast<std::uint32_t>(first), high = static_cast<std::uint32_t>(first >> 32);
#pragma omp simd
  for (std::int64_t block = 0; block < blocks; ++block) {
    std::uint32_t c0 = low + static_cast<std::uint32_t>(block), carry = c0 < low;
    std::uint32_t c1 = (high + carry) ^ purpose, c2 = step, c3 = object, k0 = seed_low, k1 = seed_high;
#pragma GCC unroll 10
    for (int round = 0; round < 10; ++round) {
      std::uint64_t p0 = std::uint64_t{0xD2511F53u} * c0, p1 = std::uint64_t{0xCD9E8D57u} * c2;
      c0 = static_cast<std::uint32_t>(p1 >> 32) ^ c1 ^ k0;
      c1 = static_cast<std::uint32_t>(p1);
      c2 = static_cast<std::uint32_t>(p0 >> 32) ^ c3 ^ k1;
      c3 = static_cast<std::uint32_t>(p0);
      k0 += 0x9E3779B9u;
      k1 += 0xBB67AE85u;
    }
    words[4 * block] = c0;
    words[4 * block + 1] = c1;
    words[4 * block + 2] = c2;
    words[4 * block + 3] = c3;
  }
}

QUERN_CPU_CLONES void round_stochastic(const float* values, const std::uint32_t* words, std::int64_t count,
                                       std::uint16_t* to) {
#pragma omp simd
  for (std::int64_t i = 0; i < count; ++i) to[i] = float_to_bf16_stochastic(values[i], words[i]);
}

// ---- rules: one element's new master and states; `fresh` may be `old` ----

struct AdamwRule {
  using Step = AdamwStep;
  static constexpr std::size_t kStates = 2;
  static Step step(const Attributes& a, const StepState& state, const UpdateState& update) {
    return adamw_step(a, state, update);
  }
  static void row(const Step& step, const float* gradient, const float* const* old, std::int64_t count,
                  float* const* fresh) {
    adamw_row(step, gradient, old, count, fresh);
  }
};

struct SgdStep {
  float gradient_scale, rate, decay, momentum, of_gradient, of_state;
};

QUERN_CPU_CLONES void sgd_row(const SgdStep& step, const float* gradient, const float* old_master,
                              const float* old_state, std::int64_t count, float* master, float* state) {
  const SgdStep s = step;
#pragma omp simd
  for (std::int64_t i = 0; i < count; ++i) {
    const float g = gradient[i] * s.gradient_scale + s.decay * old_master[i];
    const float m = s.momentum * old_state[i] + g;
    state[i] = m;
    master[i] = old_master[i] - s.rate * (s.of_gradient * g + s.of_state * m);
  }
}

struct SgdRule {
  using Step = SgdStep;
  static constexpr std::size_t kStates = 1;
  static Step step(const Attributes& a, const StepState& state, const UpdateState& update) {
    const auto momentum = static_cast<float>(a.real("momentum"));
    const bool nesterov = a.integer("nesterov") != 0;
    return {update.gradient_scale,
            static_cast<float>(state.learning_rate * a.real_or("rate", 1.0)),
            static_cast<float>(a.real("weight_decay")),
            momentum,
            nesterov ? 1.0f : 0.0f,
            nesterov ? momentum : 1.0f};
  }
  static void row(const Step& step, const float* gradient, const float* const* old, std::int64_t count,
                  float* const* fresh) {
    sgd_row(step, gradient, old[0], old[1], count, fresh[0], fresh[1]);
  }
};

struct LionStep {
  float gradient_scale, rate, keep, beta1, one_minus_beta1, beta2, one_minus_beta2;
};

QUERN_CPU_CLONES void lion_row(const LionStep& step, const float* gradient, const float* old_master,
                               const float* old_state, std::int64_t count, float* master, float* state) {
  const LionStep s = step;
#pragma omp simd
  for (std::int64_t i = 0; i < count; ++i) {
    const float g = gradient[i] * s.gradient_scale, m = old_state[i];
    const float direction = __builtin_fmaf(s.beta1, m, s.one_minus_beta1 * g);  // on every device, for equal signs
    const float sign = (direction > 0 ? 1.0f : 0.0f) - (direction < 0 ? 1.0f : 0.0f);
    master[i] = s.keep * old_master[i] - s.rate * sign;
    state[i] = s.beta2 * m + s.one_minus_beta2 * g;
  }
}

struct LionRule {
  using Step = LionStep;
  static constexpr std::size_t kStates = 1;
  static Step step(const Attributes& a, const StepState& state, const UpdateState& update) {
    const double rate = state.learning_rate * a.real_or("rate", 1.0), beta1 = a.real("beta1"), beta2 = a.real("beta2");
    return {update.gradient_scale,
            static_cast<float>(rate),
            static_cast<float>(1 - rate * a.real("weight_decay")),
            static_cast<float>(beta1),
            static_cast<float>(1 - beta1),
            static_cast<float>(beta2),
            static_cast<float>(1 - beta2)};
  }
  static void row(const Step& step, const float* gradient, const float* const* old, std::int64_t count,
                  float* const* fresh) {
    lion_row(step, gradient, old[0], old[1], count, fresh[0], fresh[1]);
  }
};

struct ScheduleFreeStep {
  float gradient_scale, beta2, one_minus_beta2, inverse_root2, eps, decay, rate;
  float average;  ///< the step's share in it
  float of_average, of_iterate;
  bool first;  ///< there are no average and iterate yet
};

QUERN_CPU_CLONES void schedule_free_row(const ScheduleFreeStep& step, const float* gradient, const float* const* old,
                                        std::int64_t count, float* const* fresh) {
  const ScheduleFreeStep s = step;
  const float *master = old[0], *average = s.first ? old[0] : old[1], *iterate = s.first ? old[0] : old[2];
  const float* moment2 = old[3];
  float *new_master = fresh[0], *new_average = fresh[1], *new_iterate = fresh[2], *new_moment2 = fresh[3];
#pragma omp simd
  for (std::int64_t i = 0; i < count; ++i) {
    const float g = gradient[i] * s.gradient_scale, y = master[i];
    const float v = s.beta2 * moment2[i] + s.one_minus_beta2 * g * g;
    const float z = iterate[i] - s.rate * (g / (std::sqrt(v) * s.inverse_root2 + s.eps) + s.decay * y);
    const float x = average[i] + s.average * (z - average[i]);
    new_master[i] = s.of_average * x + s.of_iterate * z;
    new_average[i] = x;
    new_iterate[i] = z;
    new_moment2[i] = v;
  }
}

struct ScheduleFreeRule {
  using Step = ScheduleFreeStep;
  static constexpr std::size_t kStates = 3;
  static Step step(const Attributes& a, const StepState& state, const UpdateState& update) {
    const double beta1 = a.real("beta1"), beta2 = a.real("beta2"), count = static_cast<double>(state.updates) + 1;
    return {update.gradient_scale,
            static_cast<float>(beta2),
            static_cast<float>(1 - beta2),
            static_cast<float>(1 / std::sqrt(1 - std::pow(beta2, count))),
            static_cast<float>(a.real("eps")),
            static_cast<float>(a.real("weight_decay")),
            static_cast<float>(state.learning_rate * a.real_or("rate", 1.0)),
            state.updates == 0 ? 1.0f : state.average,
            static_cast<float>(beta1),
            static_cast<float>(1 - beta1),
            state.updates == 0};
  }
  static void row(const Step& step, const float* gradient, const float* const* old, std::int64_t count,
                  float* const* fresh) {
    schedule_free_row(step, gradient, old, count, fresh);
  }
};

// ---- lists of tensors ----

/// `in`: gradient, master, states; `out`: all but the gradient.
template <class Rule>
void update_tensor(const typename Rule::Step& step, const StepState& state, const View* in, const View* out,
                   std::uint32_t object, std::uint64_t offset) {
  constexpr std::size_t kTensors = 1 + Rule::kStates;
  for_blocks(in[1].count(), kBlockElements, [&](std::int64_t, std::int64_t begin, std::int64_t end) {
    const std::int64_t count = end - begin;
    const float* old[kTensors];
    float* fresh[kTensors];
    for (std::size_t i = 0; i < kTensors; ++i) {
      float* space = scratch(kFirst + static_cast<int>(i), kBlockElements);
      old[i] = load(in[i + 1], begin, count, space);
      fresh[i] = target(out[i], begin, space);
    }
    Rule::row(step, load(in[0], begin, count, scratch(kGradient, kBlockElements)), old, count, fresh);
    if constexpr (kTensors <= std::size(kRounding))  // others are f32, in place
      for (std::size_t i = 0; i < kTensors; ++i)
        store_stochastic(out[i], begin, count, fresh[i], {seed_of(state), kRounding[i], object}, state.step, offset);
  });
}

// update (4) f32, step (16) u32, of each tensor gradient, master, states (n) -> master, states
template <class Rule>
Launch prepare_update(const OpInstance& op) {
  constexpr std::size_t kOut = 1 + Rule::kStates, kIn = 1 + kOut;
  return
      [kind = op.kind, attributes = op.attributes](std::span<const View> in, std::span<const View> out, const Exec&) {
        const UpdateState update = read<UpdateState>(in[0]);
        const StepState state = read<StepState>(in[1]);
        const std::vector<double>&objects = attributes.list("objects"), &offsets = attributes.list("offsets");
        for (std::size_t i = 0; i < out.size(); ++i)
          need_in_place(kind.c_str(), in[2 + i / kOut * kIn + 1 + i % kOut], out[i]);
        if (update.apply == 0) return;
        const typename Rule::Step step = Rule::step(attributes, state, update);
        for (std::size_t i = 0; i < objects.size(); ++i)
          update_tensor<Rule>(step, state, &in[2 + kIn * i], &out[kOut * i], static_cast<std::uint32_t>(objects[i]),
                              static_cast<std::uint64_t>(offsets[i]));
      };
}

template <class Rule>
OpSupport query_update(const OpInstance& op) {
  const std::size_t tensors = op.attributes.list("objects").size();
  OperandCheck check(op, 2 + (2 + Rule::kStates) * tensors, (1 + Rule::kStates) * tensors);
  operands::check_element_update(check, op, Rule::kStates);
  return check.support();
}

// pairs of f32 (n): their elements change places
Launch prepare_exchange(const OpInstance&) {
  return [](std::span<const View> in, std::span<const View> out, const Exec&) {
    for (std::size_t i = 0; i < out.size(); ++i) need_in_place("exchange", in[i], out[i]);
    for (std::size_t i = 0; i < out.size(); i += 2)
      for_blocks(out[i].count(), kBlockElements, [&](std::int64_t, std::int64_t begin, std::int64_t end) {
        std::swap_ranges(out[i].as<float>() + begin, out[i].as<float>() + end, out[i + 1].as<float>() + begin);
      });
  };
}

OpSupport query_exchange(const OpInstance& op) {
  OperandCheck check(op, op.inputs.size(), op.inputs.size());
  operands::check_exchange(check, op);
  return check.support();
}

}  // namespace

const std::uint32_t* random_words(const RandomKey& key, std::uint32_t step, std::uint64_t first, std::int64_t count,
                                  std::uint32_t* space) {
  const auto skipped = static_cast<std::int64_t>(first % 4);
  random_blocks(key, step, first / 4, block_count(count + skipped, 4), space);
  return space + skipped;
}

void store_stochastic(const View& to, std::int64_t begin, std::int64_t count, const float* values, const RandomKey& key,
                      std::uint32_t step, std::uint64_t first) {
  if (to.dtype != DType::bf16) return;
  auto* space = std::bit_cast<std::uint32_t*>(scratch(kWords, count + 8));
  const std::uint32_t* words = random_words(key, step, first + static_cast<std::uint64_t>(begin), count, space);
  round_stochastic(values, words, count, to.as<std::uint16_t>() + begin);
}

void need_in_place(const char* kind, const View& input, const View& output) {
  if (output.data != input.data) fail_internal(kind, "an output is not its input's memory");
}

AdamwStep adamw_step(const Attributes& a, const StepState& step, const UpdateState& update) {
  double beta1 = a.real("beta1"), beta2 = a.real("beta2"), count = static_cast<double>(step.updates) + 1;
  const double learning_rate = step.learning_rate * a.real_or("rate", 1.0);
  AdamwStep s;
  s.gradient_scale = update.gradient_scale;
  s.beta1 = static_cast<float>(beta1);
  s.one_minus_beta1 = static_cast<float>(1 - beta1);
  s.beta2 = static_cast<float>(beta2);
  s.one_minus_beta2 = static_cast<float>(1 - beta2);
  s.keep = static_cast<float>(1 - learning_rate * a.real("weight_decay"));
  s.rate = static_cast<float>(learning_rate / (1 - std::pow(beta1, count)));        // with the first bias correction
  s.inverse_root2 = static_cast<float>(1 / std::sqrt(1 - std::pow(beta2, count)));  // the second
  s.eps = static_cast<float>(a.real("eps"));
  return s;
}

QUERN_CPU_CLONES void adamw_row(const AdamwStep& step, const float* gradient, const float* const* old,
                                std::int64_t count, float* const* fresh) {
  const AdamwStep s = step;
  const float *master = old[0], *moment1 = old[1], *moment2 = old[2];
  float *new_master = fresh[0], *new_moment1 = fresh[1], *new_moment2 = fresh[2];
#pragma omp simd
  for (std::int64_t i = 0; i < count; ++i) {
    float g = gradient[i] * s.gradient_scale;
    float m = s.beta1 * moment1[i] + s.one_minus_beta1 * g;
    float v = s.beta2 * moment2[i] + s.one_minus_beta2 * g * g;
    new_moment1[i] = m;
    new_moment2[i] = v;
    new_master[i] = s.keep * master[i] - s.rate * m / (std::sqrt(v) * s.inverse_root2 + s.eps);
  }
}

void add_element_update_ops(OpTable& table) {
  table["adamw"] = {prepare_update<AdamwRule>, query_update<AdamwRule>};
  table["sgd"] = {prepare_update<SgdRule>, query_update<SgdRule>};
  table["lion"] = {prepare_update<LionRule>, query_update<LionRule>};
  table["schedule_free"] = {prepare_update<ScheduleFreeRule>, query_update<ScheduleFreeRule>};
  table["exchange"] = {prepare_exchange, query_exchange};
}

}  // namespace quern::cpu
