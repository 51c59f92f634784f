#include "run/hooks/checkpoints.h"

#include <utility>

#include "checkpoint/saved_state.h"
#include "quern/error.h"

namespace quern {

namespace {

std::string writing(std::int64_t step) { return "writing step " + std::to_string(step); }

}  // namespace

class Checkpoints::Saving final : public SavingRanks {
 public:
  explicit Saving(Ranks& ranks) : ranks_(ranks) {}
  RankFile file() const override { return {ranks_.shard(), ranks_.shards()}; }
  bool writes() const override { return ranks_.rank() < ranks_.shards(); }
  std::string from_leader(const std::function<std::string()>& make) override {
    return ranks_.from_leader("opening a checkpoint", make);
  }
  void post(const std::string& text) override { ranks_.post(text); }
  std::string posted(int rank) override { return ranks_.posted(rank); }
  std::shared_ptr<void> hold() override { return ranks_.time_to_finish(); }

 private:
  Ranks& ranks_;
};

Checkpoints::Checkpoints(const Session& session, Engine& engine, Ranks& ranks, std::optional<RunLock>& lock,
                         const std::vector<LibraryIdentity>& libraries, const Evaluation& evaluation)
    : ranks_(ranks),
      lock_(lock),
      libraries_(libraries),
      evaluation_(evaluation),
      saving_(std::make_unique<Saving>(ranks)),
      saver_(*session.device, engine, lock ? &*lock : nullptr,
             Retention{session.checkpoint.keep_last, session.checkpoint.keep_every}, *saving_) {}

void Checkpoints::start_saving(const RunState& state) {
  CheckpointMeta meta;
  meta.step = state.step;
  meta.tokens = state.tokens;
  meta.updates = state.updates;
  meta.averaged = state.averaged;
  meta.evaluated_states = evaluated_states(state.engine.plan());
  meta.data_state = state.data_before_step.empty() ? state.data->save_state() : state.data_before_step;
  meta.device_state = state.session.device->save_state();
  meta.config = state.session.config.to_toml();
  meta.quern_version = QUERN_VERSION;
  meta.libraries = libraries_;
  meta.evaluated = evaluation_.done(state);
  if (ranks_.size() > 1) state.engine.apply_update();
  state.engine.with(Weights::trained, [&] {  // also where an evaluation was interrupted for it
    ranks_.busy(writing(state.step), [&] { saver_.save(std::move(meta)); });
  });
  last_saved_ = state.step;
}

void Checkpoints::wait() {
  ranks_.busy(writing(last_saved_), [&] { saver_.wait(); });
}

void Checkpoints::log_saved(const RunState& state) {
  for (const SavedCheckpoint& saved : saver_.take_saved())
    if (ranks_.leads())
      state.log.write({"checkpoint",
                       {{"step", saved.step}, {"path", saved.path}, {"held", saved.held}, {"seconds", saved.seconds}}});
}

void Checkpoints::save(const RunState& state) {
  start_saving(state);
  log_saved(state);
}

void Checkpoints::finish(const RunState& state) {
  wait();
  ranks_.together();  // rank 0 has made it whole
  log_saved(state);
}

void Checkpoints::between_steps(const RunState& state) {
  const std::int64_t every = state.session.checkpoint.every;
  if (every > 0 && state.step % every == 0 && !state.stopping()) save(state);
}

Checkpoint Checkpoints::to_roll_back_to(const RunState& state) {
  const std::string path = ranks_.from_leader("looking for a checkpoint", [&] { return path_to_roll_back_to(state); });
  std::optional<Checkpoint> checkpoint;
  ranks_.busy("reading a checkpoint", [&] { checkpoint = read_checkpoint(path); });
  return std::move(*checkpoint);
}

std::string Checkpoints::path_to_roll_back_to(const RunState& state) {
  wait();  // on this rank alone
  log_saved(state);
  NewestCheckpoint newest;
  const std::string directory = lock_->directory();
  if (state.step == rolled_back_to_) newest = find_newest(directory, state.step);
  if (!newest.checkpoint) newest = find_newest(directory);
  for (const SkippedCheckpoint& skipped : newest.skipped)
    state.log.warn("passed over " + skipped.path + ": " + skipped.reason);
  if (!newest.checkpoint)
    throw Error(ErrorCode::input, {.where = directory,
                                   .what = "no whole checkpoint to roll back to",
                                   .next = "set guard.non_finite to \"skip\""});
  return newest.checkpoint->path;
}

}  // namespace quern
