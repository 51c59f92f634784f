// The optimizer's ops: sums that do not depend on threads, clipping's cases, AdamW against its formula in double
// precision, and stochastic rounding that is unbiased and independent of how a tensor is split.
#include "quern/error.h"
#include "quern/numeric.h"
#include "quern/random.h"
#include "quern/step_state.h"
#include "quern/testkit/stochastic_rounding.h"
#include "quern/testkit/tensor_sums.h"
#include "runtime/cpu_device.h"
#include "tests/op_harness.h"

using namespace quern;
using namespace quern::cpu::harness;

namespace {

template <class Block>
PoisonedTensor tensor_of(DType dtype, const Block& block) {
  PoisonedTensor tensor(dtype, {static_cast<std::int64_t>(sizeof block / size_of(dtype))});
  std::memcpy(tensor.view().data, &block, sizeof block);
  return tensor;
}

StepState step_state(std::uint32_t step) {
  StepState state;
  state.step = step;
  state.updates = step / 2;  // fewer: some were skipped
  state.seed_low = 17;
  state.seed_high = 3;
  state.learning_rate = 0.01f;
  return state;
}

UpdateState update_state(float scale, float apply = 1) {
  UpdateState update;
  update.gradient_scale = scale;
  update.apply = apply;
  return update;
}

Attributes adamw_attributes(double weight_decay, std::int64_t offset = 0) {
  return {{"beta1", 0.9},
          {"beta2", 0.95},
          {"eps", 1e-8},
          {"weight_decay", weight_decay},
          {"objects", std::vector<double>{5}},
          {"offsets", std::vector<double>{static_cast<double>(offset)}}};
}

/// The tensors of one parameter.
struct Parameter {
  Parameter(DType gradient_dtype, DType dtype, std::int64_t count)
      : gradient(normal(gradient_dtype, {count}, 1)),
        master(normal(dtype, {count}, 2)),
        moment1(normal(dtype, {count}, 3, 0, 0.1)),
        moment2(dtype, {count}) {
    std::vector<float> squares = random_normal(count, 4, 0.1);
    for (float& value : squares) value = round_to(dtype, value * value);
    moment2 = PoisonedTensor(dtype, {count}, squares);
  }
  OpRun update(const Attributes& attributes, const UpdateState& scale, const StepState& state) {
    scale_ = tensor_of(DType::f32, scale);
    state_ = tensor_of(DType::u32, state);
    OpRun run("adamw", attributes);
    run.in(scale_.view()).in(state_.view());
    add_to(run);
    return run;
  }
  void add_to(OpRun& run) {
    run.in(gradient.view()).in(master.view()).in(moment1.view()).in(moment2.view());
    run.out(master.view()).out(moment1.view()).out(moment2.view());
  }
  PoisonedTensor gradient, master, moment1, moment2;

 private:
  PoisonedTensor scale_{DType::f32, {4}}, state_{DType::u32, {16}};
};

/// `count` elements of a tensor from `begin`.
PoisonedTensor part_of(const PoisonedTensor& whole, std::int64_t begin, std::int64_t count) {
  PoisonedTensor part(whole.view().dtype, {count});
  std::size_t size = size_of(whole.view().dtype);
  std::memcpy(part.view().data, whole.view().as<char>() + static_cast<std::size_t>(begin) * size,
              static_cast<std::size_t>(count) * size);
  return part;
}

UpdateState clip_arrays(const LossStats& stats, float clip_norm, const std::vector<Doubles>& arrays) {
  StepState state;
  state.clip_norm = clip_norm;
  PoisonedTensor stats_tensor = tensor_of(DType::f64, stats), state_tensor = tensor_of(DType::u32, state),
                 update(DType::f32, {4});
  std::vector<PoisonedTensor> sum_tensors;
  for (const Doubles& sums : arrays) {
    sum_tensors.emplace_back(DType::f64, Extents{static_cast<std::int64_t>(sums.size())});
    std::copy(sums.begin(), sums.end(), sum_tensors.back().view().as<double>());
  }
  OpRun run("clip_scale");
  run.in(stats_tensor.view()).in(state_tensor.view());
  for (const PoisonedTensor& sum : sum_tensors) run.in(View{sum.view()});
  run.out(update.view()).run();
  UpdateState result;
  std::memcpy(&result, update.view().data, sizeof result);
  return result;
}

/// Each sum in an array of its own.
UpdateState clip_scale(const LossStats& stats, float clip_norm, const Doubles& sums) {
  std::vector<Doubles> arrays;
  for (double sum : sums) arrays.push_back({sum});
  return clip_arrays(stats, clip_norm, arrays);
}

}  // namespace

