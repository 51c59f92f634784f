#pragma once
// Times candidate algorithms of a product on scratch memory filled with random numbers: power, and so speed, depend on
// the data. Scratch is allocated and freed here, at prepare.

#include <cublasLt.h>

#include <vector>

#include "kernels.h"

namespace quern::cuda {

struct MatmulKey;

struct TimedChoice {
  cublasLtMatmulAlgo_t algorithm = {};
  bool timed = false;               ///< false: there was no memory to time with, and the library's first guess is taken
  float best_ms = 0, first_ms = 0;  ///< of the choice and of the first candidate
  int place = 0, tried = 0;         ///< of the choice among the candidates
};

/// The fastest of `candidates`, which are not empty. Where scratch for the whole product does not fit, a smaller
/// product of the same layout is timed.
TimedChoice choose_by_time(CudaContext& context, const MatmulKey& key,
                           const std::vector<cublasLtMatmulAlgo_t>& candidates);

/// Fills with reproducible normal-like numbers of deviation about 1, or 8-bit codes of such.
void fill_random(void* memory, std::size_t bytes, DType type, std::uint32_t seed, cudaStream_t stream);

}  // namespace quern::cuda
