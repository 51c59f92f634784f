#pragma once
// Observations (quern/step_state.h) of tensors that an op quantizes for itself, which no other op can observe.

#include <cuda_runtime_api.h>

#include <cstdint>

#include "quern/dtype.h"
#include "quern/step_state.h"

namespace quern::cuda {

/// Quantized values (rows, columns) in e4m3 or e5m2 with one scale; rows with a target below 0 do not count. The
/// originals are gone, and every zero counts as underflowed.
struct ObservedCodes {
  const std::uint8_t* codes = nullptr;
  const std::int32_t* targets = nullptr;  ///< (rows)
  std::int64_t rows = 0, columns = 0;
  float scale = 1;
  DType format = DType::e4m3;
};

/// To be called by `prepare`.
void load_observations();
/// Makes `seen` the observation of nothing. Ordered on `stream`, as the next.
void begin_observation(ScaleObservation* seen, cudaStream_t stream);
void observe_codes(const ObservedCodes& of, ScaleObservation* seen, cudaStream_t stream);

}  // namespace quern::cuda
