#pragma once
// Work that keeps a stream busy until the contract says so, rather than for some time: what does not wait for the
// stream is ahead of it, however slow the machine is.

#include <functional>
#include <memory>

#include "quern/device.h"

namespace quern::conformance {

class LateWork {
 public:
  /// Enqueues the work. `longest`: seconds, for calls that should not wait.
  LateWork(Device& device, Stream stream, double longest = 1.5);
  ~LateWork() { end(); }
  LateWork(const LateWork&) = delete;
  LateWork& operator=(const LateWork&) = delete;

  /// Calls what should wait for the stream; the work ends when that has waited for a while.
  void during(const std::function<void()>& wait);
  void end();
  /// Whether it has ended by itself, since a call waited for it.
  bool gave_up() const;

 private:
  struct State;
  std::shared_ptr<State> state_;  // also the work's
};

}  // namespace quern::conformance
