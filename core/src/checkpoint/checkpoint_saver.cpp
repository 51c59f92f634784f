#include "checkpoint/checkpoint_saver.h"

#include <cstring>
#include <map>
#include <system_error>
#include <utility>

#include "base/clock.h"
#include "base/files/durable_file.h"
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

}  // namespace

CheckpointSaver::CheckpointSaver(Device& device, Engine& engine, RunLock& lock, const Retention& retention, Hold hold)
    : device_(device),
      engine_(engine),
      lock_(lock),
      retention_(retention),
      hold_(std::move(hold)),
      state_(training_state(engine.plan())),
      snapshot_(allocate_snapshot(device, engine.plan().snapshot_bytes)) {
  std::byte* data = snapshot_;
  for (const PlannedTensor& tensor : state_) {
    views_.push_back({state_name(tensor), {data, tensor.dtype, tensor.whole_extents()}});
    if (data) data += views_.back().view.bytes();
  }
}

CheckpointSaver::~CheckpointSaver() {
  if (writing_.valid()) writing_.wait();
  if (snapshot_) device_.release(MemoryKind::pinned, snapshot_);
}

SavedCheckpoint CheckpointSaver::write(const HeldDirectory& run, const CheckpointMeta& meta,
                                       const TensorReader& reader) const {
  SavedCheckpoint saved;
  saved.step = meta.step;
  saved.path = run.write([&](const std::string& directory) {
    const std::string path = write_checkpoint(directory, meta, views_, reader);
    remove_old_checkpoints(directory, retention_, meta.step);
    return path;
  });
  return saved;
}

SavedCheckpoint CheckpointSaver::write_from_device(const HeldDirectory& run, const CheckpointMeta& meta) {
  std::map<std::string, const PlannedTensor*> by_name;
  for (std::size_t i = 0; i < state_.size(); ++i) by_name[views_[i].name] = &state_[i];
  std::vector<std::byte> memory;
  return write(run, meta, [&](const NamedView& view) {
    memory.resize(view.view.bytes());
    engine_.read(*by_name.at(view.name), memory.data());
    return memory.data();
  });
}

void CheckpointSaver::save(CheckpointMeta meta) {
  const double begin = now();
  wait();
  failed_ = true;  // unless the end is reached
  HeldDirectory run = lock_.hold();
  if (snapshot_) {
    engine_.read(state_, snapshot_);
    auto work = [this, run = std::move(run), meta = std::move(meta), begin, held = now() - begin,
                 hold = hold_()]() mutable {
      const std::shared_ptr<void> until_written = std::move(hold);
      SavedCheckpoint saved = write(run, meta, {});
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
    saved_.push_back(write_from_device(run, meta));
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
