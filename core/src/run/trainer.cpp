#include "run/trainer.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <filesystem>
#include <string>
#include <utility>

#include "base/clock.h"
#include "base/format.h"
#include "checkpoint/changes.h"
#include "data/sources/turns_source.h"
#include "launch/starter_link.h"
#include "plan/time/step_time.h"
#include "quern/error.h"
#include "run/ready_engine.h"

namespace quern {

namespace {

constexpr std::size_t kMostNames = 4096;  // of a step's data

std::optional<RunLock> lock_of_rank_0(const Session& session) {
  if (rank_place().value_or(RankPlace{}).rank > 0) return std::nullopt;
  return std::optional<RunLock>(std::in_place, session.log.directory);
}

std::vector<LibraryIdentity> libraries_of(const Session& session, const PluginHost& host) {
  std::vector<LibraryIdentity> libraries = libraries_in_use(host);
  if (session.communicator && !session.communicator->traits().sums_by.empty())
    libraries.push_back({"sums between ranks", session.communicator->traits().sums_by});
  return libraries;
}

/// Ranks that compute otherwise than rank 0 are found before anything is written.
StartingPoint start_of_alike(const Session& session, Ranks& ranks, const std::vector<LibraryIdentity>& libraries) {
  std::string text;
  for (const LibraryIdentity& library : libraries)
    text += library.name + " " + library.version + " " + library.hash + "\n";
  ranks.need_same("build", text);
  ranks.need_same("config", session.config.to_toml());
  return find_starting_point(session, ranks);
}

/// The state with which `step` begins.
StepState device_state(const RunState& state, const Step& step) {
  const auto seed = static_cast<std::uint64_t>(state.session.train.seed);
  StepState first;
  first.step = static_cast<std::uint32_t>(state.step);
  first.seed_low = static_cast<std::uint32_t>(seed);
  first.seed_high = static_cast<std::uint32_t>(seed >> 32);
  first.learning_rate = step.learning_rate;
  first.clip_norm = static_cast<float>(state.session.optimizer_options.clip_norm);
  first.updates = static_cast<std::uint32_t>(state.updates);
  first.average = static_cast<float>(state.averaged.share(step.learning_rate));
  return first;
}

}  // namespace

std::string Step::data() const { return format_list(names); }

Trainer::Trainer(Session& session, PluginHost& host, RunRequests& requests, StartProgress progress)
    : session_((session.set_steps_of_epochs(), session)),
      host_(host),
      requests_(requests),
      progress_([this, progress = std::move(progress)](std::string_view phase) {
        ranks_.be_busy(std::string(phase));
        progress(phase);
      }),
      lock_(lock_of_rank_0(session)),
      ranks_(session),
      libraries_(ranks_.telling([&] { return libraries_of(session, host); })),
      samples_(session),
      guard_(session.guard),
      export_(session.checkpoint.export_model
                  ? std::optional(ModelExport(session, Session::export_directory(session.log.directory)))
                  : std::nullopt),
      start_(ranks_.telling([&] { return start_of_alike(session, ranks_, libraries_); })),
      ready_engine_(ranks_.telling([&] {
        const auto& checkpoint = start_.newest.checkpoint;
        return ready_engine(session, ranks_, checkpoint ? checkpoint->meta.device_state : std::string(), progress_,
                            start_log_.phases);
      })),
      engine_(*ready_engine_),
      state_{.session = session,
             .engine = engine_,
             .ranks = ranks_,
             .log = log_,
             .stopping = [this] { return stopping(); },
             .interrupted = [this] { return interrupted(); }},
      spikes_(session.guard),
      checkpoints_(session, engine_, ranks_, lock_, libraries_, evaluation_),
      hooks_{&start_log_, &scale_log_,    &guard_,   &step_log_,   &telemetry_log_,
             &spikes_,    &same_weights_, &samples_, &evaluation_, &checkpoints_} {
  if (session.communicator) ranks_.telling([&] { ranks_.join(*session.communicator, *session.device, engine_); });
}

// ---- before the first step ----

void Trainer::open_data() {
  data_ = session_.open_training_data(ranks_.rank());
  std::unique_ptr<DataSource> validation;
  if (session_.dataset->has(Split::validation)) validation = session_.open_data(Split::validation);
  session_.check_vocabulary(*data_);
  if (validation) session_.check_vocabulary(*validation);
  evaluation_.open(std::move(validation));
  state_.data = data_.get();
}

// Older checkpoints do not have it; then a batch that changed since is not known of.
std::int64_t Trainer::tokens_of(const CheckpointMeta& meta) const {
  return meta.tokens.value_or(meta.step * session_.tokens_per_step());
}

void Trainer::load_weights() {
  const bool begins = !start_.newest.checkpoint;
  LoadedWeights loaded =
      begins ? load_first_weights(session_, engine_, ranks_) : load_frozen_weights(session_, engine_);
  // Among the libraries, whose changes since a checkpoint are noted.
  if (!loaded.frozen.empty()) libraries_.push_back({"frozen weights", "loaded", loaded.frozen});
  if (begins) {
    notes_ = std::move(loaded.notes);
    return;
  }
  const Checkpoint& checkpoint = *start_.newest.checkpoint;
  notes_ = load_checkpoint(session_, engine_, checkpoint, libraries_, ranks_);
  const bool restart = start_.elsewhere && session_.checkpoint.from_data == "restart";
  if (!restart) data_->load_state(checkpoint.meta.data_state);
  if (restart) notes_.emplace_back("the data begin anew, by checkpoint.from_data");
  state_.stand_at(checkpoint.meta.step, tokens_of(checkpoint.meta));
  state_.updates = checkpoint.meta.updates;
  state_.averaged = checkpoint.meta.averaged;
  if (!checkpoint.meta.evaluated) evaluation_.make_up_for(state_.step);
  if (!start_.elsewhere) checkpoints_.begin_at(state_.step);
}

// Last of the start, so that a run that cannot start leaves the log of an earlier one alone.
void Trainer::open_sinks() {
  const NewestCheckpoint& newest = start_.newest;
  for (const std::string& id : ranks_.leads() ? session_.config.ids("log") : std::vector<std::string>{})
    log_.add(id, host_.create<LogSink>(id, session_.config.factory_values("log", id)),
             {session_.log.directory, newest.checkpoint && !start_.elsewhere, session_.log.every});
  std::filesystem::path directory = std::filesystem::path(session_.log.directory).lexically_normal();
  if (!directory.has_filename()) directory = directory.parent_path();  // "runs/a/" names a
  LogEvent run{"run",
               {{"name", directory.filename().string()},
                {"model", session_.config.id("model")},
                {"parameters", engine_.plan().parameter_count},
                {"device", session_.device->traits().name},
                {"precision", session_.config.id("precision")},
                {"step", state_.step},
                {"steps", session_.train.steps},
                {"tokens_per_step", session_.tokens_per_step()},
                {"device_bytes", engine_.plan().device_bytes},
                {"quern", QUERN_VERSION},
                {"config", session_.config.to_toml()}}};
  const StepTime planned =
      simulated_step(engine_.plan(), session_.device->traits(), engine_.plan().options.accumulation);
  run.fields.emplace_back("planned_seconds", planned.total);
  for (const auto& [owner, seconds] : planned.unhidden) {
    std::string name(name_of(owner));
    std::replace(name.begin(), name.end(), ' ', '_');
    run.fields.emplace_back("planned_wait_" + name, seconds);
  }
  log_.write(run);
  for (const std::string& warning : session_.device->traits().warnings) log_.warn(warning);
  if (session_.communicator)
    for (const std::string& warning : session_.communicator->traits().warnings) log_.warn(warning);
  for (const std::string& path : start_.removed) log_.warn("removed " + path + ", left unfinished by an earlier run");
  for (const SkippedCheckpoint& skipped : newest.skipped)
    log_.warn("passed over " + skipped.path + ": " + skipped.reason);
  for (const std::string& path : newest.strangers) log_.warn("not touched: " + path + ", which is not a checkpoint");
  scale_log_.open(state_);
  if (newest.checkpoint)
    log_.warn("resumed at step " + std::to_string(state_.step) + " from " + newest.checkpoint->path);
  if (state_.step >= session_.train.steps)
    log_.warn("all " + std::to_string(state_.step) +
              " steps are done; raise train.steps to train on, or choose another log.directory for a new run");
  for (const std::string& note : notes_) log_.warn(note);
  for (const std::string& note : session_.notes) log_.warn(note);
  if (export_)
    for (const std::string& note : export_->notes()) log_.warn(note);
  if (const std::string whole = engine_.plan().whole_on_ranks(); !whole.empty())
    log_.warn("parallel.shard_optimizer: every rank has the whole of " + whole);
  for (const std::string& slow : slow_texts(planned)) log_.warn("slow: " + slow);
}

void Trainer::start() {
  ranks_.telling([this] { prepare(); });
  ready_ = true;
}

void Trainer::prepare() {
  progress_("opening data");
  start_log_.phases.enter("data");
  open_data();
  progress_(start_.newest.checkpoint ? "reading a checkpoint" : "loading weights");
  start_log_.phases.enter("weights");
  load_weights();
  start_log_.phases.leave();
  progress_({});
  open_sinks();
  start_ = {};  // closes the checkpoint's file
  ranks_.together();
}

// ---- steps ----

bool Trainer::run_micro_steps(Step& step) {
  auto turns = [&](int rank) { return turns_of(rank, ranks_.size(), session_.turn(), session_.train.accumulation); };
  const std::vector<std::int64_t> own = turns(ranks_.rank());
  const std::size_t count = engine_.plan().shards_micro_steps() ? turns(0).size() : own.size();
  StepState state = device_state(state_, step);
  Batch batch;
  for (std::size_t i = 0; i < count; ++i) {
    if (i > 0 && stopping()) return false;  // a step may take hours
    if (i < own.size()) {
      data_->next(batch);
      if (step.names.size() < kMostNames) step.names.insert(step.names.end(), batch.names.begin(), batch.names.end());
      state.micro_step = static_cast<std::uint32_t>(own[i]);
    } else {  // the last one again, for nothing: the other ranks need this one's shards
      batch.discount(0, engine_.plan().options.geometry);
    }
    engine_.micro_step(batch, state, {.first = i == 0, .last = i + 1 == count},
                       i < own.size() ? step.observe : Observe::no);
  }
  return true;
}

RunPosition Trainer::position() const {
  return {.step = state_.step,
          .tokens = state_.tokens,
          .loss = step_log_.last_loss(),
          .gradient_norm = step_log_.last_gradient_norm(),
          .learning_rate = step_log_.last_learning_rate(),
          .seconds = step_log_.last_seconds(),
          .validation_loss = evaluation_.last_loss()};
}

double Trainer::learning_rate() const {
  if (learning_rate_) return *learning_rate_;
  return session_.optimizer_options.learning_rate * session_.schedule->factor(state_.step, session_.train.steps);
}

bool Trainer::train_step() {
  Step step{.number = state_.step + 1, .begin = now()};
  step.learning_rate = static_cast<float>(learning_rate());
  for (Hook* hook : hooks_) hook->before_step(state_, step);
  state_.data_before_step = data_->save_state();
  if (!run_micro_steps(step)) {
    guard_.abandon_step(engine_);
    return false;
  }
  for (Hook* hook : hooks_) hook->before_update(state_, step);
  state_.is_whole = false;
  engine_.update();
  for (Hook* hook : hooks_) hook->while_updating(state_, step);
  step.result = engine_.result();
  step.end = now();
  ranks_.check("step " + std::to_string(step.number));
  const std::int64_t tokens = state_.tokens + session_.tokens_per_step();
  if (step.finite()) state_.stand_at(step.number, tokens);
  if (step.result.update.apply != 0) ++state_.updates, state_.averaged.add(step.learning_rate);
  Verdict verdict = Verdict::go_on;
  for (std::size_t i = 0; i < hooks_.size() && verdict == Verdict::go_on; ++i)
    verdict = hooks_[i]->after_step(state_, step);
  if (verdict == Verdict::stop) throw guard_.error(step);
  if (verdict == Verdict::roll_back) roll_back();
  if (verdict == Verdict::skip) {
    guard_.abandon_step(engine_);
    state_.stand_at(step.number, tokens);
  }
  return verdict != Verdict::roll_back;
}

// Goes on with the data after the step that failed: those since the checkpoint led there, and would again. Resumed
// before the next checkpoint, a run gets there and does the same once more.
void Trainer::roll_back() {
  const Checkpoint checkpoint = checkpoints_.to_roll_back_to(state_);
  load_checkpoint(session_, engine_, checkpoint, libraries_, ranks_);  // what differs was said at the start
  state_.stand_at(checkpoint.meta.step, tokens_of(checkpoint.meta));
  state_.updates = checkpoint.meta.updates;
  state_.averaged = checkpoint.meta.averaged;
  for (Hook* hook : hooks_) hook->rolled_back(state_);
  log_.warn("rolled back to step " + std::to_string(state_.step) + ", " + checkpoint.path);
}

// All that ranks have to agree on is asked here and in stopping(): whether to save, and whether to stop. A signal that
// stops one of them then stops all.
bool Trainer::interrupted() {
  constexpr std::uint32_t kSave = 1, kStop = 1U << 31;  // between them: signals that stop, by number
  const int stop = requests_.stop.load();
  const std::uint32_t signal = stop > 0 && stop < 31 ? 1U << stop : 0;
  const std::uint32_t asked =
      ranks_.any((requests_.save.exchange(false) ? kSave : 0) | (stop != 0 ? kStop : 0) | signal);
  agreed_to_stop_ = (asked & kStop) != 0;
  if (const std::uint32_t signals = asked & ~(kSave | kStop)) requests_.stop = std::countr_zero(signals);
  if ((asked & kSave) != 0 && state_.step > 0 && !checkpoints_.has(state_)) checkpoints_.save(state_);
  return stopping();
}

void Trainer::begin() {
  step_log_.begin(state_);
  evaluation_.begin(state_);
  if (guard_.policy() == Verdict::roll_back && !checkpoints_.has(state_))
    checkpoints_.save(state_);  // somewhere to go back to
}

bool Trainer::advance() {
  if (state_.step >= session_.train.steps || interrupted()) return false;
  const bool forward = train_step();
  checkpoints_.log_saved(state_);
  if (forward)
    for (Hook* hook : hooks_) hook->between_steps(state_);
  return true;
}

bool Trainer::step() {
  bool moved = false;
  guarded([&] { moved = advance(); });
  return moved;
}

void Trainer::save() {
  guarded([&] {
    if (!checkpoints_.has(state_)) checkpoints_.save(state_);
    checkpoints_.finish(state_);
  });
}

// ---- the end ----

// False: stopped before there was an export.
bool Trainer::finish() {
  const double elapsed = step_log_.elapsed();
  evaluation_.finish(state_);
  if (interrupted()) return false;
  std::string exported;
  if (export_)
    lead("exporting the model", [&] {
      exported = lock_->hold().write([&](const std::string& directory) {
        const std::string to = Session::export_directory(directory);
        if (session_.lora) export_->write_adapter(master_reader(engine_), Session::adapter_directory(directory));
        if (session_.lora && !session_.adapter.merge) return Session::adapter_directory(directory);
        export_->write(engine_, to);
        return to;
      });
    });
  LogEvent end{"end", {{"step", state_.step}, {"tokens", state_.tokens}}};
  if (!std::isnan(step_log_.last_loss())) end.fields.emplace_back("loss", step_log_.last_loss());
  if (!std::isnan(evaluation_.last_loss())) end.fields.emplace_back("val_loss", evaluation_.last_loss());
  end.fields.emplace_back("time", elapsed);
  if (const double rate = step_log_.tokens_per_second(state_); rate > 0)
    end.fields.emplace_back("tokens_per_second", rate);
  if (!exported.empty()) end.fields.emplace_back("export", exported);
  checkpoints_.finish(state_);
  log_.write(end);
  return true;
}

// Whether all steps done are saved. Not tried after a failed save, nor where the update of a step or communication
// between ranks failed: the state is then not a step's; nor where there are other ranks, which do not save now. A
// write that is under way is awaited. Only rank 0 knows what is saved.
bool Trainer::save_before_failing(bool communicating) {
  std::string failure;
  bool saved = false;
  try {
    checkpoints_.wait();
    if (state_.step > 0 && !checkpoints_.has(state_) && state_.is_whole && engine_.whole() && !communicating &&
        !checkpoints_.failed()) {
      if (!state_.data_before_step.empty()) guard_.abandon_step(engine_);
      checkpoints_.start_saving(state_);
      checkpoints_.wait();
    }
    saved = ranks_.leads() && state_.step > 0 && checkpoints_.has(state_) && !checkpoints_.failed();
  } catch (const std::exception& error) {
    failure = error.what();
  }
  if (!failure.empty()) log_.warn(failure);
  checkpoints_.log_saved(state_);
  log_.end();
  return saved;
}

void Trainer::guarded(const std::function<void()>& work) {
  if (!ready_) start();
  try {
    if (!begun_) tell_starter_of_training();
    if (!std::exchange(begun_, true)) begin();
    work();
  } catch (const Error& error) {
    ranks_.fail(error.what());
    const bool alone = ranks_.size() == 1;
    const bool saved = save_before_failing(error.code() == ErrorCode::communication || !alone);
    const bool kept = saved || checkpoints_.failed();  // the newest step, or an older checkpoint
    if (alone ? !kept || starter_of_this_rank() != 0
              : error.code() == ErrorCode::numerics || !ranks_.says_how_to_continue())
      throw;
    ErrorDetail detail = error.detail();
    detail.next.append(detail.next.empty() ? "" : "; ")
        .append(how_to_continue(saved ? lock_->directory() : session_.log.directory, session_.checkpoint.resume));
    throw Error(error.code(), std::move(detail));
  } catch (...) {
    ranks_.fail("ended with an error");
    save_before_failing(ranks_.size() > 1);
    throw;
  }
}

RunResult Trainer::run() {
  bool finished = false;
  guarded([&] {
    while (!stopping() && advance()) {
    }
    if (session_.checkpoint.at_end && !checkpoints_.has(state_) && !stopping()) checkpoints_.save(state_);
    finished = !stopping() && finish();
    // A stop. What this process started from is saved already.
    if (!finished && state_.step > 0 && !checkpoints_.has(state_)) checkpoints_.save(state_);
    checkpoints_.finish(state_);
    ranks_.leave(engine_);
  });
  return {state_.step, finished, log_.end()};
}

}  // namespace quern
