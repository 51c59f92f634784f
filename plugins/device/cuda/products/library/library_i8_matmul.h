#pragma once
// Products of i8 by the library, where there are no own ones: it gives i32 for some rows at a time, which a kernel
// scales. Mainloop of integers are exact, so that the bits are those of own products, whatever algorithm it takes.

#include <string>

#include "products/library/matmul_plan.h"
#include "runtime/kernels.h"

namespace quern::cuda {

/// Empty where it takes the product; else why not.
std::string refuse_library_i8(const MatmulKey& key, const CudaTraits& gpu);
std::size_t library_i8_workspace(const MatmulKey& key);
/// Of inputs a, b, bias, scale_a, scale_b, as the op has them. Throws a resources error when it has no algorithm.
Launch prepare_library_i8(const MatmulKey& key, CudaContext& context);

}  // namespace quern::cuda
