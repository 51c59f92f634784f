#include "train/trainer.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <filesystem>
#include <limits>
#include <utility>

#include "quern/error.h"
#include "train/config_changes.h"
#include "train/export_config.h"
#include "train/weights.h"

namespace quern {

namespace {

constexpr double kNone = std::numeric_limits<double>::quiet_NaN();

// Known at the start, so that its faults are not found at the end of a long run.
std::string config_for_export(const Session& session) {
  if (!session.checkpoint.export_model) return {};
  const OptionValue* source = session.config.section("model").find("config");
  return exported_config(session.model->hf_config(),
                         {.dtype = *dtype_named(session.checkpoint.export_dtype),
                          .vocabulary = session.model->traits().vocabulary,
                          .sources = {source ? std::get<std::string>(*source) : "", session.train.from},
                          .tokenizer = session.checkpoint.tokenizer});
}

// The checkpoint to go on from. What would lose an earlier run is refused here.
NewestCheckpoint starting_point(const Session& session) {
  const CheckpointOptions& options = session.checkpoint;
  NewestCheckpoint newest = find_newest(session.log.directory);
  if (!newest.checkpoint && newest.skipped.empty()) return newest;
  if (options.resume == "never")
    throw Error(ErrorCode::config, {.where = session.config.where("checkpoint", "resume"),
                                    .what = "the run directory has checkpoints",
                                    .found = newest.checkpoint ? newest.checkpoint->path : newest.skipped[0].path,
                                    .expected = "a directory without any for resume = \"never\"",
                                    .next = "choose another log.directory, or resume = \"auto\""});
  if (!newest.checkpoint)
    throw Error(ErrorCode::input, {.where = newest.skipped[0].path,
                                   .what = "no checkpoint of the run is whole: " + newest.skipped[0].reason,
                                   .next = "move the run directory away to start anew"});
  if (newest.checkpoint->meta.step > session.train.steps)
    throw Error(ErrorCode::config, {.where = session.config.where("train", "steps"),
                                    .what = "the run is past that already",
                                    .found = std::to_string(session.train.steps),
                                    .expected = "at least " + std::to_string(newest.checkpoint->meta.step) +
                                                ", the step of " + newest.checkpoint->path,
                                    .next = "raise it, or choose another log.directory"});
  return newest;
}

Device& ready_device(Session& session, const NewestCheckpoint& newest) {
  session.device->open(static_cast<int>(session.device_options.ordinal));
  if (newest.checkpoint) session.device->load_state(newest.checkpoint->meta.device_state);
  return *session.device;
}

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

}  // namespace

Trainer::Trainer(Session& session, PluginHost& host, const std::atomic<int>& stop)
    : session_(session),
      host_(host),
      stop_(stop),
      lock_(session.log.directory),
      samples_(session),
      guard_(session.guard),
      export_config_(config_for_export(session)),
      removed_(remove_leftovers(session.log.directory)),
      newest_(starting_point(session)),
      engine_(ready_device(session, newest_), make_plan(session.parts(), session.plan_options())),
      saver_(*session.device, engine_, session.log.directory,
             {session.checkpoint.keep_last, session.checkpoint.keep_every}),
      ranks_(session.communicator.get(), {.rank = 0, .size = static_cast<int>(session.parallel.ranks), .address = {}},
             *session.device, engine_),
      last_loss_(kNone),
      last_validation_(kNone) {}

std::int64_t Trainer::tokens_per_step() const {
  return session_.train.micro_batch * session_.train.sequence * session_.train.accumulation;
}

void Trainer::log(const LogEvent& event) {
  for (const auto& sink : sinks_) sink->write(event);
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

// ---- start ----

void Trainer::open_data() {
  data_ = session_.open_data(Split::train);
  if (session_.dataset->has(Split::validation)) validation_ = session_.open_data(Split::validation);
  std::int64_t vocabulary = session_.model->traits().vocabulary;
  for (const DataSource* source : {data_.get(), validation_.get()})
    if (source && source->vocabulary() > vocabulary)
      throw Error(ErrorCode::config, {.where = session_.config.where("model", "id"),
                                      .what = "the model's vocabulary is smaller than the data's",
                                      .found = std::to_string(vocabulary),
                                      .expected = "at least " + std::to_string(source->vocabulary()),
                                      .next = "set vocab_size to that of the tokenizer"});
}

void Trainer::load_weights() {
  if (newest_.checkpoint) {
    load_state(engine_, *newest_.checkpoint);
    data_->load_state(newest_.checkpoint->meta.data_state);
    step_ = newest_.checkpoint->meta.step;
    evaluation_cut_ = !newest_.checkpoint->meta.evaluated;
    last_saved_ = step_;
    resumed_ = true;
  } else if (!session_.train.from.empty()) {
    import_weights(engine_, session_.train.from);
  } else {
    initialise_weights(engine_, static_cast<std::uint64_t>(session_.train.seed));
  }
  started_at_ = step_;
}

// Last of the start, so that a run that cannot start leaves the log of an earlier one alone.
void Trainer::open_sinks() {
  for (const std::string& id : session_.config.ids("log")) {
    sinks_.push_back(host_.create<LogSink>(id, session_.config.factory_values("log", id)));
    sinks_.back()->open({session_.log.directory, resumed_, session_.log.every});
  }
  std::filesystem::path directory = std::filesystem::path(session_.log.directory).lexically_normal();
  if (!directory.has_filename()) directory = directory.parent_path();  // "runs/a/" names a
  log({"run",
       {{"name", directory.filename().string()},
        {"model", session_.config.id("model")},
        {"parameters", engine_.plan().parameter_count},
        {"device", session_.device->traits().name},
        {"precision", session_.config.id("precision")},
        {"step", step_},
        {"steps", session_.train.steps},
        {"tokens_per_step", tokens_per_step()},
        {"device_bytes", engine_.plan().device_bytes},
        {"quern", QUERN_VERSION},
        {"config", session_.config.to_toml()}}});
  for (const std::string& path : removed_)
    log({"warning", {{"text", "removed " + path + ", left unfinished by an earlier run"}}});
  for (const SkippedCheckpoint& skipped : newest_.skipped)
    log({"warning", {{"text", "passed over " + skipped.path + ": " + skipped.reason}}});
  for (const std::string& path : newest_.strangers)
    log({"warning", {{"text", "left alone " + path + ", which is not a checkpoint"}}});
  if (session_.log.scales_every > 0) scaled_ = scaled_tensors(engine_.plan());
  if (session_.log.scales_every > 0 && scaled_.empty())
    log({"warning",
         {{"text", "log.scales_every: precision " + session_.config.id("precision") +
                       " gives no tensor a delayed scale here, so there is none to log"}}});
  if (!resumed_) return;
  log({"warning", {{"text", "resumed at step " + std::to_string(step_) + " from " + newest_.checkpoint->path}}});
  for (const std::string& change : config_changes(newest_.checkpoint->meta.config, session_.config.to_toml()))
    log({"warning", {{"text", "changed since the checkpoint: " + change}}});
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
  double begin = now();
  guard_.keep_states(engine_);
  Batch batch;
  std::string data;
  for (std::int64_t micro_step = 0; micro_step < train.accumulation; ++micro_step) {
    data_->next(batch);
    for (const std::string& name : batch.names) data.append(data.empty() ? "" : ", ").append(name);
    state.micro_step = static_cast<std::uint32_t>(micro_step);
    engine_.micro_step(batch, state);
  }
  ranks_.reduce();
  std::vector<LogEvent> scales;
  if (logs_scales(step_ + 1)) scales = read_scales(engine_, scaled_, step_ + 1);
  engine_.update();
  Telemetry telemetry;  // asked while the device works and the host would only wait
  if (shows_step(step_ + 1)) telemetry = session_.device->telemetry();
  Engine::StepResult result = engine_.result();
  double end = now();
  ranks_.check("step " + std::to_string(step_ + 1));
  // Those of a step that is not finite too: they may tell why.
  for (const LogEvent& event : scales) log(event);
  bool counts = result.loss.valid_tokens > 0;  // a step whose targets are all masked has no loss and moves nothing
  if (result.update.apply == 0 && counts) return not_finite(result, data);
  ++step_;
  in_steps_ += end - begin;
  last_loss_ = counts ? result.loss.loss_sum / result.loss.valid_tokens : kNone;
  if (!counts)
    log({"warning", {{"text", "step " + std::to_string(step_) + " had no target that counts; weights stay"}}});
  double per_step = (end - started_) / static_cast<double>(step_ - started_at_);  // evaluations and checkpoints too
  log({"step",
       {{"step", step_},
        {"steps", train.steps},
        {"tokens", step_ * tokens_per_step()},
        {"loss", last_loss_},
        {"lr", double{state.learning_rate}},
        {"grad_norm", double{result.update.gradient_norm}},
        {"tokens_per_second", static_cast<double>(tokens_per_step()) / (end - begin)},
        {"time", end - started_},
        {"eta", per_step * static_cast<double>(train.steps - step_)}}});
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
          {"data", data}}});
  return true;
}

