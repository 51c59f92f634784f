#include "run/starting_point.h"

#include <utility>

#include "base/shorten.h"
#include "checkpoint/changes.h"
#include "checkpoint/saved_state.h"
#include "launch/rendezvous/meeting_point.h"
#include "quern/error.h"
#include "run/ranks/watchdog.h"

namespace quern {

namespace {

Checkpoint checkpoint_to_begin_at(const Session& session) {
  std::vector<std::string> passed_over;
  try {
    return checkpoint_at(session.checkpoint.from, passed_over);
  } catch (const Error& error) {
    ErrorDetail detail = error.detail();
    detail.where = session.config.where("checkpoint", "from") + ": " + detail.where;
    if (error.code() == ErrorCode::input)
      detail.next = "name a checkpoint or a run's directory; train.from takes the weights of a Hugging Face model";
    throw Error(error.code(), std::move(detail));
  }
}

NewestCheckpoint checkpoint_to_resume(const Session& session, StartingPoint& start) {
  const CheckpointOptions& options = session.checkpoint;
  NewestCheckpoint newest = find_newest(session.log.directory);
  start.elsewhere = !newest.checkpoint && newest.skipped.empty();
  if (start.elsewhere && options.from.empty()) return newest;
  if (start.elsewhere)
    newest.checkpoint.emplace(checkpoint_to_begin_at(session));
  else if (!newest.checkpoint)
    fail_without_checkpoint(session.log.directory, newest);
  else if (options.resume == "never")
    throw Error(ErrorCode::config, {.where = session.config.where("checkpoint", "resume"),
                                    .what = "the run directory has checkpoints",
                                    .found = newest.checkpoint->path,
                                    .expected = "a directory without any for resume = \"never\"",
                                    .next = "choose another log.directory, or resume = \"auto\""});
  if (newest.checkpoint->meta.step > session.train.steps)
    throw Error(ErrorCode::config, {.where = session.config.where("train", "steps"),
                                    .what = "the run is past that already",
                                    .found = std::to_string(session.train.steps),
                                    .expected = "at least " + std::to_string(newest.checkpoint->meta.step) +
                                                ", the step of " + newest.checkpoint->path,
                                    .next = "raise it, or choose another log.directory"});
  return newest;
}

/// What rank 0 has found whole.
Checkpoint read_as_follower(const std::string& path) try { return read_checkpoint(path); } catch (const Error& error) {
  ErrorDetail detail = error.detail();
  if (error.code() == ErrorCode::input)
    detail.next = "rank 0 reads it: give all ranks one log.directory, on a file system that their machines share";
  throw Error(error.code(), std::move(detail));
}

// All ranks write into one directory.
void check_shared(const Session& session, const std::string& holder) {
  const std::string& directory = session.log.directory;
  const std::string found = RunLock::holder_in(directory);
  if (found != holder)
    throw Error(ErrorCode::input,
                {.where = session.config.where("log", "directory"),
                 .what = "this rank has another directory of that name than rank 0",
                 .found = found.empty() ? "no " + directory + "/.lock" : "a lock of " + printable(found),
                 .expected = "rank 0's, of process " + printable(holder),
                 .next = "give all ranks one log.directory, on a file system that their machines share"});
}

}  // namespace

StartingPoint find_starting_point(const Session& session, Ranks& ranks) {
  StartingPoint start;
  const std::string holder =
      ranks.from_leader("looking for a checkpoint", [&] { return RunLock::holder_in(session.log.directory); });
  if (!ranks.leads()) check_shared(session, holder);
  const std::string found = ranks.from_leader("looking for a checkpoint", [&] {
    start.removed = remove_leftovers(session.log.directory);
    remove_hang_reports(session.log.directory);
    MeetingPoint::remove_left(session.log.directory);
    check_can_save(session.log.directory);
    start.newest = checkpoint_to_resume(session, start);
    return start.newest.checkpoint ? (start.elsewhere ? "elsewhere " : "own ") + start.newest.checkpoint->path : "";
  });
  if (!ranks.leads() && !found.empty()) {
    start.elsewhere = found.starts_with("elsewhere ");
    const std::string path = found.substr(found.find(' ') + 1);
    ranks.busy("reading a checkpoint", [&] { start.newest.checkpoint = read_as_follower(path); });
  }
  return start;
}

std::vector<std::string> load_checkpoint(const Session& session, Engine& engine, const Checkpoint& checkpoint,
                                         const std::vector<LibraryIdentity>& libraries, Ranks& ranks) {
  std::vector<std::string> changes = config_changes(checkpoint.meta.config, session.config.to_toml());
  std::vector<std::string> notes = load_state(engine, checkpoint, changes, [&] { ranks.together(); });
  for (const std::string& change : library_changes(checkpoint.meta.libraries, libraries)) changes.push_back(change);
  for (const std::string& change : changes) notes.push_back("changed since the checkpoint: " + change);
  // The engine is prepared: loaded choices that could not be kept have been replaced.
  const std::string device = device_changes(checkpoint.meta.device_state, session.device->save_state());
  if (!device.empty())
    notes.push_back("the device computes otherwise than before the checkpoint, so last bits may differ: " + device);
  return notes;
}

FirstWeights::From first_weights_of(const Session& session) {
  return {.model = session.train.from,
          .adapter = session.lora ? session.adapter.from : "",
          .seed = static_cast<std::uint64_t>(session.train.seed)};
}

LoadedWeights load_first_weights(const Session& session, Engine& engine, Ranks& ranks) {
  const FirstWeights weights = first_weights(engine, first_weights_of(session));
  std::string frozen = load_weights(engine, weights, Loaded::all);
  ranks.together();
  engine.refresh();
  return {weights.notes(), std::move(frozen)};
}

LoadedWeights load_frozen_weights(const Session& session, Engine& engine) {
  if (!engine.plan().has_frozen()) return {};
  return {{}, load_weights(engine, first_weights(engine, first_weights_of(session)), Loaded::frozen)};
}

}  // namespace quern