TEST_CASE("sum_squares sums in double, the same for any number of threads") {
  for (DType dtype : {DType::f32, DType::bf16}) {
    for (std::int64_t count : {1, 3, 33, 4095, 4096, 4097, 20011}) {
      CAPTURE(label(dtype, {count}));
      PoisonedTensor x = normal(dtype, {count}, 1, 0, 100), sum(DType::f64, {1});
      OpRun("sum_squares").in(x.view()).out(sum.view()).run();
      double want = dot(doubles(x.view()), doubles(x.view()));
      // Squares of floats are exact in double; only the order of the sum differs.
      CHECK(std::fabs(*sum.view().as<double>() - want) <= 1e-13 * want);
      for (int threads : {1, 3, 5}) {
        Threads set(threads);
        PoisonedTensor again(DType::f64, {1});
        OpRun("sum_squares").in(x.view()).out(again.view()).run();
        CHECK(*again.view().as<double>() == *sum.view().as<double>());
      }
    }
  }
}

TEST_CASE(
    "sum_squares of a tensor has the same bits alone and in any list, aligned or not, for any number of threads") {
  cpu::CpuDevice device({});
  device.open(0);
  for (int threads : {1, 3}) {
    Threads set(threads);
    for (DType dtype : {DType::f32, DType::bf16})
      for (std::size_t alignment : {std::size_t{1}, device.traits().alignment})
        CHECK(testkit::tensor_sums_fault(device, dtype, alignment) == "");
  }
}

TEST_CASE("clip_scale's result depends on the sums, not on the arrays that they come in") {
  LossStats stats{10.0, 4.0, {}};
  Doubles sums;
  for (int i = 0; i < 700; ++i) sums.push_back(1 + 1e-7 * i * i);
  const UpdateState apart = clip_scale(stats, 1.0f, sums);
  for (std::size_t first : {std::size_t{1}, std::size_t{255}, std::size_t{256}, std::size_t{699}}) {
    const auto cut = sums.begin() + static_cast<std::ptrdiff_t>(first);
    const UpdateState joined = clip_arrays(stats, 1.0f, {{sums.begin(), cut}, {cut, sums.end()}});
    CHECK(std::memcmp(&joined, &apart, sizeof apart) == 0);
  }
}

TEST_CASE("clip_scale adds by lanes: what cancels in lane 0 takes nothing from the others") {
  Doubles sums(257, 1.0);
  sums.front() = 0x1p60;
  sums.back() = -0x1p60;  // in their order, one by one, the ones between would be lost
  const double want = std::sqrt(255.0) / 4;
  CHECK(clip_scale({10.0, 4.0, {}}, 0, sums).gradient_norm == static_cast<float>(want / kGradientSeed));
}

TEST_CASE("sum_squares and clip_scale refuse sums of other shapes") {
  PoisonedTensor x(DType::f32, {8}), one(DType::f64, {1}), none(DType::f64, {0}), square(DType::f64, {2, 2});
  CHECK(OpRun("sum_squares").in(x.view()).in(x.view()).out(one.view()).refusal() ==
        "sum_squares operand sums: found (1), expected (2)");
  PoisonedTensor stats(DType::f64, {4}), step(DType::u32, {16}), update(DType::f32, {4});
  auto clip = [&](const PoisonedTensor& sums) {
    return OpRun("clip_scale").in(stats.view()).in(step.view()).in(sums.view()).out(update.view()).refusal();
  };
  CHECK(clip(one) == "");
  CHECK(clip(none) == "clip_scale operand sums: found (0), expected (1)");
  CHECK(clip(square) == "clip_scale operand sums: found (2, 2), expected (4)");
}