bool Trainer::not_finite(const Engine::StepResult& result, const std::string& data) {
  const NonFinite action = guard_.failed(step_ + 1);
  log({"non_finite",
       {{"step", step_ + 1},
        {"loss", result.loss.loss_sum / result.loss.valid_tokens},
        {"grad_norm", double{result.update.gradient_norm}},
        {"action", std::string(name_of(action))},
        {"data", data}}});
  if (action == NonFinite::roll_back) {
    roll_back();
    return false;
  }
  if (action == NonFinite::skip) {
    guard_.restore_states(engine_);
    ++step_;
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
// before the next checkpoint, a run gets there and does the same once more.
void Trainer::roll_back() {
  saver_.wait();
  log_saved();
  NewestCheckpoint newest = find_newest(session_.log.directory);
  if (!newest.checkpoint)
    throw Error(ErrorCode::input, {.where = session_.log.directory,
                                   .what = "no whole checkpoint to roll back to",
                                   .next = "start anew, or set guard.non_finite to \"skip\""});
  load_state(engine_, *newest.checkpoint);
  step_ = newest.checkpoint->meta.step;
  last_saved_ = step_;
  log({"warning", {{"text", "rolled back to step " + std::to_string(step_) + ", " + newest.checkpoint->path}}});
}

void Trainer::evaluate() {
  std::int64_t tokens = engine_.plan().options.geometry.tokens(), left = validation_->epoch_tokens();
  if (session_.train.eval_batches > 0) left = std::min(left, session_.train.eval_batches * tokens);
  std::string begin = validation_->save_state();
  double loss = 0, valid = 0;
  Batch batch;
  for (; left > 0; left -= tokens) {
    if (stopping()) return validation_->load_state(begin);
    validation_->next(batch);
    // The last batch may reach into the next pass: what comes twice does not count twice.
    if (left < tokens) std::fill(batch.targets.begin() + left, batch.targets.end(), -1);
    LossStats stats = engine_.evaluate(batch);
    loss += stats.loss_sum;
    valid += stats.valid_tokens;
  }
  validation_->load_state(begin);
  last_validation_ = valid > 0 ? loss / valid : kNone;
  last_evaluated_ = step_;
  log({"eval", {{"step", step_}, {"tokens", step_ * tokens_per_step()}, {"loss", last_validation_}}});
}

void Trainer::save() {
  CheckpointMeta meta;
  meta.step = step_;
  meta.data_state = data_->save_state();
  meta.device_state = session_.device->save_state();
  meta.config = session_.config.to_toml();
  meta.quern_version = QUERN_VERSION;
  meta.evaluated = !evaluates(step_) || last_evaluated_ == step_;
  saver_.save(std::move(meta));
  last_saved_ = step_;
  log_saved();
}

void Trainer::log_saved() {
  for (const SavedCheckpoint& saved : saver_.take_saved())
    log({"checkpoint", {{"step", saved.step}, {"path", saved.path}, {"held", saved.held}, {"seconds", saved.seconds}}});
}

// False: stopped before there was an export.
bool Trainer::finish() {
  double elapsed = now() - started_;
  if (validation_ && last_evaluated_ != step_) evaluate();
  if (stopping()) return false;
  std::string exported;
  if (session_.checkpoint.export_model) {
    exported = session_.log.directory + "/export";
    HfExport what;
    what.dtype = *dtype_named(session_.checkpoint.export_dtype);
    what.config = export_config_;
    what.tokenizer_from = session_.checkpoint.tokenizer;
    export_weights(engine_, exported, what);
  }
  LogEvent end{"end", {{"step", step_}, {"tokens", step_ * tokens_per_step()}}};
  if (step_ > started_at_) end.fields.emplace_back("loss", last_loss_);
  if (validation_) end.fields.emplace_back("val_loss", last_validation_);
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

void Trainer::start() {
  open_data();
  load_weights();
  open_sinks();
  newest_ = {};  // unmaps the checkpoint's file
  ready_ = true;
}

RunResult Trainer::run() {
  if (!ready_) start();
  const TrainOptions& train = session_.train;
  const CheckpointOptions& checkpoint = session_.checkpoint;
  started_ = now();
  if (evaluation_cut_ && evaluates(step_) && step_ < train.steps) evaluate();
  if (guard_.policy() == NonFinite::roll_back && last_saved_ != step_) save();  // somewhere to go back to
  while (step_ < train.steps && !stopping()) {
    const bool forward = train_step();
    log_saved();
    if (!forward) continue;
    if (samples_.due(step_))
      for (const LogEvent& event : samples_.take(engine_, step_)) log(event);
    if (evaluates(step_)) evaluate();
    if (checkpoint.every > 0 && step_ % checkpoint.every == 0 && !stopping()) save();
  }
  if (checkpoint.at_end && last_saved_ != step_ && !stopping()) save();
  bool finished = !stopping() && finish();
  // A stop. What was not trained here need not be saved here: it is what the run started from.
  if (!finished && step_ > started_at_ && last_saved_ != step_) save();
  saver_.wait();
  log_saved();
  return {step_, finished};
}

}  // namespace quern
