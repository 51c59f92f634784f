#pragma once
// Matmuls of i8 by the library, where quern has no GEMM: it gives i32 for some rows at a time, which a kernel
// scales. Integer accumulators are exact, so that the bits are the own GEMMs', whatever algorithm it takes.

#include <string>

#include "products/library/matmul_plan.h"
#include "runtime/kernels.h"

namespace quern::cuda {

/// Empty where it takes the matmul; else why not.
std::string refuse_library_i8(const MatmulKey& key, const CudaTraits& gpu);
std::size_t library_i8_workspace(const MatmulKey& key);
/// Of inputs a, b, bias, scale_a, scale_b, as the op has them. Throws a resources error when it has no algorithm.
Launch prepare_library_i8(const MatmulKey& key, CudaContext& context);

}  // namespace quern::cuda
