#include "run/hooks/checkpoints.h"

#include <utility>

#include "quern/error.h"

namespace quern {

namespace {

std::string writing(std::int64_t step) { return "writing step " + std::to_string(step); }

}  // namespace

Checkpoints::Checkpoints(const Session& session, Engine& engine, Ranks& ranks, std::optional<RunLock>& lock,
                         const std::vector<LibraryIdentity>& libraries, const Evaluation& evaluation)
    : ranks_(ranks), lock_(lock), libraries_(libraries), evaluation_(evaluation) {
  const Retention retention{session.checkpoint.keep_last, session.checkpoint.keep_every};
  if (ranks.leads())
    saver_.emplace(*session.device, engine, *lock, retention, [&ranks] { return ranks.time_to_finish(); });
}

void Checkpoints::start_saving(const RunState& state) {
  CheckpointMeta meta;
  meta.step = state.step;
  meta.tokens = state.tokens;
  meta.updates = state.updates;
  meta.data_state = state.data_before_step.empty() ? state.data->save_state() : state.data_before_step;
  meta.device_state = state.session.device->save_state();
  meta.config = state.session.config.to_toml();
  meta.quern_version = QUERN_VERSION;
  meta.libraries = libraries_;
  meta.evaluated = evaluation_.done(state);
  ranks_.lead(writing(state.step), state.engine, [&] { saver_->save(std::move(meta)); });
  last_saved_ = state.step;
}

void Checkpoints::wait() {
  if (saver_) ranks_.busy(writing(last_saved_), [&] { saver_->wait(); });
}

void Checkpoints::log_saved(const RunState& state) {
  if (!saver_) return;
  for (const SavedCheckpoint& saved : saver_->take_saved())
    state.log.write(
        {"checkpoint", {{"step", saved.step}, {"path", saved.path}, {"held", saved.held}, {"seconds", saved.seconds}}});
}

void Checkpoints::save(const RunState& state) {
  start_saving(state);
  log_saved(state);
}

void Checkpoints::finish(const RunState& state) {
  wait();
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
  finish(state);
  NewestCheckpoint newest;
  const std::string directory = lock_->directory();
  if (state.step == rolled_back_to_) newest = find_newest(directory, state.step);
  if (!newest.checkpoint) newest = find_newest(directory);
  for (const SkippedCheckpoint& skipped : newest.skipped)
    state.log.warn("passed over " + skipped.path + ": " + skipped.reason);
  if (!newest.checkpoint)
    throw Error(ErrorCode::input, {.where = directory,
                                   .what = "no whole checkpoint to roll back to",
                                   .next = "start a new run, or set guard.non_finite to \"skip\""});
  return newest.checkpoint->path;
}

}  // namespace quern