TEST_CASE("clip_scale divides by the tokens, clips and skips") {
  LossStats stats{10.0, 4.0, {}};
  UpdateState free = clip_scale(stats, 0, {9.0, 16.0 * 9, 247.0});  // norm sqrt(400) / 4 = 5
  CHECK(free.gradient_norm == 5.0f / kGradientSeed);
  CHECK(free.gradient_scale == 0.25f / kGradientSeed);
  CHECK(free.apply == 1.0f);
  UpdateState clipped = clip_scale(stats, 2.5f, {400.0});
  CHECK(clipped.gradient_norm == 5.0f / kGradientSeed);
  CHECK(clipped.gradient_scale == 0.125f / kGradientSeed);
  CHECK(clip_scale(stats, 6.0f, {400.0}).gradient_scale == 0.25f / kGradientSeed);
  CHECK(clip_scale({0.0, 0.0, {}}, 1.0f, {0.0}).apply == 0.0f);
  CHECK(clip_scale(stats, 1.0f, {1.0, NAN}).apply == 0.0f);
  CHECK(clip_scale(stats, 1.0f, {INFINITY}).apply == 0.0f);
  CHECK(std::isinf(clip_scale(stats, 1.0f, {INFINITY}).gradient_norm));
  CHECK(clip_scale({INFINITY, 4.0, {}}, 1.0f, {1.0}).apply == 0.0f);
  CHECK(clip_scale({NAN, 4.0, {}}, 1.0f, {1.0}).apply == 0.0f);
}

TEST_CASE("adamw is its formula over several steps") {
  for (DType gradient_dtype : {DType::f32, DType::bf16}) {
    for (std::int64_t count : {1, 3, 7, 33, 4099}) {
      for (double weight_decay : {0.0, 0.1}) {
        CAPTURE(label(gradient_dtype, {count}));
        Parameter p(gradient_dtype, DType::f32, count);
        Doubles gradient = doubles(p.gradient.view()), master = doubles(p.master.view());
        Doubles m = doubles(p.moment1.view()), v = doubles(p.moment2.view());
        constexpr double kScale = 0.25;
        for (std::uint32_t step = 0; step < 4; ++step) {
          p.update(adamw_attributes(weight_decay), update_state(kScale), step_state(step)).run();
          double rate = double{step_state(step).learning_rate}, t = step / 2 + 1.0;  // of the updates

          for (std::size_t i = 0; i < master.size(); ++i) {
            double g = gradient[i] * kScale;
            m[i] = 0.9 * m[i] + 0.1 * g;
            v[i] = 0.95 * v[i] + 0.05 * g * g;
            double corrected1 = m[i] / (1 - std::pow(0.9, t)), corrected2 = v[i] / (1 - std::pow(0.95, t));
            master[i] += -rate * weight_decay * master[i] - rate * corrected1 / (std::sqrt(corrected2) + 1e-8);
          }
        }
        // Four updates of a few fp32 roundings each, on values of order one.
        CHECK(compare(p.master.view(), master, 2e-6) == "");
        CHECK(compare(p.moment1.view(), m, 2e-6) == "");
        CHECK(compare(p.moment2.view(), v, 2e-6) == "");
      }
    }
  }
}

TEST_CASE("adamw changes nothing when the step is to be skipped") {
  for (DType dtype : {DType::f32, DType::bf16}) {
    Parameter p(DType::f32, dtype, 33), before(DType::f32, dtype, 33);
    p.update(adamw_attributes(0.1), update_state(NAN, 0), step_state(2)).run();
    CHECK(difference(p.master.view(), before.master.view()) == "");
    CHECK(difference(p.moment1.view(), before.moment1.view()) == "");
    CHECK(difference(p.moment2.view(), before.moment2.view()) == "");
  }
}

