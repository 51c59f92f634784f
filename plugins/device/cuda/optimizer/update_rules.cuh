#pragma once
// What an optimizer does to one element: each rule reads its constants from an op's attributes, makes what depends on
// the step once a block, and updates the master and its states.

#include <cstdint>

#include "quern/attributes.h"
#include "quern/random.h"
#include "quern/step_state.h"

namespace quern::cuda {

__device__ inline double power(double base, std::uint64_t exponent) {
  double result = 1.0;
  for (; exponent > 0; exponent >>= 1, base *= base)
    if (exponent & 1) result *= base;
  return result;
}

/// What draws are keyed by, and whether the step is applied.
struct DrawStep {
  std::uint32_t apply, step, seed_low, seed_high;
};

__device__ __forceinline__ DrawStep draw_step(const UpdateState& update, const StepState& state) {
  return {update.apply != 0, state.step, state.seed_low, state.seed_high};
}

/// The purpose that rounds the master, and then each state.
__host__ __device__ constexpr RandomPurpose rounding(int i) {
  return static_cast<RandomPurpose>(static_cast<int>(RandomPurpose::round_master) + i);
}
static_assert(rounding(1) == RandomPurpose::round_moment1 && rounding(2) == RandomPurpose::round_moment2);

/// Roots and quotients without branches, so that elements are computed beside each other, in half of the instructions.
/// One in some millions is not rounded to the nearest: Markstein, "Computation of Elementary Functions on the IBM RISC
/// System/6000 Processor" (1990). Below 2^-126 a root is too small, but never 0 of a number that is not; of infinities
/// results are NaN.
struct Swift {
  static __device__ __forceinline__ float root(float x) {
    float inverse;
    asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(fmaxf(x, 0x1p-126f)));
    const float near = x * inverse;
    return fmaf(fmaf(-near, near, x), 0.5f * inverse, near);
  }
  static __device__ __forceinline__ float reciprocal(float x) {
    float near;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(near) : "f"(x));
    return fmaf(fmaf(-x, near, 1.0f), near, near);
  }
  static __device__ __forceinline__ float quotient(float a, float b) {
    const float inverse = reciprocal(b), near = a * inverse;
    return fmaf(fmaf(-b, near, a), inverse, near);
  }
};

/// Loshchilov & Hutter, "Decoupled Weight Decay Regularization" (2019).
struct AdamwRule {
  static constexpr int kStates = 2;
  struct Constants {
    double beta1, beta2, weight_decay, rate;
    float eps;
  };
  struct Step {
    float gradient_scale, beta1, one_minus_beta1, beta2, one_minus_beta2, keep, rate, inverse_root2, eps;
  };
  static Constants constants(const Attributes& a) {
    return {a.real("beta1"), a.real("beta2"), a.real("weight_decay"), a.real_or("rate", 1.0),
            static_cast<float>(a.real("eps"))};
  }
  static __device__ Step step(const Constants& c, const UpdateState& update, const StepState& state) {
    const std::uint64_t count = std::uint64_t{state.updates} + 1;
    const double learning_rate = state.learning_rate * c.rate;
    Step s;
    s.gradient_scale = update.gradient_scale;
    s.beta1 = static_cast<float>(c.beta1);
    s.one_minus_beta1 = static_cast<float>(1 - c.beta1);
    s.beta2 = static_cast<float>(c.beta2);
    s.one_minus_beta2 = static_cast<float>(1 - c.beta2);
    s.keep = static_cast<float>(1 - learning_rate * c.weight_decay);
    s.rate = static_cast<float>(learning_rate / (1 - power(c.beta1, count)));   // with the first bias correction
    s.inverse_root2 = static_cast<float>(1 / sqrt(1 - power(c.beta2, count)));  // the second
    s.eps = c.eps;
    return s;
  }
  static __device__ __forceinline__ void update(const Step& s, float gradient, float (&x)[3]) {
    const float g = gradient * s.gradient_scale;
    const float m = s.beta1 * x[1] + s.one_minus_beta1 * g;
    const float v = s.beta2 * x[2] + s.one_minus_beta2 * g * g;
    x[0] = s.keep * x[0] - s.rate * m / (sqrtf(v) * s.inverse_root2 + s.eps);
    x[1] = m;
    x[2] = v;
  }
  /// The same within roundings, with multiplications and additions fused; gives the root of the second moment.
  static __device__ __forceinline__ float swift_update(const Step& s, float gradient, float (&x)[3]) {
    const float g = gradient * s.gradient_scale;
    x[1] = fmaf(s.beta1, x[1], s.one_minus_beta1 * g);
    x[2] = fmaf(s.beta2, x[2], s.one_minus_beta2 * g * g);
    const float root = Swift::root(x[2]);
    x[0] = fmaf(s.keep, x[0], -Swift::quotient(s.rate * x[1], fmaf(root, s.inverse_root2, s.eps)));
    return root;
  }
};

