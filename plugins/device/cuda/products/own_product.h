#pragma once
// Own products of 8-bit operands on Hopper's tensor cores, beside the library's: e4m3 or e5m2 times e4m3 with fast
// sums, and i8; one scale of each operand, or one a row and a column; a bias; added to y.

#include <cuda_runtime_api.h>

#include "products/matmul_plan.h"
#include "runtime/kernels.h"

namespace quern::cuda {

/// Empty where the own kernels take the product; else why not.
std::string refuse_own_product(const MatmulKey& key, const CudaTraits& gpu);

/// How a product is divided among clusters of two blocks: a property of its shape, so that its bits are the same on any
/// number of multiprocessors.
struct OwnTiling {
  int columns = 256;  ///< of a tile of 128 rows: 192, 224 or 256
  int divided = 0;    ///< pairs of tiles, the last, whose sums are taken in `parts`, which are added in their order
  int parts = 1;
};
OwnTiling own_tiling(std::int64_t m, std::int64_t n, std::int64_t k);

/// To be called by `prepare`: loads the code.
void load_own_product(const MatmulKey& key);
/// Operands and the workspace lie at multiples of 16 bytes.
void run_own_product(const MatmulKey& key, const MatmulOperands& operands, int multiprocessors, cudaStream_t stream);

// One translation unit for each pair of formats.
struct OwnProduct {
  void (*load)();
  void (*run)(const MatmulKey& key, const MatmulOperands& operands, int multiprocessors, cudaStream_t stream);
};
extern const OwnProduct kE4m3Product, kE5m2Product, kI8Product;

}  // namespace quern::cuda