TEST_CASE("bf16 destinations are the fp32 update rounded by the documented draws") {
  constexpr std::int64_t kCount = 4099;
  // The last offset lets the block index cross 2^32 within the launch.
  for (std::int64_t offset : {std::int64_t{0}, std::int64_t{4 * 77}, (std::int64_t{1} << 34) - 2048}) {
    CAPTURE(offset);
    Parameter p(DType::bf16, DType::bf16, kCount), exact(DType::bf16, DType::bf16, kCount);
    for (PoisonedTensor* tensor : {&exact.master, &exact.moment1, &exact.moment2}) {
      *tensor = PoisonedTensor(DType::f32, {kCount}, tensor->floats());
    }
    StepState state = step_state(7);
    p.update(adamw_attributes(0.1, offset), update_state(0.5), state).run();
    exact.update(adamw_attributes(0.1, offset), update_state(0.5), state).run();
    auto rounded = [&](const PoisonedTensor& tensor, RandomPurpose purpose) {
      PoisonedTensor result(DType::bf16, {kCount});
      RandomKey key{std::uint64_t{3} << 32 | 17, purpose, 5};
      for (std::int64_t i = 0; i < kCount; ++i) {
        std::uint32_t word = random_word(key, 7, static_cast<std::uint64_t>(offset + i));
        result.view().as<std::uint16_t>()[i] = float_to_bf16_stochastic(tensor.view().as<float>()[i], word);
      }
      return result;
    };
    CHECK(difference(p.master.view(), rounded(exact.master, RandomPurpose::round_master).view()) == "");
    CHECK(difference(p.moment1.view(), rounded(exact.moment1, RandomPurpose::round_moment1).view()) == "");
    CHECK(difference(p.moment2.view(), rounded(exact.moment2, RandomPurpose::round_moment2).view()) == "");
  }
}

TEST_CASE("stochastic rounding of masters is unbiased over elements and over steps") {
  constexpr std::int64_t kCount = 100000;
  // With gradient and moments zero only decay acts: each step takes 3e-4 of every element, a thirteenth of a bf16
  // spacing.
  std::vector<float> ones(kCount, 1.0f), zeros(kCount, 0.0f);
  Parameter p(DType::f32, DType::bf16, kCount);
  p.gradient = PoisonedTensor(DType::f32, {kCount}, zeros);
  p.moment1 = PoisonedTensor(DType::bf16, {kCount}, zeros);
  p.moment2 = PoisonedTensor(DType::bf16, {kCount}, zeros);
  p.master = PoisonedTensor(DType::bf16, {kCount}, ones);
  double want = 1;
  for (std::uint32_t step = 0; step < 8; ++step) {
    p.update(adamw_attributes(0.03), update_state(1), step_state(step)).run();
    want *= 1 - double{step_state(step).learning_rate} * 0.03;
  }
  double mean = dot(doubles(p.master.view()), Doubles(kCount, 1.0)) / kCount;
  // Below one the spacing is 2^-8. Eight independent draws of variance at most 2^-16 * q, q = 3e-4 * 2^8 = 0.077:
  // the standard error is 2^-8 sqrt(8 * 0.077 / 1e5) = 1e-5; five of them. Rounding to nearest would stay at 1.
  CHECK(std::fabs(mean - want) < 5e-5);
  CHECK(want < 1 - 2e-3);
}

TEST_CASE("every rounding of an update has a draw of its own") {
  cpu::CpuDevice device({});
  device.open(0);
  CHECK(testkit::stochastic_rounding_fault(device, device) == "");
}

