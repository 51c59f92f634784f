#pragma once
// Time of ops and programs: as the device tells it, else from the ops' own costs and the device's rates, the larger of
// arithmetic and memory time. An estimate for choosing and for `quern plan`; `quern bench` measures.

#include "quern/device.h"
#include "quern/op_spec.h"

namespace quern {

/// Peak FLOP/s of matmuls of this format; 0: not known.
double matmul_rate(const DeviceTraits& device, DType format);

/// A format without a rate takes the first that is known.
double cost_seconds(const Cost& cost, const DeviceTraits& device);

/// Of an op that costs this, as the device answers about it.
double launch_seconds(const OpSupport& support, const Cost& cost, const DeviceTraits& device);

/// Op by op, without those that only observe.
double program_seconds(const Program& program, const OpSet& ops, const Geometry& geometry, const Device& device);

}  // namespace quern
