#include "run/trainer.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <limits>
#include <utility>

#include "quern/error.h"
#include "run/weights.h"

namespace quern {

namespace {

constexpr double kNone = std::numeric_limits<double>::quiet_NaN();
constexpr std::size_t kMostNames = 4096;  // of a step's data

std::string joined(const std::vector<std::string>& names) {
  std::string text;
  for (const std::string& name : names) text.append(text.empty() ? "" : ", ").append(name);
  return text;
}

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

}  // namespace

std::int64_t Trainer::tokens_per_step() const {
  return session_.train.micro_batch * session_.train.sequence * session_.train.accumulation;
}

bool Trainer::shows_step(std::int64_t step) const {
  return step == 1 || step == session_.train.steps || step % session_.log.every == 0;
}

bool Trainer::evaluates(std::int64_t step) const {
  return validation_ && session_.train.eval_every > 0 && step > 0 && step % session_.train.eval_every == 0;
}

bool Trainer::logs_scales(std::int64_t step) const {
  return session_.log.scales_every > 0 && step % session_.log.scales_every == 0;
}

// {"event":"telemetry","step":20,"sm_clock_MHz":1755.0,...,"slowed_by":"power limit"}
void Trainer::log_telemetry(const Telemetry& telemetry) {
  LogEvent event{"telemetry", {{"step", step_}}};
  for (const Reading& reading : telemetry.readings)
    event.fields.emplace_back(reading.name + (reading.unit.empty() ? "" : "_" + reading.unit), reading.value);
  std::string slowed_by;
  for (const std::string& reason : telemetry.slowed_by) slowed_by += (slowed_by.empty() ? "" : ", ") + reason;
  if (!telemetry.readings.empty()) event.fields.emplace_back("slowed_by", slowed_by);
  if (!telemetry.unavailable.empty() && !std::exchange(told_unavailable_, true))
    event.fields.emplace_back("unavailable", telemetry.unavailable);
  if (event.fields.size() > 1) log(event);
}

// ---- steps ----

bool Trainer::train_step() {
  const TrainOptions& train = session_.train;
  auto seed = static_cast<std::uint64_t>(train.seed);
  StepState state;
  state.step = static_cast<std::uint32_t>(step_);
  state.seed_low = static_cast<std::uint32_t>(seed);
  state.seed_high = static_cast<std::uint32_t>(seed >> 32);
  state.learning_rate =
      static_cast<float>(session_.optimizer_options.learning_rate * session_.schedule->factor(step_, train.steps));
  state.clip_norm = static_cast<float>(session_.optimizer_options.clip_norm);
  state.updates = static_cast<std::uint32_t>(updates_);
  const Observe observe = logs_scales(step_ + 1) && !observed_.empty() ? Observe::yes : Observe::no;
  double begin = now();
  guard_.keep_states(engine_);
  data_before_step_ = data_->save_state();
  Batch batch;
  std::vector<std::string> data;
  for (std::int64_t micro_step = 0; micro_step < train.accumulation; ++micro_step) {
    if (micro_step > 0 && stopping()) {  // a step may take hours; what it has moved so far goes back
      guard_.restore_states(engine_);
      return false;
    }
    data_->next(batch);
    if (data.size() < kMostNames) data.insert(data.end(), batch.names.begin(), batch.names.end());
    state.micro_step = static_cast<std::uint32_t>(micro_step);
    engine_.micro_step(batch, state, observe, micro_step + 1 == train.accumulation ? Last::yes : Last::no);
  }
  ranks_.reduce();
  std::vector<LogEvent> scales;
  if (observe == Observe::yes) scales = read_scales(engine_, observed_, step_ + 1);
  state_is_whole_ = false;
  engine_.update();
  Telemetry telemetry;  // asked while the device works and the host would only wait
  if (shows_step(step_ + 1)) telemetry = session_.device->telemetry();
  Engine::StepResult result = engine_.result();
  double end = now();
  ranks_.check("step " + std::to_string(step_ + 1));
  bool counts = result.loss.valid_tokens > 0;  // a step whose targets are all masked has no loss and moves nothing
  const bool finite = result.update.apply != 0 || !counts;
  if (finite) at_step(step_ + 1);
  if (result.update.apply != 0) ++updates_;
  // Those of a step that is not finite too: they may tell why.
  for (const LogEvent& event : scales) log(event);
  if (!finite) return not_finite(result, data);
  in_steps_ += end - begin;
  if (counts)
    last_loss_ = result.loss.loss_sum / result.loss.valid_tokens;
  else
    log({"warning", {{"text", "step " + std::to_string(step_) + " had no target that counts; weights stay"}}});
  double per_step = (end - started_) / static_cast<double>(step_ - started_at_);  // evaluations and checkpoints too
  LogEvent event{"step", {{"step", step_}, {"steps", train.steps}, {"tokens", step_ * tokens_per_step()}}};
  if (counts) event.fields.emplace_back("loss", last_loss_);
  event.fields.emplace_back("lr", double{state.learning_rate});
  if (counts) event.fields.emplace_back("grad_norm", double{result.update.gradient_norm});
  event.fields.emplace_back("tokens_per_second", static_cast<double>(tokens_per_step()) / (end - begin));
  event.fields.emplace_back("time", end - started_);
  event.fields.emplace_back("eta", per_step * static_cast<double>(train.steps - step_));
  log(event);
  log_telemetry(telemetry);
  if (!counts) return true;
  for (const Spike& spike : guard_.passed(step_, last_loss_, double{result.update.gradient_norm}))
    log({"spike",
         {{"step", step_},
          {"what", std::string(spike.what)},
          {"value", spike.value},
          {"z", spike.z},
          {"mean", spike.mean},
          {"deviation", spike.deviation},
          {"data", joined(data)}}});
  return true;
}

// No step is under way any more; the engine has the state of this one.
void Trainer::at_step(std::int64_t step) {
  step_ = step;
  data_before_step_.clear();
  state_is_whole_ = true;
}

bool Trainer::not_finite(const Engine::StepResult& result, const std::vector<std::string>& data) {
  const NonFinite action = guard_.failed(step_ + 1);
  log({"non_finite",
       {{"step", step_ + 1},
        {"loss", result.loss.loss_sum / result.loss.valid_tokens},
        {"grad_norm", double{result.update.gradient_norm}},
        {"action", std::string(name_of(action))},
        {"data", joined(data)}}});
  if (action == NonFinite::roll_back) {
    roll_back();
    return false;
  }
  if (action == NonFinite::skip) {
    guard_.restore_states(engine_);
    at_step(step_ + 1);
    return true;
  }
  const bool limited = guard_.policy() != NonFinite::stop;
  throw Error(
      ErrorCode::numerics,
      {.where = "step " + std::to_string(step_ + 1),
       .what = "loss or gradient is not finite; the update was not applied",
       .found = "loss sum " + std::to_string(result.loss.loss_sum) + ", gradient norm " +
                std::to_string(result.update.gradient_norm) +
                (limited ? ", after guard.limit = " + std::to_string(session_.guard.limit) + " such steps" : ""),
       .expected = "finite numbers",
       .next = "lower optimizer.learning_rate, or resume from an earlier checkpoint"});
}

// Goes on with the data after the step that failed: those since the checkpoint led there, and would again. Resumed
// before the next checkpoint, a run gets there and does the same once more. When no step went well since the last time,
// the checkpoint itself may be what is wrong, and an older one is taken where there is one.
void Trainer::roll_back() {
  saver_.wait();
  log_saved();
  NewestCheckpoint newest;
  const std::string directory = lock_.directory();
  if (step_ == rolled_back_to_) newest = find_newest(directory, step_);
  if (!newest.checkpoint) newest = find_newest(directory);
  for (const SkippedCheckpoint& skipped : newest.skipped)
    log({"warning", {{"text", "passed over " + skipped.path + ": " + skipped.reason}}});
  if (!newest.checkpoint)
    throw Error(ErrorCode::input, {.where = directory,
                                   .what = "no whole checkpoint to roll back to",
                                   .next = "start anew, or set guard.non_finite to \"skip\""});
  continue_from(*newest.checkpoint);  // what differs was said at the start
  at_step(newest.checkpoint->meta.step);
  rolled_back_to_ = last_saved_ = step_;
  updates_ = newest.checkpoint->meta.updates;
  started_at_ = std::min(started_at_, step_);
  last_evaluated_ = -1;
  log({"warning", {{"text", "rolled back to step " + std::to_string(step_) + ", " + newest.checkpoint->path}}});
}

void Trainer::evaluate() {
  std::int64_t tokens = engine_.plan().options.geometry.tokens(), left = validation_->epoch_tokens();
  if (session_.train.eval_batches > 0) left = std::min(left, session_.train.eval_batches * tokens);
  std::string begin = validation_->save_state();
  double loss = 0, valid = 0;
  Batch batch;
  for (; left > 0; left -= tokens) {
    if (interrupted()) return validation_->load_state(begin);
    validation_->next(batch);
    // The last batch may reach into the next pass: what comes twice does not count twice.
    if (left < tokens) std::fill(batch.targets.begin() + left, batch.targets.end(), -1);
    LossStats stats = engine_.evaluate(batch);
    loss += stats.loss_sum;
    valid += stats.valid_tokens;
  }
  validation_->load_state(begin);
  last_evaluated_ = step_;
  if (valid == 0) return log({"warning", {{"text", "the validation split has no target that counts"}}});
  last_validation_ = loss / valid;
  log({"eval", {{"step", step_}, {"tokens", step_ * tokens_per_step()}, {"loss", last_validation_}}});
}

void Trainer::save() {
  start_saving();
  log_saved();
}

void Trainer::start_saving() {
  CheckpointMeta meta;
  meta.step = step_;
  meta.updates = updates_;
  meta.data_state = data_before_step_.empty() ? data_->save_state() : data_before_step_;
  meta.device_state = session_.device->save_state();
  meta.config = session_.config.to_toml();
  meta.quern_version = QUERN_VERSION;
  meta.libraries = libraries_;
  meta.evaluated = !evaluates(step_) || last_evaluated_ == step_;
  saver_.save(std::move(meta));
  last_saved_ = step_;
}

// Whether all steps done are saved. Not tried after a failed save, nor where the update of a step or communication
// between ranks failed: the state is then not that of a step.
bool Trainer::save_before_failing(bool communicating) {
  std::string failure;
  bool saved = false;
  try {
    saver_.wait();
    if (step_ > 0 && last_saved_ != step_ && state_is_whole_ && !communicating && !saver_.failed()) {
      if (!data_before_step_.empty()) guard_.restore_states(engine_);
      start_saving();
      saver_.wait();
    }
    saved = step_ > 0 && last_saved_ == step_ && !saver_.failed();
  } catch (const std::exception& error) {
    failure = error.what();
  }
  if (!failure.empty()) log_.warn(failure);
  log_saved();
  log_.end();
  return saved;
}

bool Trainer::interrupted() {
  if (requests_.save.exchange(false) && step_ > 0 && last_saved_ != step_) save();
  return stopping();
}

void Trainer::log_saved() {
  for (const SavedCheckpoint& saved : saver_.take_saved())
    log({"checkpoint", {{"step", saved.step}, {"path", saved.path}, {"held", saved.held}, {"seconds", saved.seconds}}});
}

// False: stopped before there was an export.
bool Trainer::finish() {
  double elapsed = now() - started_;
  if (validation_ && last_evaluated_ != step_) evaluate();
  if (interrupted()) return false;
  std::string exported;
  if (session_.checkpoint.export_model) {
    exported = Session::export_directory(lock_.directory());
    HfExport what;
    what.dtype = *dtype_named(session_.checkpoint.export_dtype);
    what.config = export_config_;
    what.tokenizer_from = session_.checkpoint.tokenizer;
    export_weights(engine_, exported, what);
  }
  LogEvent end{"end", {{"step", step_}, {"tokens", step_ * tokens_per_step()}}};
  if (!std::isnan(last_loss_)) end.fields.emplace_back("loss", last_loss_);
  if (!std::isnan(last_validation_)) end.fields.emplace_back("val_loss", last_validation_);
  end.fields.emplace_back("time", elapsed);
  if (in_steps_ > 0)
    end.fields.emplace_back("tokens_per_second",
                            static_cast<double>((step_ - started_at_) * tokens_per_step()) / in_steps_);
  if (!exported.empty()) end.fields.emplace_back("export", exported);
  saver_.wait();
  log_saved();
  log(end);
  return true;
}

void Trainer::run_steps() {
  const TrainOptions& train = session_.train;
  const CheckpointOptions& checkpoint = session_.checkpoint;
  if (evaluation_cut_ && evaluates(step_) && step_ < train.steps) evaluate();
  if (guard_.policy() == NonFinite::roll_back && last_saved_ != step_) save();  // somewhere to go back to
  while (step_ < train.steps && !interrupted()) {
    const bool forward = train_step();
    log_saved();
    if (!forward) continue;
    if (samples_.due(step_) && !interrupted())
      for (const LogEvent& event : samples_.take(engine_, step_, [this] { return interrupted(); })) log(event);
    if (evaluates(step_)) evaluate();
    if (checkpoint.every > 0 && step_ % checkpoint.every == 0 && !stopping()) save();
  }
  if (checkpoint.at_end && last_saved_ != step_ && !stopping()) save();
}

RunResult Trainer::run() {
  if (!ready_) start();
  started_ = now();
  bool finished = false;
  try {
    run_steps();
    finished = !stopping() && finish();
    // A stop. What this process started from is saved already.
    if (!finished && step_ > 0 && last_saved_ != step_) save();
    saver_.wait();
    log_saved();
  } catch (const Error& error) {
    if (!save_before_failing(error.code() == ErrorCode::communication)) throw;
    ErrorDetail detail = error.detail();
    detail.next.append(detail.next.empty() ? "" : "; ")
        .append("step " + std::to_string(step_) + " is saved, and the same command goes on from there");
    throw Error(error.code(), std::move(detail));
  } catch (...) {
    save_before_failing(false);
    throw;
  }
  return {step_, finished, log_.end()};
}

}  // namespace quern
