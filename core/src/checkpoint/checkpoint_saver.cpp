#include "checkpoint/checkpoint_saver.h"

#include <fcntl.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <map>
#include <sstream>
#include <system_error>
#include <utility>

#include "base/clock.h"
#include "base/files/descriptor.h"
#include "base/shorten.h"
#include "checkpoint/saved_state.h"
#include "quern/error.h"

namespace quern {

namespace {

std::byte* allocate_snapshot(Device& device, std::int64_t bytes) {
  if (bytes == 0) return nullptr;
  try {
    void* memory = device.allocate(MemoryKind::pinned, static_cast<std::size_t>(bytes));
    // Such a device pins nothing: touched, the memory is there, and the first save finds it as fast as later ones.
    if (device.traits().host_addressable) std::memset(memory, 0, static_cast<std::size_t>(bytes));
    return static_cast<std::byte*>(memory);
  } catch (const Error& error) {
    throw Error(error.code(), {.where = "checkpoint.background",
                               .what = std::string("no memory for the copy that is written: ") + error.what(),
                               .found = {},
                               .expected = std::to_string(bytes) + " bytes of pinned host memory",
                               .next = "set checkpoint.background = false"});
  }
}

/// What a rank posts when its file is written.
std::string text_of(std::int64_t step, const FileRecord& file) {
  return std::to_string(step) + " " + std::to_string(file.bytes) + " " + std::to_string(file.checksum);
}

FileRecord record_in(const std::string& text, std::int64_t step) {
  std::istringstream words(text);
  std::int64_t of = -1;
  FileRecord file;
  if (!(words >> of >> file.bytes >> file.checksum) || of != step)
    fail_internal("checkpoint", "a rank wrote " + printable(text) + " instead of step " + std::to_string(step));
  return file;
}

}  // namespace

CheckpointSaver::CheckpointSaver(Device& device, Engine& engine, RunLock* lock, const Retention& retention,
                                 SavingRanks& ranks)
    : device_(device),
      engine_(engine),
      lock_(lock),
      retention_(retention),
      ranks_(ranks),
      state_(own_training_state(engine.plan())),
      snapshot_(allocate_snapshot(device, engine.plan().snapshot_bytes)) {
  std::byte* data = snapshot_;
  for (const StatePart& part : state_) {
    views_.push_back({state_name(part.tensor), {data, part.tensor.dtype, part.extents}});
    if (data) data += views_.back().view.bytes();
  }
}

CheckpointSaver::~CheckpointSaver() {
  if (writing_.valid()) writing_.wait();
  if (snapshot_) device_.release(MemoryKind::pinned, snapshot_);
}

// Rank 0 makes the unfinished directory before the others, which it tells the run's, write into it.
CheckpointSaver::Target CheckpointSaver::open_target(std::int64_t step) {
  std::optional<Target> target;
  const std::string name = ranks_.from_leader([&] {
    const std::string directory = lock_->directory();
    target.emplace(Target{lock_->hold(), nullptr});
    target->run.write([&](const std::string& path) {
      target->made = std::make_unique<NewDirectory>(checkpoint_path(path, step));
      return path;
    });
    return directory;
  });
  if (!target) {
    const OwnedDescriptor directory(::open(name.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
    if (!directory) fail_resources(name, "cannot be opened by this rank", errno);
    target.emplace(Target{HeldDirectory(directory.get(), name), nullptr});
  }
  return std::move(*target);
}

SavedCheckpoint CheckpointSaver::write(Target& target, const CheckpointMeta& meta, const TensorReader& reader) const {
  SavedCheckpoint saved;
  saved.step = meta.step;
  saved.path = target.run.write([&](const std::string& directory) {
    const std::string path = checkpoint_path(directory, meta.step);
    FileRecord own;
    auto write_own = [&](const std::string& folder) { own = write_tensors(folder, ranks_.file(), views_, reader); };
    if (!target.made) {
      in_unfinished(path, [&](const std::string& folder) {
        try {
          write_own(folder);
        } catch (const Error&) {
          std::error_code error;
          if (std::filesystem::exists(folder, error)) throw;
          throw Error(ErrorCode::communication, {.where = folder, .what = "rank 0 has given up this checkpoint"});
        }
      });
      ranks_.post(text_of(meta.step, own));
      return path;
    }
    try {
      target.made->fill(write_own);
    } catch (const Error&) {
      await_from(1);
      throw;
    }
    complete(*target.made, meta, own);
    remove_old_checkpoints(directory, retention_, meta.step);
    return path;
  });
  return saved;
}

// Before the directory goes that they write into.
void CheckpointSaver::await_from(int first) const {
  for (int rank = first; rank < ranks_.file().ranks; ++rank) try {
      ranks_.posted(rank);
    } catch (const Error&) {  // it failed too, or is gone
    }
}

void CheckpointSaver::complete(NewDirectory& made, const CheckpointMeta& meta, const FileRecord& own) const {
  std::vector<FileRecord> files{own};
  for (int rank = 1; rank < ranks_.file().ranks; ++rank) try {
      files.push_back(record_in(ranks_.posted(rank), meta.step));
    } catch (const Error&) {
      await_from(rank + 1);
      throw;
    }
  made.fill([&](const std::string& folder) { write_state(folder, meta, files); });
  made.put_in_place();
}

SavedCheckpoint CheckpointSaver::write_from_device(Target& target, const CheckpointMeta& meta) {
  std::map<std::string, const StatePart*> by_name;
  for (std::size_t i = 0; i < state_.size(); ++i) by_name[views_[i].name] = &state_[i];
  std::vector<std::byte> memory;
  return write(target, meta, [&](const NamedView& view) {
    memory.resize(view.view.bytes());
    engine_.read_part(*by_name.at(view.name), memory.data());
    return memory.data();
  });
}

void CheckpointSaver::save(CheckpointMeta meta) {
  const double begin = now();
  wait();
  failed_ = true;  // unless the end is reached
  auto target = std::make_shared<Target>(open_target(meta.step));
  if (!ranks_.writes()) {
    failed_ = false;
    return;
  }
  if (snapshot_) {
    std::byte* data = snapshot_;
    for (std::size_t i = 0; i < state_.size(); data += views_[i++].view.bytes()) engine_.read_part(state_[i], data);
    auto work = [this, target = std::move(target), meta = std::move(meta), begin, held = now() - begin,
                 hold = ranks_.hold()]() mutable {
      const std::shared_ptr<void> until_written = std::move(hold);
      SavedCheckpoint saved = write(*target, meta, {});
      target.reset();
      saved.held = held;
      saved.seconds = now() - begin;
      return saved;
    };
    try {
      writing_ = std::async(std::launch::async, std::move(work));
    } catch (const std::system_error& error) {
      fail_resources("checkpoint.background", "no thread can be started to write a checkpoint", error.code().value());
    }
  } else {
    saved_.push_back(write_from_device(*target, meta));
    saved_.back().held = saved_.back().seconds = now() - begin;
  }
  failed_ = false;
}

void CheckpointSaver::wait() {
  if (!writing_.valid()) return;
  failed_ = true;
  saved_.push_back(writing_.get());
  failed_ = false;
}

std::vector<SavedCheckpoint> CheckpointSaver::take_saved() {
  if (writing_.valid() && writing_.wait_for(std::chrono::seconds(0)) == std::future_status::ready) wait();
  return std::exchange(saved_, {});
}

}  // namespace quern