TEST_CASE("an update split into shards gives the bits of the whole, for any number of threads") {
  constexpr std::int64_t kCount = 9001, kCut = 4 * 1237;
  for (DType dtype : {DType::f32, DType::bf16}) {
    Parameter whole(DType::f32, dtype, kCount), first(DType::f32, dtype, kCount), second(DType::f32, dtype, kCount);
    for (auto tensor : {&Parameter::gradient, &Parameter::master, &Parameter::moment1, &Parameter::moment2}) {
      second.*tensor = part_of(first.*tensor, kCut, kCount - kCut);
      first.*tensor = part_of(first.*tensor, 0, kCut);
    }
    {
      Threads set(3);
      whole.update(adamw_attributes(0.1), update_state(0.5), step_state(1)).run();
    }
    Threads set(1);
    first.update(adamw_attributes(0.1), update_state(0.5), step_state(1)).run();
    second.update(adamw_attributes(0.1, kCut), update_state(0.5), step_state(1)).run();
    for (auto tensor : {&Parameter::master, &Parameter::moment1, &Parameter::moment2}) {
      CHECK(difference((first.*tensor).view(), part_of(whole.*tensor, 0, kCut).view()) == "");
      CHECK(difference((second.*tensor).view(), part_of(whole.*tensor, kCut, kCount - kCut).view()) == "");
    }
  }
}

TEST_CASE("adamw over a list gives every tensor the bits of its own update") {
  for (DType dtype : {DType::f32, DType::bf16}) {
    const std::int64_t counts[] = {4099, 1, 9001, 33};
    const std::vector<double> objects{5, 6, 77, 8}, offsets{0, 4, 308, 0};
    PoisonedTensor update = tensor_of(DType::f32, update_state(0.5)), state = tensor_of(DType::u32, step_state(3));
    Attributes attributes = adamw_attributes(0.1);
    attributes.set("objects", objects);
    attributes.set("offsets", offsets);
    OpRun run("adamw", attributes);
    run.in(update.view()).in(state.view());
    std::vector<Parameter> together, alone;
    for (std::int64_t count : counts)
      for (auto* list : {&together, &alone}) list->emplace_back(DType::f32, dtype, count);
    for (Parameter& p : together) p.add_to(run);
    run.run();
    for (std::size_t i = 0; i < alone.size(); ++i) {
      CAPTURE(i);
      attributes.set("objects", std::vector<double>{objects[i]});
      attributes.set("offsets", std::vector<double>{offsets[i]});
      alone[i].update(attributes, update_state(0.5), step_state(3)).run();
      for (auto tensor : {&Parameter::master, &Parameter::moment1, &Parameter::moment2})
        CHECK(difference((together[i].*tensor).view(), (alone[i].*tensor).view()) == "");
    }
  }
}

TEST_CASE("adamw refuses what it cannot update") {
  Parameter p(DType::f32, DType::f32, 8);
  CHECK(p.update(adamw_attributes(0, 2), update_state(1), step_state(0)).refusal() ==
        "adamw offset: found 2, expected a multiple of 4");
  p.moment1 = PoisonedTensor(DType::e4m3, {8});
  CHECK(p.update(adamw_attributes(0), update_state(1), step_state(0)).refusal() ==
        "adamw operand moment1: found e4m3, expected f32 or bf16");
  p.moment1 = PoisonedTensor(DType::f32, {7});
  CHECK(p.update(adamw_attributes(0), update_state(1), step_state(0)).refusal() ==
        "adamw operand moment1: found (7), expected (8)");
  Parameter q(DType::f32, DType::f32, 8);
  PoisonedTensor elsewhere(DType::f32, {8}), update = tensor_of(DType::f32, update_state(1)),
                                             step = tensor_of(DType::u32, step_state(0));
  OpRun apart("adamw", adamw_attributes(0));
  apart.in(update.view())
      .in(step.view())
      .in(q.gradient.view())
      .in(q.master.view())
      .in(q.moment1.view())
      .in(q.moment2.view());
  apart.out(elsewhere.view()).out(q.moment1.view()).out(q.moment2.view());
  CHECK_THROWS_AS(apart.run(), Error);
}
