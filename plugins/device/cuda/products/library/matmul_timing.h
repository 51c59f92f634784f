#pragma once
// Times candidate algorithms of a matmul on scratch memory.

#include <cublasLt.h>

#include <cstddef>
#include <vector>

#include "runtime/kernels.h"

namespace quern::cuda {

class MatmulPlan;
class MatmulScratch;
struct MatmulKey;
struct UnlistedCandidates;

struct TimedChoice {
  cublasLtMatmulAlgo_t algorithm = {};
  bool own = false;     ///< the own kernels are faster than that
  bool timed = false;   ///< false: there was no memory to time with, and the library's first guess is taken
  bool whole = false;   ///< timed at this size; else the choice may differ at another time
  float ms = 0;         ///< a run of the algorithm
  float listed_ms = 0;  ///< the best of those that the library listed, timed as the choice was
  std::size_t tried = 0;
  std::vector<cublasLtMatmulAlgo_t> finalists = {};  ///< the best few, the algorithm first
};

/// The fastest of `listed`, which are not empty, and of the `unlisted` ones that compute the same, on operands that no
/// run finds in the L2 cache. How many are tried is fixed, however busy the host is; where there are unlisted ones,
/// all of a large matmul are screened on a part of it. Those that are near the best in short runs are timed in bursts
/// of milliseconds; where there are unlisted ones, and the matmul is large, the best of these under sustained load,
/// where the power limit lowers the clock, more for some than for others. Where scratch for the whole matmul does not
/// fit, the listed ones are timed on a smaller one of the same layout. `own`: beside the own kernels (own_matmul.h),
/// which take the matmul; not where scratch for the whole does not fit.
TimedChoice choose_by_time(CudaContext& context, const MatmulKey& key, const std::vector<cublasLtMatmulAlgo_t>& listed,
                           const UnlistedCandidates& unlisted, bool own);

/// Whether an algorithm gives what `reference` gives but for rounding, and the same bits again. The library accepts
/// configurations that it does not list, so that nobody may have run them before.
bool gives_same(CudaContext& context, const MatmulPlan& plan, const MatmulKey& key, const MatmulScratch& scratch,
                const cublasLtMatmulAlgo_t& reference, const cublasLtMatmulAlgo_t& algorithm);

}  // namespace quern::cuda
