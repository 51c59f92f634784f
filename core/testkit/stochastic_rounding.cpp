#include "quern/testkit/stochastic_rounding.h"

#include <array>
#include <cmath>
#include <vector>

#include "quern/numeric.h"
#include "quern/step_state.h"
#include "quern/testkit/independence.h"
#include "quern/testkit/op_comparison.h"
#include "quern/testkit/op_launch.h"

namespace quern::testkit {

namespace {

constexpr std::int64_t kCount = 1 << 17;
constexpr const char* kNames[] = {"master", "moment1", "moment2"};
/// Results are between neighbours of bf16, at least a tenth of the way from both.
constexpr float kGradient = 0.5f, kMaster = 1.0f, kMoment = 1.0f;

OpInstance update_of(DType dtype, std::int64_t count, double object) {
  const Operand state{dtype, {count}, true, false};
  return {"adamw",
          {{DType::f32, {4}, true, false}, {DType::u32, {16}, true, false}, state, state, state, state},
          {state, state, state},
          {{"beta1", 0.9},
           {"beta2", 0.95},
           {"eps", 1e-8},
           {"weight_decay", 0.03},
           {"objects", std::vector<double>{object}},
           {"offsets", std::vector<double>{0}}},
          {}};
}

std::vector<PoisonedTensor> updated(Device& device, DType dtype, std::int64_t count, std::uint32_t step,
                                    double object) {
  UpdateState update;
  update.gradient_scale = 1;
  update.apply = 1;
  StepState state;
  state.step = step;
  state.seed_low = 17, state.seed_high = 3;
  state.learning_rate = 0.01f;
  const PoisonedTensor scale = words(DType::f32, update), now = words(DType::u32, state);
  auto filled = [&](float value) {
    return PoisonedTensor(dtype, {count}, std::vector<float>(static_cast<std::size_t>(count), value));
  };
  const PoisonedTensor gradient = filled(kGradient), master = filled(kMaster), moments = filled(kMoment);
  return launch_once(device, update_of(dtype, count, object),
                     {scale.view(), now.view(), gradient.view(), master.view(), moments.view(), moments.view()},
                     {{0, 3}, {1, 4}, {2, 5}});
}

/// Which elements were rounded up, as numbers of mean 0 and variance 1.
using Roundings = std::array<std::vector<double>, 3>;  ///< of master, moment1, moment2

/// A text when a result is not one of the two neighbours of the value before rounding.
std::string roundings(Device& oracle, Device& device, std::uint32_t step, double object, Roundings& found) {
  const std::vector<PoisonedTensor> exact = updated(oracle, DType::f32, 1, step, object),
                                    rounded = updated(device, DType::bf16, kCount, step, object);
  for (std::size_t i = 0; i < found.size(); ++i) {
    const float value = exact[i].floats()[0];
    const float low = bf16_to_float(float_to_bf16_stochastic(value, 0)),
                high = bf16_to_float(float_to_bf16_stochastic(value, 0xffff));
    const double up = (double{value} - low) / (double{high} - low), deviation = std::sqrt(up * (1 - up));
    if (!(up > 0.1 && up < 0.9)) return std::string(kNames[i]) + " is " + std::to_string(value) + " in fp32";
    found[i].clear();
    for (float result : rounded[i].floats()) {
      if (result != low && result != high)
        return std::string(kNames[i]) + " " + std::to_string(value) + " became " + std::to_string(result);
      found[i].push_back(((result == high ? 1 : 0) - up) / deviation);
    }
  }
  return {};
}

}  // namespace

OpInstance rounded_update() { return update_of(DType::bf16, kCount, 5); }

std::string stochastic_rounding_fault(Device& oracle, Device& device) {
  struct {
    const char* name;
    std::uint32_t step;
    double object;
    Roundings roundings = {};
  } runs[] = {{"a step", 7, 5}, {"the next step", 8, 5}, {"another object", 7, 6}};
  for (auto& run : runs)
    if (std::string fault = roundings(oracle, device, run.step, run.object, run.roundings); !fault.empty())
      return fault;
  std::string fault;
  // Every sequence alone, and with every other of its run and the same tensor's in other runs.
  for (std::size_t run = 0; run < std::size(runs) && fault.empty(); ++run) {
    for (std::size_t i = 0; i < 3 && fault.empty(); ++i) {
      const std::string what = std::string(kNames[i]) + " in " + runs[run].name;
      const std::vector<double>& numbers = runs[run].roundings[i];
      auto check = [&](const std::string& found, const std::string& with) {
        if (fault.empty() && !found.empty()) fault = what + with + ": " + found;
      };
      check(dependence(numbers), "");
      for (std::size_t j = i + 1; j < 3; ++j)
        check(dependence(numbers, runs[run].roundings[j]), std::string(" with ") + kNames[j]);
      for (std::size_t other = run + 1; other < std::size(runs); ++other)
        check(dependence(numbers, runs[other].roundings[i]), std::string(" with ") + runs[other].name);
    }
  }
  return fault;
}

}  // namespace quern::testkit
