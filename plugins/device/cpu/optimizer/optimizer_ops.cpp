// The optimizer step: the global gradient norm, the clip factor and AdamW (Loshchilov & Hutter, "Decoupled Weight Decay
// Regularization", 2019). The parameter update uses the moments before they are rounded for storage. bf16 masters and
// moments round stochastically; a draw depends on the element's global index, so shards agree with the whole.

#include <bit>
#include <cmath>
#include <cstring>
#include <string>

#include "primitives/blocks.h"
#include "primitives/rows.h"
#include "primitives/simd.h"
#include "quern/error.h"
#include "quern/numeric.h"
#include "quern/random.h"
#include "quern/step_state.h"
#include "runtime/kernels.h"
#include "runtime/operand_check.h"
#include "shared/operands/op_checks.h"

namespace quern::cpu {

namespace {

enum Slot : int { kGradient, kMaster, kMoment1, kMoment2, kWords };

template <class Block>
Block read(const View& view) {
  Block block;
  std::memcpy(&block, view.data, sizeof block);
  return block;
}

QUERN_CPU_CLONES double sum_of_squares(const float* x, std::int64_t count) {
  double sum = 0;
#pragma omp simd reduction(+ : sum)
  for (std::int64_t i = 0; i < count; ++i) sum += double{x[i]} * double{x[i]};
  return sum;
}

double sum_of_squares(const View& x, double* partials) {
  for_blocks(x.count(), kBlockElements, [&](std::int64_t block, std::int64_t begin, std::int64_t end) {
    partials[block] = sum_of_squares(load(x, begin, end - begin, scratch(kGradient, kBlockElements)), end - begin);
  });
  double sum = 0;
  for (std::int64_t block = 0; block < block_count(x.count(), kBlockElements); ++block) sum += partials[block];
  return sum;
}

// x (any), n tensors -> sums (n) f64
Launch prepare_sum_squares(const OpInstance&) {
  return [](std::span<const View> in, std::span<const View> out, const Exec& exec) {
    for (std::size_t i = 0; i < in.size(); ++i)
      out[0].as<double>()[i] = sum_of_squares(in[i], static_cast<double*>(exec.workspace));
  };
}

/// Adds all elements of all arrays in the order that docs/ops.md fixes for clip_scale.
double total_of(std::span<const View> arrays) {
  constexpr std::size_t kLanes = 256;
  double lanes[kLanes] = {};
  std::size_t at = 0;
  for (const View& array : arrays)
    for (std::int64_t i = 0; i < array.count(); ++i) lanes[at++ % kLanes] += array.as<double>()[i];
  for (std::size_t half = kLanes / 2; half > 0; half /= 2)
    for (std::size_t lane = 0; lane < half; ++lane) lanes[lane] += lanes[lane + half];
  return lanes[0];
}

UpdateState update_from(const LossStats& stats, float clip_norm, double squares) {
  UpdateState update;
  if (!(stats.valid_tokens > 0)) return update;
  double mean = 1.0 / (stats.valid_tokens * double{kGradientSeed});
  double norm = std::sqrt(squares) * mean;
  update.gradient_norm = static_cast<float>(norm);
  if (!std::isfinite(update.gradient_norm) || !std::isfinite(stats.loss_sum)) return update;
  double clip = clip_norm > 0 && norm > clip_norm ? clip_norm / norm : 1.0;
  update.gradient_scale = static_cast<float>(clip * mean);
  update.apply = 1.0f;
  return update;
}

// stats (4) f64, step (16) u32, sums (any count) f64 each -> update (4) f32
Launch prepare_clip_scale(const OpInstance&) {
  return [](std::span<const View> in, std::span<const View> out, const Exec&) {
    const double squares = total_of(in.subspan(2));
    UpdateState update = update_from(read<LossStats>(in[0]), read<StepState>(in[1]).clip_norm, squares);
    std::memcpy(out[0].data, &update, sizeof update);
  };
}

/// What one update needs beside the tensors.
struct AdamwStep {
  float gradient_scale, beta1, one_minus_beta1, beta2, one_minus_beta2, keep, rate, inverse_root2, eps;
};

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

QUERN_CPU_CLONES void adamw_row(const AdamwStep& step, const float* gradient, const float* master, const float* moment1,
                                const float* moment2, std::int64_t count, float* new_master, float* new_moment1,
                                float* new_moment2) {
  const AdamwStep s = step;
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

/// The words of `random_block` for blocks of four elements from block `first`: its rounds again, in a form that is
/// inlined whole and so vectorises. The 64-bit block index may cross a multiple of 2^32.
QUERN_CPU_CLONES void random_words(const RandomKey& key, std::uint32_t step, std::uint64_t first, std::int64_t blocks,
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

QUERN_CPU_CLONES void store_stochastic(const float* values, const std::uint32_t* words, std::int64_t count,
                                       std::uint16_t* to) {
#pragma omp simd
  for (std::int64_t i = 0; i < count; ++i) to[i] = float_to_bf16_stochastic(values[i], words[i]);
}

/// One tensor that AdamW updates, with the stream that rounds it.
struct Destination {
  RandomPurpose purpose;
  Slot slot;
};
constexpr Destination kDestinations[] = {{RandomPurpose::round_master, kMaster},
                                         {RandomPurpose::round_moment1, kMoment1},
                                         {RandomPurpose::round_moment2, kMoment2}};

/// Inputs and outputs of one tensor, and what its draws are keyed by.
struct AdamwTensor {
  const View* in;   ///< gradient, master, moment1, moment2
  const View* out;  ///< the last three
  std::uint32_t object;
  std::uint64_t offset;
};

void update_tensor(const AdamwStep& step, const StepState& state, const AdamwTensor& tensor) {
  const View *in = tensor.in, *out = tensor.out;
  const std::uint64_t seed = std::uint64_t{state.seed_high} << 32 | state.seed_low;
  for_blocks(in[1].count(), kBlockElements, [&](std::int64_t, std::int64_t begin, std::int64_t end) {
    std::int64_t count = end - begin;
    const float* old[3];
    float* fresh[3];
    for (std::size_t i = 0; i < 3; ++i) {
      float* space = scratch(kDestinations[i].slot, kBlockElements);
      old[i] = load(in[i + 1], begin, count, space);
      fresh[i] = target(out[i], begin, space);
    }
    const float* gradient = load(in[0], begin, count, scratch(kGradient, kBlockElements));
    adamw_row(step, gradient, old[0], old[1], old[2], count, fresh[0], fresh[1], fresh[2]);
    for (std::size_t i = 0; i < 3; ++i) {
      if (out[i].dtype != DType::bf16) continue;
      auto* words = std::bit_cast<std::uint32_t*>(scratch(kWords, kBlockElements));
      std::uint64_t first = (tensor.offset + static_cast<std::uint64_t>(begin)) / 4;
      random_words({seed, kDestinations[i].purpose, tensor.object}, state.step, first, block_count(count, 4), words);
      store_stochastic(fresh[i], words, count, out[i].as<std::uint16_t>() + begin);
    }
  });
}

// update (4) f32, step (16) u32, of each tensor gradient, master, moment1, moment2 (n) -> master, moment1, moment2
Launch prepare_adamw(const OpInstance& op) {
  return [attributes = op.attributes](std::span<const View> in, std::span<const View> out, const Exec&) {
    const UpdateState update = read<UpdateState>(in[0]);
    const StepState state = read<StepState>(in[1]);
    const std::vector<double>&objects = attributes.list("objects"), &offsets = attributes.list("offsets");
    for (std::size_t i = 0; i < out.size(); ++i)
      if (out[i].data != in[2 + i / 3 * 4 + 1 + i % 3].data)
        fail_internal("adamw", "output " + std::to_string(i) + " is not its input's memory");
    if (update.apply == 0) return;
    const AdamwStep step = adamw_step(attributes, state, update);
    for (std::size_t i = 0; i < objects.size(); ++i)
      update_tensor(step, state,
                    {&in[2 + 4 * i], &out[3 * i], static_cast<std::uint32_t>(objects[i]),
                     static_cast<std::uint64_t>(offsets[i])});
  };
}

OpSupport query_sum_squares(const OpInstance& op) {
  OperandCheck check(op, std::max<std::size_t>(op.inputs.size(), 1), 1);
  check.output(0, "sums", {static_cast<std::int64_t>(op.inputs.size())}, DType::f64);
  std::int64_t blocks = 0;
  for (std::size_t i = 0; i < op.inputs.size(); ++i) {
    check.input(i, "x", op.inputs[i].extents);
    blocks = std::max(blocks, block_count(op.inputs[i].count(), kBlockElements));
  }
  return check.support(static_cast<std::size_t>(blocks) * sizeof(double));
}

OpSupport query_clip_scale(const OpInstance& op) { return operands::check_clip_scale(op).support(); }

OpSupport query_adamw(const OpInstance& op) {
  const std::size_t tensors = op.attributes.list("objects").size();
  OperandCheck check(op, 2 + 4 * tensors, 3 * tensors);
  operands::check_adamw(check, op);
  return check.support();
}

}  // namespace

void add_optimizer_ops(OpTable& table) {
  table["sum_squares"] = {prepare_sum_squares, query_sum_squares};
  table["clip_scale"] = {prepare_clip_scale, query_clip_scale};
  table["adamw"] = {prepare_adamw, query_adamw};
}

}  // namespace quern::cpu
