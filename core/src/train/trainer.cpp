#include "train/trainer.h"

#include <chrono>
#include <cmath>
#include <filesystem>
#include <utility>

#include "quern/error.h"
#include "train/weights.h"

namespace quern {

namespace {

Device& ready_device(Session& session, const NewestCheckpoint& newest) {
  session.device->open(static_cast<int>(session.device_options.ordinal));
  if (newest.checkpoint) session.device->load_state(newest.checkpoint->meta.device_state);
  return *session.device;
}

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

}  // namespace

Trainer::Trainer(Session& session, PluginHost& host, const std::atomic<int>& stop)
    : session_(session), stop_(stop), lock_(session.log.directory), newest_(find_newest(session.log.directory)),
      engine_(ready_device(session, newest_), make_plan(session.parts(), session.plan_options())) {
  for (const std::string& id : session.log.sinks) {
    const Factory& factory = host.require("log", id);
    sinks_.push_back(host.create<LogSink>(id, default_values(factory.options)));
    sinks_.back()->open({session.log.directory, newest_.checkpoint.has_value(), session.log.every});
  }
}

void Trainer::log(LogEvent event) {
  for (const auto& sink : sinks_) sink->write(event);
}

void Trainer::start() {
  const TrainOptions& train = session_.train;
  Geometry geometry = engine_.plan().options.geometry;
  std::uint64_t seed = static_cast<std::uint64_t>(train.seed);
  data_ = session_.dataset->open({Split::train, geometry, seed, 0, 1});
  if (session_.dataset->has(Split::validation)) validation_ = session_.dataset->open({Split::validation, geometry, seed, 0, 1});
  for (const DataSource* source : {data_.get(), validation_.get()})
    if (source && source->vocabulary() > session_.model->traits().vocabulary)
      throw Error(ErrorCode::config, {.where = "model", .what = "its vocabulary is smaller than the data's", .found = std::to_string(session_.model->traits().vocabulary), .expected = "at least " + std::to_string(source->vocabulary()), .next = "set vocab_size to that of the tokenizer"});

  for (const std::string& path : remove_leftovers(session_.log.directory)) log({"warning", {{"text", "removed " + path + ", left unfinished by an earlier run"}}});
  for (const SkippedCheckpoint& skipped : newest_.skipped) log({"warning", {{"text", "passed over " + skipped.path + ": " + skipped.reason}}});
  if (newest_.checkpoint && session_.checkpoint.resume == "never")
    throw Error(ErrorCode::config, {.where = session_.config.where("checkpoint", "resume"), .what = "the run directory has checkpoints", .found = newest_.checkpoint->path, .expected = "an empty directory for resume = \"never\"", .next = "choose another log.directory, or resume = \"auto\""});
  if (newest_.checkpoint) {
    load_state(engine_, *newest_.checkpoint);
    data_->load_state(newest_.checkpoint->meta.data_state);
    step_ = newest_.checkpoint->meta.step;
    last_saved_ = step_;
    log({"warning", {{"text", "resumed at step " + std::to_string(step_) + " from " + newest_.checkpoint->path}}});
  } else if (!train.from.empty()) {
    import_weights(engine_, train.from);
  } else {
    initialise_weights(engine_, seed);
  }
  started_at_ = step_;
  newest_ = {};
}

void Trainer::train_step() {
  const TrainOptions& train = session_.train;
  std::uint64_t seed = static_cast<std::uint64_t>(train.seed);
  StepState state;
  state.step = static_cast<std::uint32_t>(step_);
  state.seed_low = static_cast<std::uint32_t>(seed);
  state.seed_high = static_cast<std::uint32_t>(seed >> 32);
  state.learning_rate = static_cast<float>(session_.optimizer_options.learning_rate * session_.schedule->factor(step_, train.steps));
  state.clip_norm = static_cast<float>(session_.optimizer_options.clip_norm);
  double begin = now();
  Batch batch;
  for (std::int64_t micro_step = 0; micro_step < train.accumulation; ++micro_step) {
    data_->next(batch);
    state.micro_step = static_cast<std::uint32_t>(micro_step);
    engine_.micro_step(batch, state);
  }
  engine_.update();
  Engine::StepResult result = engine_.result();
  double seconds = now() - begin;
  if (result.update.apply == 0 && result.loss.valid_tokens > 0)
    throw Error(ErrorCode::numerics, {.where = "step " + std::to_string(step_ + 1), .what = "loss or gradient is not finite; the update was not applied", .found = "loss sum " + std::to_string(result.loss.loss_sum) + ", gradient norm " + std::to_string(result.update.gradient_norm), .expected = "finite numbers", .next = "lower optimizer.learning_rate, or resume from an earlier checkpoint"});
  ++step_;
  last_loss_ = result.loss.valid_tokens > 0 ? result.loss.loss_sum / result.loss.valid_tokens : 0;
  std::int64_t step_tokens = train.micro_batch * train.sequence * train.accumulation;
  double elapsed = now() - started_;
  double per_step = elapsed / static_cast<double>(step_ - started_at_);
  log({"step",
       {{"step", step_}, {"steps", train.steps}, {"tokens", step_ * step_tokens}, {"loss", last_loss_}, {"lr", double{state.learning_rate}},
        {"grad_norm", double{result.update.gradient_norm}}, {"tokens_per_second", static_cast<double>(step_tokens) / seconds},
        {"time", elapsed}, {"eta", per_step * static_cast<double>(train.steps - step_)}}});
}

double Trainer::evaluate() {
  std::int64_t tokens = engine_.plan().options.geometry.tokens();
  std::int64_t batches = std::max<std::int64_t>(1, validation_->epoch_tokens() / tokens);
  if (session_.train.eval_batches > 0) batches = std::min(batches, session_.train.eval_batches);
  std::string begin = validation_->save_state();
  double loss = 0, valid = 0;
  Batch batch;
  for (std::int64_t i = 0; i < batches; ++i) {
    validation_->next(batch);
    LossStats stats = engine_.evaluate(batch);
    loss += stats.loss_sum;
    valid += stats.valid_tokens;
  }
  validation_->load_state(begin);
  last_validation_ = valid > 0 ? loss / valid : 0;
  last_evaluated_ = step_;
  std::int64_t step_tokens = session_.train.micro_batch * session_.train.sequence * session_.train.accumulation;
  log({"eval", {{"step", step_}, {"tokens", step_ * step_tokens}, {"loss", last_validation_}}});
  return last_validation_;
}

void Trainer::save() {
  CheckpointMeta meta;
  meta.step = step_;
  meta.data_state = data_->save_state();
  meta.device_state = session_.device->save_state();
  meta.config = session_.config.to_toml();
  meta.quern_version = QUERN_VERSION;
  std::vector<std::vector<std::byte>> memory;
  std::vector<NamedView> tensors;
  for (const PlannedTensor& tensor : training_state(engine_.plan())) {
    memory.emplace_back(static_cast<std::size_t>(tensor.bytes()));
    engine_.read(tensor, memory.back().data());
    tensors.push_back({state_name(tensor), {memory.back().data(), tensor.dtype, tensor.extents}});
  }
  std::string path = write_checkpoint(session_.log.directory, meta, tensors);
  remove_old_checkpoints(session_.log.directory, session_.checkpoint.keep_last, step_);
  last_saved_ = step_;
  log({"checkpoint", {{"step", step_}, {"path", path}}});
}

void Trainer::finish() {
  if (validation_ && last_evaluated_ != step_) evaluate();
  std::string exported;
  if (session_.checkpoint.export_model) {
    exported = session_.log.directory + "/export";
    HfExport what;
    what.dtype = session_.checkpoint.export_dtype == "bf16" ? DType::bf16 : DType::f32;
    what.config = session_.model->hf_config();
    what.tokenizer_from = session_.checkpoint.tokenizer;
    export_weights(engine_, exported, what);
  }
  std::int64_t step_tokens = session_.train.micro_batch * session_.train.sequence * session_.train.accumulation;
  double elapsed = now() - started_;
  LogEvent end{"end", {{"step", step_}, {"tokens", step_ * step_tokens}, {"loss", last_loss_}}};
  if (validation_) end.fields.emplace_back("val_loss", last_validation_);
  end.fields.emplace_back("time", elapsed);
  end.fields.emplace_back("tokens_per_second", elapsed > 0 ? static_cast<double>((step_ - started_at_) * step_tokens) / elapsed : 0.0);
  if (!exported.empty()) end.fields.emplace_back("export", exported);
  log(std::move(end));
}

RunResult Trainer::run() {
  start();
  const TrainOptions& train = session_.train;
  std::filesystem::path name = std::filesystem::path(session_.log.directory).filename();
  log({"run",
       {{"name", name.string()}, {"model", session_.config.id("model")}, {"parameters", engine_.plan().parameter_count}, {"device", session_.device->traits().name},
        {"precision", session_.config.id("precision")}, {"steps", train.steps}, {"tokens_per_step", train.micro_batch * train.sequence * train.accumulation}}});
  started_ = now();
  while (step_ < train.steps) {
    if (stop_.load() != 0) {
      if (last_saved_ != step_) save();
      return {step_, false};
    }
    train_step();
    if (validation_ && train.eval_every > 0 && step_ % train.eval_every == 0) evaluate();
    if (session_.checkpoint.every > 0 && step_ % session_.checkpoint.every == 0) save();
  }
  if (last_saved_ != step_) save();
  finish();
  return {step_, true};
}

}  // namespace quern
