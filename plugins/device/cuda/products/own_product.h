#pragma once
// Own products of 8-bit operands on Hopper's tensor cores, beside the library's: e4m3 or e5m2 times e4m3 with fast
// sums, and i8; one scale of each operand, or one a row and a column; a bias; added to y. Besides, floats of which one
// operand lies across the sums, with one scale of each and no bias: a with fast sums or sums in fp32, b with fast ones.

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

/// What a product of own kernels takes beside one whose tiles begin and end at once, end where the result does, and
/// leave no cluster idle: 1 and more.
double own_product_share(std::int64_t m, std::int64_t n, std::int64_t k);

/// To be called by `prepare`: loads the code.
void load_own_product(const MatmulKey& key);
/// Operands and the workspace lie at multiples of 16 bytes.
void run_own_product(const MatmulKey& key, const MatmulOperands& operands, int multiprocessors, cudaStream_t stream);

/// A product as kernels take it: columns are those of what is stored along the sums, b (columns, depth).
struct OwnOperands {
  std::int64_t rows = 0, columns = 0, depth = 0;
  DType a_type = DType::e4m3, b_type = DType::e4m3;
  const void *a = nullptr, *b = nullptr, *bias = nullptr;
  std::int64_t b_stride = 0;  ///< elements between its rows; 0: contiguous
  const float *scale_a = nullptr, *scale_b = nullptr;
  bool by_row = false;  ///< scales are one a row and one a column
  bool add = false;     ///< to y
  void *y = nullptr, *workspace = nullptr;
};

// One translation unit for each pair of formats, and for each way in which operands and y lie (product_store.cuh).
struct OwnProduct {
  void (*load)();
  void (*run)(const OwnOperands& operands, int multiprocessors, cudaStream_t stream);
};
extern const OwnProduct kE4m3Product, kE5m2Product, kI8Product;
extern const OwnProduct kE4m3PairedProduct, kE5m2PairedProduct, kE4m3ExactProduct, kE5m2ExactProduct;
extern const OwnProduct kE4m3TurnedProduct, kE5m2TurnedProduct;

}  // namespace quern::cuda
