#pragma once
// Time of ops and programs from the ops' own costs and the device's rates: the larger of arithmetic and memory time. An
// estimate for choosing and for `quern plan`; `quern bench` measures.

#include "quern/device.h"
#include "quern/op_spec.h"

namespace quern {

double cost_seconds(const Cost& cost, const DeviceTraits& device);

/// Op by op, without those that only observe.
double program_seconds(const Program& program, const OpSet& ops, const Geometry& geometry, const DeviceTraits& device);

}  // namespace quern
