#include "run/hooks/guard.h"

#include <algorithm>

namespace quern {

namespace {

constexpr std::string_view kNames[] = {"go_on", "skip", "roll_back", "stop"};

Verdict policy_named(const std::string& name) {
  auto it = std::find(std::begin(kNames), std::end(kNames), name);
  if (it == std::end(kNames)) fail_internal("guard", "no policy " + name);
  return static_cast<Verdict>(it - std::begin(kNames));
}

// The plan lays the precision backend's states side by side: one copy takes all. Empty where there are none.
PlannedTensor precision_states(const Plan& plan) {
  auto is_state = [](const PlannedTensor& tensor) { return tensor.owner == TensorOwner::precision; };
  std::int64_t begin = plan.device_bytes, end = 0;
  for (const PlannedTensor& tensor : plan.tensors)
    if (is_state(tensor)) begin = std::min(begin, tensor.offset), end = std::max(end, tensor.offset + tensor.bytes());
  for (const PlannedTensor& tensor : plan.tensors)
    if (!is_state(tensor) && tensor.place().space == Space::device && tensor.offset < end &&
        tensor.offset + tensor.bytes() > begin)
      fail_internal("guard", tensor.kind + " is among the precision states");
  return {{"precision states"}, TensorOwner::precision, DType::u8, {std::max<std::int64_t>(end - begin, 0)}, begin};
}

}  // namespace

std::string_view name_of(Verdict verdict) { return kNames[static_cast<std::size_t>(verdict)]; }

Guard::Guard(const GuardOptions& options) : options_(options), policy_(policy_named(options.non_finite)) {}

Verdict Guard::failed(std::int64_t step) {
  furthest_ = std::max(furthest_, step);
  if (policy_ == Verdict::stop || ++failures_ > options_.limit) return Verdict::stop;
  return policy_;
}

void Guard::passed(std::int64_t step) {
  if (step >= furthest_ + options_.window) failures_ = 0;
}

Error Guard::error(const Step& step) const {
  const bool limited = policy_ != Verdict::stop;
  return {ErrorCode::numerics,
          {.where = "step " + std::to_string(step.number),
           .what = "loss or gradient is not finite; the update was not applied",
           .found = "loss sum " + std::to_string(step.result.loss.loss_sum) + ", gradient norm " +
                    std::to_string(step.result.update.gradient_norm) +
                    (limited ? ", after guard.limit = " + std::to_string(options_.limit) + " such steps" : ""),
           .expected = "finite numbers",
           .next = "lower optimizer.learning_rate, or resume from an earlier checkpoint"}};
}

void Guard::before_step(const RunState& state, Step&) {
  const PlannedTensor states = precision_states(state.engine.plan());
  kept_.resize(static_cast<std::size_t>(states.bytes()));
  if (!kept_.empty()) state.engine.read(states, kept_.data());
}

void Guard::abandon_step(Engine& engine) const {
  if (!kept_.empty()) engine.write(precision_states(engine.plan()), kept_.data());
}

Verdict Guard::after_step(const RunState& state, const Step& step) {
  if (step.finite()) {
    if (step.counts()) passed(step.number);
    return Verdict::go_on;
  }
  const Verdict verdict = failed(step.number);
  state.log.write({"non_finite",
                   {{"step", step.number},
                    {"loss", step.loss()},
                    {"grad_norm", double{step.result.update.gradient_norm}},
                    {"action", std::string(name_of(verdict))},
                    {"data", step.data()}}});
  return verdict;
}

}  // namespace quern
