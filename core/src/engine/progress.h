#pragma once
// How far a rank's streams are among the collectives of its runs: in words that the streams write themselves, also
// inside a captured graph. So any thread knows it, without a call of the device, which may hang.

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "plan/plan.h"
#include "quern/device.h"

namespace quern {

class Progress {
 public:
  /// How far the stream of collectives is: 2 n + 1 in the collective number n of this rank's life, 2 n + 2 behind it.
  /// All ranks count alike. Wraps around.
  using Number = std::uint32_t;
  static bool inside(Number number) { return number % 2 == 1; }
  static bool earlier(Number a, Number b) { return static_cast<std::int32_t>(a - b) < 0; }

  /// Takes a page of memory and pins it. The schedules are those whose runs begin. Throws a resources error.
  Progress(Device& device, const ScheduleSet& schedules);
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;
  /// Before the device goes: what it wrote last stays readable.
  void detach() noexcept;

  // ---- the thread that enqueues ----
  /// The step under way, from 1; 0: none is.
  void at_step(std::int64_t step);
  /// A run is enqueued now; `stream` is the collectives'.
  void begin(const RunSchedule& schedule, Stream stream) { begin(runs_.at(&schedule), stream); }
  /// A collective that reads a tensor is enqueued now: number 0 of a run of its own.
  void begin_read(Stream stream) { begin(runs_.at(nullptr), stream); }
  /// `stream` comes to the collective with this number in its run, or is behind it.
  void enter(std::size_t collective, Stream stream) const;
  void leave(std::size_t collective, Stream stream) const;
  /// `stream`, which computes, waits for collectives until `resume`.
  void wait(Stream stream) const;
  void resume(Stream stream) const;

  // ---- any thread ----
  Number number() const;
  bool waiting() const;
  /// "step 17: all_gather working.gate_up.weight of layer 3"
  std::string text(Number number) const;
  /// The last enqueued actions, and the collectives of the run that the streams are in; lines.
  std::string report() const;

 private:
  struct Words;
  struct Names {
    std::string run;
    std::vector<std::string> collectives;
  };
  struct Begun {
    std::uint32_t first = 0;  // number of its first collective in this rank's life
    const Names* run = nullptr;
    std::int64_t step = 0;  // that was under way; 0: none
    double when = 0;        // by now()
  };
  void begin(const Names& run, Stream stream);
  /// The last run that began before `collective` was enqueued; null: it is forgotten. Under the mutex.
  const Begun* run_of(std::uint32_t collective) const;
  std::string text_of(const Begun& begun) const;

  Device* device_;
  Words* words_;
  std::map<const RunSchedule*, Names> runs_;  // null: a read
  std::uint32_t first_ = 0;                   // number of the next run's first collective
  mutable std::mutex mutex_;                  // of what follows
  std::deque<Begun> begun_;
  std::int64_t step_ = 0;
};

}  // namespace quern
