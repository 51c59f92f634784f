#pragma once
// Time and work of a program from the ops' own costs and the device's rates: the larger of arithmetic and memory time,
// op by op. An estimate for choosing and for `quern plan`; `quern bench` measures.

#include "quern/device.h"
#include "quern/op_spec.h"

namespace quern {

struct ProgramEstimate {
  double flops = 0;  ///< of matrix products, recomputation left out
  double seconds = 0;
};

ProgramEstimate estimate_program(const Program& program, const OpSet& ops, const Geometry& geometry,
                                 const DeviceTraits& device);

}  // namespace quern
