#include "run/hooks/step_log.h"

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "base/clock.h"

namespace quern {

void StepLog::begin(const RunState& state) {
  started_ = now();
  started_at_ = state.step;
}

double StepLog::elapsed() const { return now() - started_; }

void StepLog::rolled_back(const RunState& state) { started_at_ = std::min(started_at_, state.step); }

double StepLog::tokens_per_second(const RunState& state) const {
  if (in_steps_ == 0) return 0;
  return static_cast<double>((state.step - started_at_) * state.session.tokens_per_step()) / in_steps_;
}

void StepLog::before_step(const RunState& state, Step&) { waited_ = state.ranks.waited(); }

/// Each rank's seconds, and those in which its compute stream waited for collectives. The slowest rank is the one that
/// the others wait for: it waits least, and only for communication.
void StepLog::add_ranks(const RunState& state, const Step& step, LogEvent& event) const {
  if (state.ranks.size() == 1) return;
  const double own[] = {step.end - step.begin, state.ranks.waited() - waited_};
  const std::vector<std::string> all = state.ranks.exchange({reinterpret_cast<const char*>(own), sizeof own});
  double least = std::numeric_limits<double>::infinity();
  std::int64_t slowest = 0;
  std::vector<std::pair<double, double>> times;
  for (const std::string& one : all) {
    double seconds = 0, waited = 0;
    std::memcpy(&seconds, one.data(), sizeof seconds);
    std::memcpy(&waited, one.data() + sizeof seconds, sizeof waited);
    if (waited < least) least = waited, slowest = static_cast<std::int64_t>(times.size());
    times.emplace_back(seconds, waited);
  }
  event.fields.emplace_back("waited", least);
  event.fields.emplace_back("slowest_rank", slowest);
  for (std::size_t rank = 0; rank < times.size(); ++rank) {
    event.fields.emplace_back("seconds_" + std::to_string(rank), times[rank].first);
    event.fields.emplace_back("waited_" + std::to_string(rank), times[rank].second);
  }
}

Verdict StepLog::after_step(const RunState& state, const Step& step) {
  const std::int64_t steps = state.session.train.steps, tokens = state.session.tokens_per_step();
  last_seconds_ = step.end - step.begin;
  in_steps_ += last_seconds_;
  last_learning_rate_ = step.learning_rate;
  if (step.counts())
    last_loss_ = step.loss(), last_gradient_norm_ = step.result.update.gradient_norm;
  else
    state.log.warn("step " + std::to_string(step.number) + " had no target that counts; weights stay");
  // Evaluations and checkpoints too.
  const double per_step = (step.end - started_) / static_cast<double>(step.number - started_at_);
  LogEvent event{"step", {{"step", step.number}, {"steps", steps}, {"tokens", state.tokens}}};
  if (step.counts()) event.fields.emplace_back("loss", last_loss_);
  event.fields.emplace_back("lr", last_learning_rate_);
  if (step.counts()) event.fields.emplace_back("grad_norm", last_gradient_norm_);
  event.fields.emplace_back("tokens_per_second", static_cast<double>(tokens) / last_seconds_);
  event.fields.emplace_back("time", step.end - started_);
  event.fields.emplace_back("eta", per_step * static_cast<double>(steps - step.number));
  add_ranks(state, step, event);
  state.log.write(event);
  return Verdict::go_on;
}

}  // namespace quern
