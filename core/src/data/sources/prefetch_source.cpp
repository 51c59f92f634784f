#include "data/sources/prefetch_source.h"

#include <utility>

namespace quern {

PrefetchSource::PrefetchSource(std::unique_ptr<DataSource> inner)
    : inner_(std::move(inner)), vocabulary_(inner_->vocabulary()), epoch_tokens_(inner_->epoch_tokens()) {
  start();
}

PrefetchSource::~PrefetchSource() { stop(); }

void PrefetchSource::start() {
  stopping_ = false;
  thread_ = std::thread([this] { run(); });
}

void PrefetchSource::stop() {
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
}

void PrefetchSource::run() {
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [this] { return stopping_ || ready_ < slots_.size(); });
    if (stopping_) return;
    Slot& slot = slots_[(head_ + ready_) % slots_.size()];  // head_ + ready_ stays as it is when the caller takes one
    lock.unlock();
    slot.error = nullptr;
    try {
      slot.state = inner_->save_state();
      inner_->next(slot.batch);
    } catch (...) {
      slot.error = std::current_exception();
    }
    bool failed = slot.error != nullptr;
    lock.lock();
    ++ready_;
    changed_.notify_all();
    if (failed) return;
  }
}

void PrefetchSource::wait_ready(std::unique_lock<std::mutex>& lock) const {
  changed_.wait(lock, [this] { return ready_ > 0; });
}

void PrefetchSource::next(Batch& batch) {
  std::unique_lock lock(mutex_);
  wait_ready(lock);
  Slot& slot = slots_[head_];
  if (slot.error) std::rethrow_exception(slot.error);
  std::swap(batch, slot.batch);  // the caller's buffers are filled next
  head_ = (head_ + 1) % slots_.size();
  --ready_;
  changed_.notify_all();
}

std::string PrefetchSource::save_state() const {
  std::unique_lock lock(mutex_);
  wait_ready(lock);
  return slots_[head_].state;
}

void PrefetchSource::load_state(const std::string& state) {
  stop();
  try {
    inner_->load_state(state);
    ready_ = 0;
  } catch (...) {
    start();  // a refused position changes nothing: batches read ahead are still next
    throw;
  }
  start();
}

}  // namespace quern
