#pragma once
// This rank's engine, ready to be given weights: its device open, its plan as all ranks have it, kernels prepared
// alike.

#include <memory>
#include <string>

#include "base/phases.h"
#include "engine/engine.h"
#include "quern/run.h"
#include "run/ranks/ranks.h"
#include "run/session.h"

namespace quern {

/// Collective. `device_state` is Device::save_state of an earlier start; empty: kernels are timed anew.
std::unique_ptr<Engine> ready_engine(Session& session, Ranks& ranks, const std::string& device_state,
                                     const StartProgress& progress, Phases& phases);

}  // namespace quern