/// With momentum, as torch.optim.SGD.
struct SgdRule {
  static constexpr int kStates = 1;
  struct Constants {
    double rate;
    float decay, momentum, of_gradient, of_state;
  };
  struct Step {
    float gradient_scale, rate, decay, momentum, of_gradient, of_state;
  };
  static Constants constants(const Attributes& a) {
    const auto momentum = static_cast<float>(a.real("momentum"));
    const bool nesterov = a.integer("nesterov") != 0;
    return {a.real_or("rate", 1.0), static_cast<float>(a.real("weight_decay")), momentum, nesterov ? 1.0f : 0.0f,
            nesterov ? momentum : 1.0f};
  }
  static __device__ Step step(const Constants& c, const UpdateState& update, const StepState& state) {
    return {update.gradient_scale,
            static_cast<float>(state.learning_rate * c.rate),
            c.decay,
            c.momentum,
            c.of_gradient,
            c.of_state};
  }
  static __device__ __forceinline__ void update(const Step& s, float gradient, float (&x)[2]) {
    const float g = gradient * s.gradient_scale + s.decay * x[0];
    x[1] = s.momentum * x[1] + g;
    x[0] = x[0] - s.rate * (s.of_gradient * g + s.of_state * x[1]);
  }
};

/// Chen et al., "Symbolic Discovery of Optimization Algorithms" (2023).
struct LionRule {
  static constexpr int kStates = 1;
  struct Constants {
    double beta1, beta2, weight_decay, rate;
  };
  struct Step {
    float gradient_scale, rate, keep, beta1, one_minus_beta1, beta2, one_minus_beta2;
  };
  static Constants constants(const Attributes& a) {
    return {a.real("beta1"), a.real("beta2"), a.real("weight_decay"), a.real_or("rate", 1.0)};
  }
  static __device__ Step step(const Constants& c, const UpdateState& update, const StepState& state) {
    const double rate = state.learning_rate * c.rate;
    return {
        update.gradient_scale,          static_cast<float>(rate),        static_cast<float>(1 - rate * c.weight_decay),
        static_cast<float>(c.beta1),    static_cast<float>(1 - c.beta1), static_cast<float>(c.beta2),
        static_cast<float>(1 - c.beta2)};
  }
  static __device__ __forceinline__ void update(const Step& s, float gradient, float (&x)[2]) {
    const float g = gradient * s.gradient_scale, m = x[1];
    const float direction = fmaf(s.beta1, m, __fmul_rn(s.one_minus_beta1, g));  // on every device, for equal signs
    const float sign = (direction > 0 ? 1.0f : 0.0f) - (direction < 0 ? 1.0f : 0.0f);
    x[0] = s.keep * x[0] - s.rate * sign;
    x[1] = s.beta2 * m + s.one_minus_beta2 * g;
  }
};

/// Defazio et al., "The Road Less Scheduled" (2024): master, average, iterate, second moment.
struct ScheduleFreeRule {
  static constexpr int kStates = 3;
  struct Constants {
    double beta1, beta2, rate;
    float eps, decay;
  };
  struct Step {
    float gradient_scale, beta2, one_minus_beta2, inverse_root2, eps, decay, rate, average, of_average, of_iterate;
    bool first;
  };
  static Constants constants(const Attributes& a) {
    return {a.real("beta1"), a.real("beta2"), a.real_or("rate", 1.0), static_cast<float>(a.real("eps")),
            static_cast<float>(a.real("weight_decay"))};
  }
  static __device__ Step step(const Constants& c, const UpdateState& update, const StepState& state) {
    Step s;
    s.gradient_scale = update.gradient_scale;
    s.beta2 = static_cast<float>(c.beta2);
    s.one_minus_beta2 = static_cast<float>(1 - c.beta2);
    s.inverse_root2 = static_cast<float>(1 / sqrt(1 - power(c.beta2, std::uint64_t{state.updates} + 1)));
    s.eps = c.eps;
    s.decay = c.decay;
    s.rate = static_cast<float>(state.learning_rate * c.rate);
    s.average = state.updates == 0 ? 1.0f : state.average;
    s.of_average = static_cast<float>(c.beta1);
    s.of_iterate = static_cast<float>(1 - c.beta1);
    s.first = state.updates == 0;
    return s;
  }
  static __device__ __forceinline__ void update(const Step& s, float gradient, float (&x)[4]) {
    const float g = gradient * s.gradient_scale, y = x[0], average = s.first ? y : x[1], iterate = s.first ? y : x[2];
    const float v = s.beta2 * x[3] + s.one_minus_beta2 * g * g;
    x[2] = iterate - s.rate * (g / (sqrtf(v) * s.inverse_root2 + s.eps) + s.decay * y);
    x[1] = average + s.average * (x[2] - average);
    x[0] = s.of_average * x[1] + s.of_iterate * x[2];
    x[3] = v;
  }
};

}  // namespace quern::cuda
