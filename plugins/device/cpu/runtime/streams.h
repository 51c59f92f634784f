#pragma once
// The CPU device's streams and events. Work is enqueued and runs later, in order within a stream, on a thread of the
// stream's own. A mode for tests has no threads: it runs ready work in a random order, so that a run whose waits do
// not suffice is found out.

#include <array>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>

#include "quern/device.h"

namespace quern::cpu {

/// All members may be called by several threads. Work that throws ends all work: enqueued work is dropped from then
/// on, records are done in their turn, and each synchronize throws that exception.
class Streams {
 public:
  enum class Mode : std::uint8_t {
    threads,   ///< a thread a stream, started by its first work
    shuffled,  ///< nothing runs until somebody synchronizes, then on that thread, one piece of work after another
  };
  using Work = std::function<void()>;

  /// `seed` gives the order of the shuffled mode, which is the same for the same calls.
  Streams(Mode mode, std::uint64_t seed);
  /// Finishes all work; an exception in it is dropped.
  ~Streams();
  Streams(const Streams&) = delete;
  Streams& operator=(const Streams&) = delete;

  Stream stream(StreamKind kind);
  /// An internal error where `stream` is none of these.
  StreamKind kind(Stream stream) const;
  Event make_event();

  // ---- enqueued; a thread that cannot be started is a resources error ----
  /// `work` must not synchronize. It is destroyed once it has run or was dropped.
  void run(Stream stream, Work work);
  void record(Event event, Stream stream);
  /// For the newest record of `event` enqueued so far; for none where there is none.
  void wait(Stream stream, Event event);

  // ---- the host ----
  /// Blocks until what `stream` has now is done.
  void synchronize(Stream stream);
  /// Blocks until the newest record of `event` is done; in shuffled mode no work runs after that.
  void synchronize(Event event);
  /// Blocks until no stream has work, and throws nothing. Called by work it does not block.
  void drain() noexcept;
  /// Milliseconds between the moments at which the newest records ran; an internal error where one did not.
  double elapsed(Event from, Event to) const;

 private:
  using Clock = std::chrono::steady_clock;
  using Lock = std::unique_lock<std::mutex>;

  struct Record {
    StreamKind stream;
    bool done = false;
    Clock::time_point time{};
  };
  struct Item {
    enum class Kind : std::uint8_t { run, record, wait } kind;
    Work work = {};
    std::shared_ptr<Record> record = {};
  };
  struct Lane {
    StreamKind kind{};
    std::deque<Item> items{};  // the first stays here while it runs
    bool running = false;
    std::condition_variable more{};
    std::thread thread{};
  };
  using Newest = std::shared_ptr<Record>;  // what the handle of an event points to

  Lane& lane(Stream stream);
  void enqueue(Lane& lane, Item item);
  void start(Lane& lane);
  void serve(Lane& lane);
  static bool ready(const Lane& lane);
  void take(Lane& lane, Lock& lock);
  Lane* choose();
  void finish(const Record& record);
  bool idle() const;
  bool on_own_thread() const;
  std::string what_is_waited_for() const;

  const Mode mode_;
  mutable std::mutex mutex_;         // of all below
  std::recursive_mutex driving_;     // shuffled: held by who runs work, taken before mutex_
  std::condition_variable changed_;  // a record is done, or a stream has no more work
  std::array<Lane, 4> lanes_;        // by StreamKind
  std::deque<Newest> events_;        // a deque keeps handles to its elements valid as it grows
  std::exception_ptr error_;         // the first
  std::mt19937_64 random_;
  bool ending_ = false;
};

}  // namespace quern::cpu
