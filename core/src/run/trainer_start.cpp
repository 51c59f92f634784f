// What a run does before its first step: the trainer's construction, data, weights and log.

#include <filesystem>
#include <limits>
#include <utility>

#include "checkpoint/changes.h"
#include "checkpoint/saved_state.h"
#include "quern/error.h"
#include "run/export_config.h"
#include "run/trainer.h"
#include "run/weights.h"

namespace quern {

namespace {

// Known at the start, so that its faults are not found at the end of a long run.
std::string config_for_export(const Session& session) {
  if (!session.checkpoint.export_model) return {};
  const OptionValue* source = session.config.section("model").find("config");
  std::string config = exported_config(session.model->hf_config(),
                                       {.dtype = *dtype_named(session.checkpoint.export_dtype),
                                        .vocabulary = session.model->traits().vocabulary,
                                        .sources = {source ? std::get<std::string>(*source) : "", session.train.from},
                                        .tokenizer = session.checkpoint.tokenizer});
  HfExport what;
  what.tokenizer_from = session.checkpoint.tokenizer;
  check_export(Session::export_directory(session.log.directory), what);
  return config;
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

// What a crash left goes first. Returns it.
std::vector<std::string> prepare_directory(const std::string& directory) {
  std::vector<std::string> removed = remove_leftovers(directory);
  check_can_save(directory);
  return removed;
}

Device& ready_device(Session& session, const NewestCheckpoint& newest) {
  session.device->open(static_cast<int>(session.device_options.ordinal));
  if (newest.checkpoint) session.device->load_state(newest.checkpoint->meta.device_state);
  return *session.device;
}

Engine ready_engine(Session& session, const NewestCheckpoint& newest, const StartProgress& progress) {
  Device& device = ready_device(session, newest);
  progress("planning");
  Plan plan = make_plan(session.parts(), session.plan_options());
  progress("preparing kernels");
  std::vector<OffloadStore*> stores = session.open_stores(plan);
  return Engine(device, std::move(plan), std::move(stores));
}

}  // namespace

Trainer::Trainer(Session& session, PluginHost& host, RunRequests& requests, StartProgress progress)
    : session_(session),
      host_(host),
      requests_(requests),
      progress_(std::move(progress)),
      lock_(session.log.directory),
      libraries_(libraries_in_use(host)),
      samples_(session),
      guard_(session.guard),
      export_config_(config_for_export(session)),
      removed_(prepare_directory(session.log.directory)),
      newest_(starting_point(session)),
      engine_(ready_engine(session, newest_, progress_)),
      saver_(*session.device, engine_, lock_, {session.checkpoint.keep_last, session.checkpoint.keep_every}),
      ranks_(session.communicator.get(), {.rank = 0, .size = static_cast<int>(session.parallel.ranks), .address = {}},
             *session.device, engine_),
      last_loss_(std::numeric_limits<double>::quiet_NaN()),
      last_validation_(last_loss_) {}

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

std::vector<std::string> Trainer::continue_from(const Checkpoint& checkpoint) {
  std::vector<std::string> changes = config_changes(checkpoint.meta.config, session_.config.to_toml());
  std::vector<std::string> notes = load_state(engine_, checkpoint, changes);
  for (const std::string& change : library_changes(checkpoint.meta.libraries, libraries_)) changes.push_back(change);
  for (const std::string& change : changes) notes.push_back("changed since the checkpoint: " + change);
  // The engine is prepared: what was loaded and could not be kept has been chosen anew.
  const std::string device = device_changes(checkpoint.meta.device_state, session_.device->save_state());
  if (!device.empty())
    notes.push_back("the device computes otherwise than before the checkpoint, so last bits may differ: " + device);
  return notes;
}

void Trainer::load_weights() {
  if (newest_.checkpoint) {
    notes_ = continue_from(*newest_.checkpoint);
    data_->load_state(newest_.checkpoint->meta.data_state);
    step_ = newest_.checkpoint->meta.step;
    updates_ = newest_.checkpoint->meta.updates;
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
  for (const std::string& id : session_.config.ids("log"))
    log_.add(id, host_.create<LogSink>(id, session_.config.factory_values("log", id)),
             {session_.log.directory, resumed_, session_.log.every});
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
  if (session_.log.scales_every > 0) observed_ = observed_tensors(engine_.plan());
  if (session_.log.scales_every > 0 && observed_.empty())
    log({"warning",
         {{"text", "log.scales_every: precision " + session_.config.id("precision") +
                       " quantizes no tensor here, so there is none to log"}}});
  if (!resumed_) return;
  log({"warning", {{"text", "resumed at step " + std::to_string(step_) + " from " + newest_.checkpoint->path}}});
  for (const std::string& note : notes_) log({"warning", {{"text", note}}});
}

void Trainer::start() {
  progress_("opening data");
  open_data();
  progress_("loading weights");
  load_weights();
  progress_({});
  open_sinks();
  newest_ = {};  // closes the checkpoint's file
  ready_ = true;
}

}  // namespace quern
