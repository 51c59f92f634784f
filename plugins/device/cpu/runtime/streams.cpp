#include "runtime/streams.h"

#include <csignal>
#include <system_error>
#include <utility>
#include <vector>

#include "quern/error.h"

namespace quern::cpu {

namespace {

const char* name_of(StreamKind kind) {
  switch (kind) {
    case StreamKind::compute: return "compute";
    case StreamKind::copy_in: return "copy_in";
    case StreamKind::copy_out: return "copy_out";
    case StreamKind::communication: return "communication";
  }
  return "?";
}

/// Threads started meanwhile take no signals of the process: these are for the main thread.
class SignalsBlocked {
 public:
  SignalsBlocked() {
    sigset_t all;
    ::sigfillset(&all);
    ::pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  ~SignalsBlocked() { ::pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  SignalsBlocked(const SignalsBlocked&) = delete;
  SignalsBlocked& operator=(const SignalsBlocked&) = delete;

 private:
  sigset_t before_;
};

}  // namespace

Streams::Streams(Mode mode, std::uint64_t seed) : mode_(mode), random_(seed) {
  for (std::size_t i = 0; i < lanes_.size(); ++i) lanes_[i].kind = static_cast<StreamKind>(i);
}

Streams::~Streams() {
  drain();
  {
    const std::lock_guard lock(mutex_);
    ending_ = true;
  }
  for (Lane& lane : lanes_) {
    lane.more.notify_one();
    if (lane.thread.joinable()) lane.thread.join();
  }
}

// ---- handles ----

Stream Streams::stream(StreamKind kind) { return {&lanes_[static_cast<std::size_t>(kind)]}; }

StreamKind Streams::kind(Stream stream) const {
  for (const Lane& lane : lanes_)
    if (&lane == stream.handle) return lane.kind;
  fail_internal("device cpu", "a stream of another device");
}

Streams::Lane& Streams::lane(Stream stream) { return lanes_[static_cast<std::size_t>(kind(stream))]; }

Event Streams::make_event() {
  const std::lock_guard lock(mutex_);
  return {&events_.emplace_back()};
}

// ---- enqueueing ----

void Streams::run(Stream stream, Work work) {
  const std::lock_guard lock(mutex_);
  enqueue(lane(stream), {.kind = Item::Kind::run, .work = std::move(work)});
}

void Streams::record(Event event, Stream stream) {
  const std::lock_guard lock(mutex_);
  auto record = std::make_shared<Record>(Record{.stream = kind(stream)});
  enqueue(lane(stream), {.kind = Item::Kind::record, .record = record});
  *static_cast<Newest*>(event.handle) = std::move(record);
}

void Streams::wait(Stream stream, Event event) {
  const std::lock_guard lock(mutex_);
  Newest record = *static_cast<Newest*>(event.handle);
  if (record && !record->done) enqueue(lane(stream), {.kind = Item::Kind::wait, .record = std::move(record)});
}

void Streams::enqueue(Lane& lane, Item item) {
  if (mode_ == Mode::threads && !lane.thread.joinable()) start(lane);
  lane.items.push_back(std::move(item));
  lane.more.notify_one();
}

void Streams::start(Lane& lane) {
  const SignalsBlocked blocked;
  try {
    lane.thread = std::thread([this, &lane] { serve(lane); });
  } catch (const std::system_error& error) {
    throw Error(ErrorCode::resources, {.where = "device cpu",
                                       .what = std::string("no thread for the stream ") + name_of(lane.kind),
                                       .found = error.what(),
                                       .expected = {},
                                       .next = "raise the limits on processes and memory (ulimit -u, ulimit -v)"});
  }
}

// ---- running ----

void Streams::serve(Lane& lane) {
  Lock lock(mutex_);
  for (;;) {
    lane.more.wait(lock, [&] { return ending_ || !lane.items.empty(); });
    if (lane.items.empty()) return;
    changed_.wait(lock, [&] { return ready(lane); });
    take(lane, lock);
  }
}

bool Streams::ready(const Lane& lane) {
  if (lane.items.empty() || lane.running) return false;
  const Item& first = lane.items.front();
  return first.kind != Item::Kind::wait || first.record->done;
}

void Streams::take(Lane& lane, Lock& lock) {
  Item& item = lane.items.front();
  if (item.kind == Item::Kind::run) {
    const bool dropped = error_ != nullptr;
    std::exception_ptr error;
    lane.running = true;
    lock.unlock();
    try {
      if (!dropped) item.work();
    } catch (...) {
      error = std::current_exception();
    }
    item.work = nullptr;
    lock.lock();
    lane.running = false;
    if (error && !error_) error_ = error;
  } else if (item.kind == Item::Kind::record) {
    item.record->time = Clock::now();
    item.record->done = true;
  }
  const bool recorded = item.kind == Item::Kind::record;
  lane.items.pop_front();
  if (recorded || lane.items.empty()) changed_.notify_all();
}

Streams::Lane* Streams::choose() {
  std::vector<Lane*> able;
  for (Lane& lane : lanes_)
    if (ready(lane)) able.push_back(&lane);
  return able.empty() ? nullptr : able[random_() % able.size()];
}

// ---- the host ----

void Streams::synchronize(Stream stream) {
  std::shared_ptr<Record> end;
  {
    const std::lock_guard lock(mutex_);
    end = std::make_shared<Record>(Record{.stream = kind(stream)});
    if (Lane& at = lane(stream); at.items.empty())
      end->done = true;
    else
      enqueue(at, {.kind = Item::Kind::record, .record = end});
  }
  finish(*end);
}

void Streams::synchronize(Event event) {
  std::shared_ptr<Record> newest;
  {
    const std::lock_guard lock(mutex_);
    newest = *static_cast<Newest*>(event.handle);
  }
  if (!newest) newest = std::make_shared<Record>(Record{.stream = {}, .done = true});
  finish(*newest);
}

/// Returns when `record` is done, or throws what work threw.
void Streams::finish(const Record& record) {
  std::unique_lock<std::recursive_mutex> driving(driving_, std::defer_lock);
  if (mode_ == Mode::shuffled) driving.lock();
  Lock lock(mutex_);
  if (on_own_thread()) fail_internal("device cpu", "work on a stream waits for a stream, which may never come");
  if (mode_ == Mode::threads) changed_.wait(lock, [&] { return record.done; });
  while (!record.done) {
    Lane* next = choose();
    if (next == nullptr) fail_internal("device cpu", "no stream can go on: " + what_is_waited_for());
    take(*next, lock);
  }
  if (error_) std::rethrow_exception(error_);
}

void Streams::drain() noexcept {
  std::unique_lock<std::recursive_mutex> driving(driving_, std::defer_lock);
  if (mode_ == Mode::shuffled) driving.lock();
  Lock lock(mutex_);
  if (on_own_thread()) return;
  if (mode_ == Mode::threads) return changed_.wait(lock, [&] { return idle(); });
  while (Lane* next = choose()) take(*next, lock);
}

bool Streams::idle() const {
  for (const Lane& lane : lanes_)
    if (!lane.items.empty()) return false;
  return true;
}

bool Streams::on_own_thread() const {
  for (const Lane& lane : lanes_)
    if (lane.thread.get_id() == std::this_thread::get_id()) return true;
  return false;
}

std::string Streams::what_is_waited_for() const {
  std::string text;
  for (const Lane& lane : lanes_) {
    if (lane.items.empty()) continue;
    text += (text.empty() ? "" : ", ") + std::string(name_of(lane.kind));
    if (lane.running)
      text += " is at work that waits for a stream";
    else if (const auto& record = lane.items.front().record)
      text += std::string(" waits for a record on ") + name_of(record->stream);
  }
  return text.empty() ? "none has work" : text;
}

double Streams::elapsed(Event from, Event to) const {
  const std::lock_guard lock(mutex_);
  auto time = [](Event event) {
    const Newest& newest = *static_cast<const Newest*>(event.handle);
    if (!newest || !newest->done) fail_internal("device cpu", "elapsed time of an event whose record is not done");
    return newest->time;
  };
  return std::chrono::duration<double, std::milli>(time(to) - time(from)).count();
}

}  // namespace quern::cpu
