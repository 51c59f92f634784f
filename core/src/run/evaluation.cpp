#include "run/evaluation.h"

#include <algorithm>

#include "base/clock.h"

namespace quern {

std::optional<DataLoss> sum_losses(Engine& engine, DataSource& source, std::int64_t tokens,
                                   const std::function<bool()>& interrupted) {
  const std::int64_t batch_tokens = engine.plan().options.geometry.tokens();
  const std::string begin = source.save_state();
  std::optional<DataLoss> sum{DataLoss{}};
  sum->tokens = tokens;
  const double start = now();
  Batch batch;
  for (std::int64_t left = tokens; left > 0; left -= batch_tokens) {
    if (interrupted()) {
      sum.reset();
      break;
    }
    source.next(batch);
    // The last batch may reach into the next pass: what comes twice does not count twice.
    if (left < batch_tokens) std::fill(batch.targets.begin() + left, batch.targets.end(), -1);
    const LossStats stats = engine.evaluate(batch);
    sum->loss_sum += stats.loss_sum;
    sum->targets += stats.valid_tokens;
  }
  if (sum) sum->seconds = now() - start;
  source.load_state(begin);
  return sum;
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
  const std::optional<DataLoss> sum = sum_losses(state.engine, *data_, tokens, state.interrupted);
  if (!sum) return;
  evaluated_ = state.step;
  if (sum->targets == 0) return state.log.warn("the validation split has no target that counts");
  last_loss_ = sum->loss();
  state.log.write(
      {"eval", {{"step", state.step}, {"tokens", state.step * state.session.tokens_per_step()}, {"loss", last_loss_}}});
}

}  // namespace quern
