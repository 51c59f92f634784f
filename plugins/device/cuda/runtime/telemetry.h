#pragma once
// Clocks, power, temperature and what limits the clocks, from NVML. The driver's library is loaded at run time, so that
// neither building nor planning needs it; where it is missing the telemetry says why and training goes on.

#include <memory>
#include <string>

#include "quern/device.h"

namespace quern::cuda {

class GpuTelemetry {
 public:
  /// `bus_id` as cudaDeviceGetPCIBusId spells it: NVML's own numbers know nothing of CUDA_VISIBLE_DEVICES.
  explicit GpuTelemetry(const std::string& bus_id);
  ~GpuTelemetry();
  /// A few calls to the driver, some 0.1 ms; the GPU is not waited for.
  Telemetry read() const;

 private:
  struct Library;
  std::unique_ptr<Library> library_;
  std::string unavailable_;
};

/// The limits that a set of NVML's clock event reasons names; idle and chosen clocks are none.
std::vector<std::string> clock_limits(unsigned long long reasons);

}  // namespace quern::cuda
