#pragma once
// This process among the ranks of a run: what the trainer asks of the communicator that [parallel] selects, and nothing
// where there is none.

#include <cstdint>
#include <string>

#include "engine/engine.h"
#include "quern/communicator.h"

namespace quern {

class Ranks {
 public:
  /// Meets the other ranks and makes the engine's memory known to them; collective. `communicator` may be null, for one
  /// rank; it, `device` and `engine` outlive this. Throws a communication error when the communicator made another
  /// group than it was asked for.
  Ranks(Communicator* communicator, const Rendezvous& rendezvous, Device& device, Engine& engine);
  /// Lets the other ranks go when an exception ends the run.
  ~Ranks();
  Ranks(const Ranks&) = delete;
  Ranks& operator=(const Ranks&) = delete;

  /// Sums gradients and loss statistics over all ranks: after the step's last micro-batch, before its update. Enqueued.
  void reduce();
  /// Throws a communication error when a collective has failed; `where` says when: "step 12". To be asked while the
  /// host waits for the device too, once there is a communicator whose collectives can hang.
  void check(const std::string& where);

 private:
  Communicator* communicator_;
  Engine& engine_;
  int unwinding_;  // exceptions on their way when this was made
};

}  // namespace quern
