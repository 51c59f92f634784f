#include "run/hooks/evaluation.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "base/clock.h"
#include "quern/skipping_source.h"

namespace quern {

namespace {

struct BatchLoss {
  double loss_sum, targets, correct;
};

/// The sums of all batches in turn, of which `own` has this rank's.
std::vector<BatchLoss> of_all_ranks(Ranks& ranks, const std::vector<BatchLoss>& own) {
  constexpr std::size_t kSize = sizeof(BatchLoss);
  const std::vector<std::string> all = ranks.exchange({reinterpret_cast<const char*>(own.data()), own.size() * kSize});
  std::vector<BatchLoss> sums;
  for (std::size_t turn = 0; turn < own.size(); ++turn)
    for (const std::string& one : all) std::memcpy(&sums.emplace_back(), one.data() + turn * kSize, kSize);
  return sums;
}

/// Whether the model's loss counts right predictions.
bool counts_correct(const Plan& plan) {
  const std::vector<Op>& ops = plan.head_evaluate.program.ops;
  return std::any_of(ops.begin(), ops.end(),
                     [](const Op& op) { return op.kind == "loss_stats" && op.inputs.size() > 2; });
}

}  // namespace

std::optional<DataLoss> sum_losses(Engine& engine, Ranks* ranks, DataSource& source, std::int64_t tokens,
                                   const std::function<bool()>& interrupted) {
  engine.apply_update();
  const std::int64_t size = ranks ? ranks->size() : 1, rank = ranks ? ranks->rank() : 0;
  const std::int64_t batch_tokens = engine.plan().options.geometry.tokens();
  const std::string begin = source.save_state();
  const double start = now();
  std::vector<BatchLoss> sums;
  bool cut = false;
  Batch batch;
  // All ranks evaluate a batch each turn, since a forward pass may gather weights; targets behind the last batch do not
  // count.
  for (std::int64_t first = 0; first * batch_tokens < tokens; first += size) {
    if ((cut = interrupted())) break;
    skip(source, first == 0 ? rank : size - 1);
    source.next(batch);
    // The last batch may reach into the next pass: what comes twice does not count twice.
    const std::int64_t left = std::max<std::int64_t>(tokens - (first + rank) * batch_tokens, 0);
    if (left < batch_tokens) batch.discount(left, engine.plan().options.geometry);
    const LossStats stats = engine.evaluate(batch);
    sums.push_back({stats.loss_sum, stats.valid_tokens, stats.correct});
  }
  source.load_state(begin);
  if (cut) return {};
  if (size > 1) sums = of_all_ranks(*ranks, sums);
  DataLoss total;
  total.tokens = tokens;
  for (const BatchLoss& sum : sums)
    total.loss_sum += sum.loss_sum, total.targets += sum.targets, total.correct += sum.correct;
  if (!counts_correct(engine.plan())) total.correct = std::numeric_limits<double>::quiet_NaN();
  total.seconds = now() - start;
  return total;
}

bool Evaluation::due(const RunState& state) const {
  const std::int64_t every = state.session.train.eval_every;
  return data_ && every > 0 && state.step > 0 && state.step % every == 0;
}

void Evaluation::begin(const RunState& state) {
  if (cut_at_ == state.step && due(state) && state.step < state.session.train.steps) evaluate(state);
}

void Evaluation::between_steps(const RunState& state) {
  if (due(state)) evaluate(state);
}

void Evaluation::finish(const RunState& state) {
  if (data_ && evaluated_ != state.step) evaluate(state);
}

void Evaluation::evaluate(const RunState& state) {
  const TrainOptions& train = state.session.train;
  std::int64_t tokens = data_->epoch_tokens();
  if (train.eval_batches > 0)
    tokens = std::min(tokens, train.eval_batches * state.engine.plan().options.geometry.tokens());
  std::optional<DataLoss> sum;
  state.engine.with(Weights::evaluated,
                    [&] { sum = sum_losses(state.engine, &state.ranks, *data_, tokens, state.interrupted); });
  if (!sum) return;
  evaluated_ = state.step;
  if (sum->targets == 0) return state.log.warn("the validation split has no target that counts");
  last_loss_ = sum->loss();
  LogEvent event{"eval", {{"step", state.step}, {"tokens", state.tokens}, {"loss", last_loss_}}};
  if (!std::isnan(sum->correct)) event.fields.emplace_back("accuracy", sum->correct / sum->targets);
  state.log.write(event);
}

}  // namespace quern
