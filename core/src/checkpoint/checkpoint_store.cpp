#include "checkpoint/checkpoint_store.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <chrono>
#include <filesystem>
#include <functional>
#include <future>
#include <map>
#include <thread>
#include <utility>

#include "base/blocked_signals.h"
#include "base/files/descriptor.h"
#include "base/shorten.h"
#include "quern/error.h"

namespace quern {

namespace fs = std::filesystem;

namespace {

constexpr std::string_view kStepPrefix = "step-";
constexpr const char* kUnfinished = "unfinished";

/// The run's checkpoint directory as found on disk.
struct Listing {
  std::map<std::int64_t, std::string, std::greater<>> steps;  ///< newest first
  std::vector<std::string> unfinished, strangers;
};

std::optional<std::int64_t> step_of(const std::string& run_directory, const std::string& name) {
  if (!name.starts_with(kStepPrefix)) return std::nullopt;
  std::int64_t step = -1;
  auto [end, error] = std::from_chars(name.data() + kStepPrefix.size(), name.data() + name.size(), step);
  // Only names as checkpoint_path spells them: "step-7" beside "step-00000007" would be two of one step.
  if (error != std::errc() || end != name.data() + name.size() || step < 0) return std::nullopt;
  return fs::path(checkpoint_path(run_directory, step)).filename() == name ? std::optional(step) : std::nullopt;
}

Listing list(const std::string& run_directory) {
  Listing listing;
  std::string directory = fs::path(checkpoint_path(run_directory, 0)).parent_path();
  std::error_code error;
  if (!fs::exists(directory, error)) return listing;
  fs::directory_iterator entries(directory, error);
  if (error) fail_resources(directory, "cannot be read", error.value());
  for (const fs::directory_entry& entry : entries) {
    std::string name = entry.path().filename();
    if (name.starts_with(kTemporaryPrefix))
      listing.unfinished.push_back(entry.path());
    else if (auto step = step_of(run_directory, name))
      listing.steps.emplace(*step, entry.path());
    else
      listing.strangers.push_back(entry.path());
  }
  std::sort(listing.unfinished.begin(), listing.unfinished.end());
  std::sort(listing.strangers.begin(), listing.strangers.end());
  return listing;
}

// Empty: they cannot be read.
std::optional<std::vector<TensorDeclaration>> known_parameters(const std::string& path) {
  try {
    return parameters_in(path);
  } catch (const Error&) {
    return std::nullopt;
  }
}

bool has_all_files(const std::string& path) {
  try {
    check_checkpoint_files(path);
    return true;
  } catch (const Error&) {
    return false;
  }
}

/// What is wrong. The next step is not the error's: it depends on the other checkpoints.
std::string fault_of(const Error& error) {
  ErrorDetail detail = error.detail();
  detail.next.clear();
  return Error(error.code(), std::move(detail)).what();
}

// Renamed first: a crash half-way leaves an unfinished name, not half a checkpoint.
void remove_checkpoint(const fs::path& path) {
  fs::path aside = path.parent_path() / (std::string(kTemporaryPrefix) + path.filename().string() + "-removed");
  remove_tree(aside);
  std::error_code error;
  fs::rename(path, aside, error);
  if (error) fail_resources(path, "old checkpoint cannot be removed", error.value());
  remove_tree(aside);
}

}  // namespace

NewestCheckpoint find_newest(const std::string& run_directory, std::int64_t before) {
  Listing listing = list(run_directory);
  NewestCheckpoint newest;
  newest.strangers = listing.strangers;
  for (const std::string& path : listing.unfinished) newest.skipped.push_back({path, kUnfinished});
  for (const auto& [step, path] : listing.steps) {
    if (step >= before) continue;
    try {
      Checkpoint checkpoint = read_checkpoint(path);
      if (checkpoint.meta.step != step)
        throw Error(ErrorCode::input,
                    {path, "step in state.json", std::to_string(checkpoint.meta.step), std::to_string(step), ""});
      newest.checkpoint.emplace(std::move(checkpoint));
      break;
    } catch (const Error& error) {
      if (error.code() != ErrorCode::input) throw;  // no descriptor to open it: not the checkpoint's fault
      newest.skipped.push_back({path, fault_of(error)});
    }
  }
  return newest;
}

Checkpoint checkpoint_at(const std::string& path, std::vector<std::string>& notes) {
  std::error_code error;
  if (fs::exists(fs::path(path) / "state.json", error)) return read_checkpoint(path);
  if (!fs::is_directory(path, error))
    throw Error(ErrorCode::input, {.where = path,
                                   .what = "no checkpoint there, for there is no such directory",
                                   .next = "train first, or correct the path"});
  NewestCheckpoint newest = find_newest(path);
  for (const SkippedCheckpoint& skipped : newest.skipped)
    if (newest.checkpoint) notes.push_back("passed over " + skipped.path + ": " + skipped.reason);
  if (newest.checkpoint) return std::move(*newest.checkpoint);
  fail_without_checkpoint(path, newest);
}

void fail_without_checkpoint(const std::string& path, const NewestCheckpoint& newest) {
  const auto damaged = std::find_if(newest.skipped.begin(), newest.skipped.end(),
                                    [](const SkippedCheckpoint& skipped) { return skipped.reason != kUnfinished; });
  if (damaged != newest.skipped.end())
    throw Error(ErrorCode::input, {.where = damaged->path,
                                   .what = "no checkpoint of the run is whole: " + damaged->reason,
                                   .next = "move the run directory away to start a new run"});
  if (!newest.skipped.empty())
    throw Error(ErrorCode::input, {.where = newest.skipped[0].path,
                                   .what = "the run's first checkpoint is not finished",
                                   .next = "if no process writes it, train again: the run begins at step 0"});
  const fs::path name = fs::path(path).lexically_normal();
  const std::string last = (name.has_filename() ? name : name.parent_path()).filename();
  if (last == "checkpoints" || last.starts_with(kStepPrefix))
    throw Error(ErrorCode::input, {.where = path,
                                   .what = last == "checkpoints" ? "no checkpoint, but a place for them"
                                                                 : "state.json is missing, so it is not whole",
                                   .next = "name the run's directory, for its newest checkpoint that is whole"});
  throw Error(ErrorCode::input,
              {.where = path, .what = "no checkpoint there", .next = "train first, or name another directory"});
}

std::string how_to_continue(const std::string& run_directory, const std::string& resume) {
  constexpr std::chrono::seconds kPatience{2};  // with a directory that hangs
  std::packaged_task<std::string()> look([=] {
    for (const auto& [step, path] : list(run_directory).steps)
      if (has_all_files(path))
        return "step " + std::to_string(step) + " is saved, and " +
               (resume == "never" ? "checkpoint.resume = \"auto\"" : "the same command") + " continues from there";
    return "no step is saved in " + run_directory + ", and the same command starts again";
  });
  std::future<std::string> found = look.get_future();
  const BlockedSignals none;
  std::thread(std::move(look)).detach();
  if (found.wait_for(kPatience) == std::future_status::ready) try {
      return found.get();
    } catch (const Error&) {  // it cannot be read
    }
  return "the same command continues from the newest checkpoint";
}

std::vector<std::string> remove_old_checkpoints(const std::string& run_directory, const Retention& retention,
                                                std::int64_t newest_step) {
  std::vector<std::string> removed;
  if (retention.keep_last <= 0) return removed;
  const auto parameters = known_parameters(checkpoint_path(run_directory, newest_step));
  if (!parameters) return removed;
  std::int64_t kept = 0;
  for (const auto& [step, path] : list(run_directory).steps) {
    bool major = retention.keep_every > 0 && step % retention.keep_every == 0;
    if (step > newest_step || (kept >= retention.keep_last && major) || known_parameters(path) != parameters) continue;
    if (kept < retention.keep_last) {
      kept += step == newest_step || has_all_files(path);
    } else {
      remove_checkpoint(path);
      removed.push_back(path);
    }
  }
  return removed;
}

void check_can_save(const std::string& run_directory) {
  const fs::path checkpoints = fs::path(checkpoint_path(run_directory, 0)).parent_path();
  std::error_code error;
  const bool fresh = !fs::exists(fs::symlink_status(checkpoints, error));
  check_writable(run_directory);
  check_writable(checkpoints);
  if (fresh) fs::remove(checkpoints, error);  // a run that is refused later leaves none
}

std::vector<std::string> remove_leftovers(const std::string& run_directory) {
  std::vector<std::string> leftovers = list(run_directory).unfinished;
  std::error_code error;
  const std::string exports = std::string(kTemporaryPrefix) + "export";  // and "-old": nothing else of ours is there
  for (const fs::directory_entry& entry : fs::directory_iterator(run_directory, error))
    if (std::string name = entry.path().filename(); name == exports || name == exports + "-old")
      leftovers.push_back(entry.path());
  std::erase_if(leftovers, [](const std::string& path) { return restore_replaced(path); });
  for (const std::string& path : leftovers) remove_tree(path);
  return leftovers;
}

RunLock::RunLock(std::string directory, std::string advice) : asked_(std::move(directory)), advice_(std::move(advice)) {
  take();
}

RunLock::~RunLock() { release(); }

void RunLock::release() {
  for (int* file : {&file_, &folder_})
    if (*file >= 0) ::close(std::exchange(*file, -1));
}

// Both: the file can be removed, and network file systems lock directories on one machine only.
void RunLock::take() {
  release();
  make_directories(asked_);
  const std::string path = asked_ + "/.lock";
  try {
    folder_ = ::open(asked_.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (folder_ < 0) fail_resources(asked_, "cannot be opened", errno);
    const bool taken = lock_alone(folder_) == EWOULDBLOCK;
    file_ = ::open(path.c_str(), O_RDWR | O_CREAT | O_NOFOLLOW | O_CLOEXEC, 0644);
    if (file_ < 0) fail_resources(path, "cannot be opened", errno);
    if (const int reason = taken ? EWOULDBLOCK : lock_alone(file_)) refuse(reason);
    const std::string holder = std::to_string(::getpid());  // for the message of others
    if (::ftruncate(file_, 0) != 0 || ::pwrite(file_, holder.data(), holder.size(), 0) < 0)
      fail_resources(path, "cannot be written", errno);
  } catch (...) {
    release();
    throw;
  }
}

std::string RunLock::holder_in(const std::string& directory) {
  char holder[32] = {};
  const OwnedDescriptor file(::open((directory + "/.lock").c_str(), O_RDONLY | O_NOFOLLOW | O_CLOEXEC));
  if (file) static_cast<void>(::pread(file.get(), holder, sizeof holder - 1, 0));
  return holder;
}

void RunLock::refuse(int reason) const {
  if (reason != EWOULDBLOCK) fail_resources(asked_ + "/.lock", "cannot be locked", reason);
  char holder[32] = {};
  const ssize_t length = ::pread(file_, holder, sizeof holder - 1, 0);
  const bool own = holder == std::to_string(::getpid());
  throw Error(ErrorCode::resources,
              {asked_, "another run writes into this directory", length > 0 ? "process " + printable(holder) : "", "",
               own ? "close the run that this process has there, or " + advice_ : advice_});
}

std::string RunLock::directory() {
  struct stat held {
  }, named{};
  auto is_held = [&](const std::string& path) {
    return ::stat(path.c_str(), &named) == 0 && named.st_dev == held.st_dev && named.st_ino == held.st_ino;
  };
  if (folder_ >= 0) {
    if (::fstat(folder_, &held) != 0 || is_held(asked_)) return asked_;
    std::error_code error;
    const std::string moved = fs::read_symlink("/proc/self/fd/" + std::to_string(folder_), error);
    if (!error && is_held(moved)) return moved;
  }
  take();
  return asked_;
}

HeldDirectory RunLock::hold() {
  const std::string name = directory();
  return {folder_, name};
}

}  // namespace quern
