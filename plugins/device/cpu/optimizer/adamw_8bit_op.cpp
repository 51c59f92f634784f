// AdamW with moments in 8 bits: int8 or e4m3 values with an fp32 scale for each block of a row (Dettmers et al., "8-bit
// Optimizers via Block-wise Quantization", 2021, with a linear grid). The second moment is stored as its root, whose
// range is half as wide in powers of two, and a nonzero one never becomes zero: it divides. Both round
// stochastically, by the halves of one random word. The master's update uses the moments before they are rounded.

#include <algorithm>
#include <bit>
#include <cmath>

#include "optimizer/update.h"
#include "primitives/blocks.h"
#include "primitives/rows.h"
#include "quern/numeric.h"
#include "runtime/operand_check.h"
#include "shared/operands/op_checks.h"

namespace quern::cpu {

namespace {

constexpr std::int64_t kMost = 256;
enum Slot : int { kGradient, kMaster = 2, kMoment, kRandom = 5 };  // scratch; store_stochastic has 1

/// The integer below value + half / 2^16; `value` is one fp32 number times another.
double to_integer_by_half(double value, std::uint32_t half) {
  const double below = std::floor(value);
  return below + (value >= below + (65536.0 - half) * 0x1p-16 ? 1 : 0);
}

/// e4m3 values below and above, above by chance; magnitudes up to 448.
std::uint8_t to_e4m3_by_half(float value, std::uint32_t half) {
  const float magnitude = std::fabs(value);
  float rounded = static_cast<float>(to_integer_by_half(double{magnitude} * 512, half)) * 0x1p-9f;  // below 2^-6
  if (magnitude >= 0x1p-6f)
    rounded = std::bit_cast<float>((std::bit_cast<std::uint32_t>(magnitude) + (half << 4)) & ~0xfffffu);
  return float_to_e4m3(std::copysign(rounded, value));
}

struct Moment {
  const View& values;
  const View& scales;
  bool root;
  bool coded() const { return size_of(values.dtype) == 1; }
};

/// `count` elements of a block from `begin`.
void load_moment(const Moment& moment, std::int64_t begin, std::int64_t count, std::int64_t scale_index, float* to) {
  const float* values = load(moment.values, begin, count, to);
  if (values != to) std::copy_n(values, count, to);
  if (!moment.coded()) return;
  const float scale = moment.scales.as<float>()[scale_index];
  for (std::int64_t i = 0; i < count; ++i) {
    to[i] *= scale;
    if (moment.root) to[i] *= to[i];
  }
}

void store_codes(const Moment& moment, std::int64_t begin, std::int64_t count, std::int64_t scale_index, float* values,
                 const std::uint32_t* random) {
  float amax = 0;
  for (std::int64_t i = 0; i < count; ++i) {
    if (moment.root) values[i] = std::sqrt(values[i]);
    amax = std::max(amax, std::fabs(values[i]));
  }
  const bool integers = moment.values.dtype == DType::i8;
  const float scale = format_scale(amax, moment.values.dtype);
  const float inverse = integers ? 1.0f / scale * (1.0f - 0x1p-22f) : 1.0f / scale;  // no quotient reaches 127
  moment.scales.as<float>()[scale_index] = scale;
  for (std::int64_t i = 0; i < count; ++i) {
    const bool some = moment.root && values[i] > 0;
    const std::uint32_t half = moment.root ? random[i] >> 16 : random[i] & 0xffffu;
    if (integers) {
      const double code = to_integer_by_half(double{values[i]} * inverse, half);
      moment.values.as<std::int8_t>()[begin + i] = static_cast<std::int8_t>(some ? std::max(code, 1.0) : code);
    } else {
      const std::uint8_t code = to_e4m3_by_half(values[i] * inverse, half);
      moment.values.as<std::uint8_t>()[begin + i] = some ? std::max<std::uint8_t>(code, 1) : code;
    }
  }
}

/// gradient, master, moment1, moment2, scales1, scales2.
struct Tensors {
  const View* in;
  std::uint32_t object;
  std::uint64_t offset;
};

void update_block(const AdamwStep& step, const StepState& state, const Tensors& t, std::int64_t begin,
                  std::int64_t count, std::int64_t scale_index) {
  const View *in = t.in, &master = in[1];
  const Moment moments[] = {{in[2], in[4], false}, {in[3], in[5], true}};
  float values[2][kMost];
  for (int i = 0; i < 2; ++i) load_moment(moments[i], begin, count, scale_index, values[i]);
  float* space = scratch(kMaster, kMost);
  const float* old[] = {load(master, begin, count, space), values[0], values[1]};
  float* fresh[] = {target(master, begin, space), values[0], values[1]};
  adamw_row(step, load(in[0], begin, count, scratch(kGradient, kMost)), old, count, fresh);
  auto key = [&](int i) { return RandomKey{seed_of(state), kRounding[i], t.object}; };
  store_stochastic(master, begin, count, fresh[0], key(0), state.step, t.offset);
  for (int i = 0; i < 2; ++i) {
    const View& to = moments[i].values;
    if (!moments[i].coded()) {
      if (to.dtype == DType::f32) std::copy_n(values[i], count, to.as<float>() + begin);
      store_stochastic(to, begin, count, values[i], key(i + 1), state.step, t.offset);
      continue;
    }
    auto* random = std::bit_cast<std::uint32_t*>(scratch(kRandom, kMost + 8));
    const std::uint64_t first = t.offset + static_cast<std::uint64_t>(begin);
    store_codes(moments[i], begin, count, scale_index, values[i],
                random_words(key(1), state.step, first, count, random));  // by halves of the same words
  }
}

// update (4) f32, step (16) u32, of each matrix gradient, master, moment1, moment2, scales1, scales2 -> all but the
// first
Launch prepare_adamw_8bit(const OpInstance& op) {
  return [attributes = op.attributes](std::span<const View> in, std::span<const View> out, const Exec&) {
    const UpdateState update = read<UpdateState>(in[0]);
    const StepState state = read<StepState>(in[1]);
    for (std::size_t i = 0; i < out.size(); ++i) need_in_place("adamw_8bit", in[2 + i / 5 * 6 + 1 + i % 5], out[i]);
    if (update.apply == 0) return;
    const AdamwStep step = adamw_step(attributes, state, update);
    const std::int64_t block = attributes.integer("block");
    const std::vector<double>&objects = attributes.list("objects"), &offsets = attributes.list("offsets");
    for (std::size_t tensor = 0; tensor < objects.size(); ++tensor) {
      const Tensors tensors{&in[2 + 6 * tensor], static_cast<std::uint32_t>(objects[tensor]),
                            static_cast<std::uint64_t>(offsets[tensor])};
      const View& master = tensors.in[1];
      const std::int64_t columns = master.columns(), blocks = block_count(columns, block);
      for_blocks(master.rows(), kBlockRows, [&](std::int64_t, std::int64_t begin, std::int64_t end) {
        for (std::int64_t row = begin; row < end; ++row)
          for (std::int64_t b = 0; b < blocks; ++b)
            update_block(step, state, tensors, row * columns + b * block, std::min(block, columns - b * block),
                         row * blocks + b);
      });
    }
  };
}

OpSupport query_adamw_8bit(const OpInstance& op) {
  const std::size_t tensors = op.attributes.list("objects").size();
  OperandCheck check(op, 2 + 6 * tensors, 5 * tensors);
  operands::check_adamw_8bit(check, op);
  return check.support();
}

}  // namespace

void add_adamw_8bit_op(OpTable& table) { table["adamw_8bit"] = {prepare_adamw_8bit, query_adamw_8bit}; }

}  // namespace quern::cpu
