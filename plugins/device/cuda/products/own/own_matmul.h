#pragma once
// quern's own GEMMs on Hopper's tensor cores, beside the library's, with a bias or added to y, which is bf16:
//   bf16                    both operands K-major, b alone not, or neither
//   e4m3 or e5m2 with e4m3  fast accumulation; one scale of each operand, one a row and a column, or block scales. One
//                           operand may be not K-major, with one scale of each and no bias; if that is a, also
//                           with fp32 accumulation, or with tile scales
//   i8                      scales alike, both operands K-major

#include <cuda_runtime_api.h>

#include "products/library/matmul_plan.h"
#include "runtime/kernels.h"

namespace quern::cuda {

/// Empty where the own kernels take the matmul; else why not.
std::string refuse_own_matmul(const MatmulKey& key, const CudaTraits& gpu);

/// How a GEMM is divided among clusters of two blocks: a property of its shape, so that its bits are the same on any
/// number of multiprocessors.
struct OwnTiling {
  int columns = 256;  ///< of a tile of 128 rows: 192, 224 or 256
  int divided = 0;    ///< pairs of tiles, the last, with split-K in `parts`, which are added in order
  int parts = 1;
};
OwnTiling own_tiling(std::int64_t m, std::int64_t n, std::int64_t k, DType operands);

/// The time of an own GEMM of 8-bit operands relative to one whose tiles begin and end at once, end where the result
/// does, and leave no cluster idle: 1 and more.
double own_matmul_share(std::int64_t m, std::int64_t n, std::int64_t k);

/// Whether the kernel's first operand is b: the operand of 8 bits that is not K-major.
bool swaps_operands(const MatmulKey& key);

// The rest is Hopper's code (runtime/hopper_kernels.h).

/// To be called by `prepare`: loads the code.
void load_own_matmul(const MatmulKey& key);
/// Operands and the workspace are at multiples of 16 bytes.
void run_own_matmul(const MatmulKey& key, const MatmulOperands& operands, int multiprocessors, cudaStream_t stream);

/// A matmul in the kernels' view: of 8 bits, columns are the operand's that is stored K-major, b (columns, depth).
struct OwnOperands {
  std::int64_t rows = 0, columns = 0, depth = 0;
  DType a_type = DType::e4m3, b_type = DType::e4m3;
  const void *a = nullptr, *b = nullptr, *bias = nullptr;
  std::int64_t a_stride = 0, b_stride = 0, y_stride = 0;  ///< elements between stored rows; 0: contiguous
  const float *scale_a = nullptr, *scale_b = nullptr;
  ScaleMode scales = ScaleMode::none;
  bool add = false;  ///< to y
  void *y = nullptr, *workspace = nullptr;
};

// One translation unit for each pair of formats, and for each layout of operands and y
// (gemm_store_epilogue.cuh).
struct OwnMatmul {
  void (*load)();
  void (*run)(const OwnOperands& operands, int multiprocessors, cudaStream_t stream);
};
extern const OwnMatmul kBf16Matmul, kBf16MnMajorBMatmul, kBf16MnMajorABMatmul;
extern const OwnMatmul kE4m3Matmul, kE5m2Matmul, kI8Matmul;
extern const OwnMatmul kE4m3MnMajorAMatmul, kE5m2MnMajorAMatmul, kE4m3MnMajorAFp32Matmul, kE5m2MnMajorAFp32Matmul;
extern const OwnMatmul kE4m3MnMajorBMatmul, kE5m2MnMajorBMatmul;
extern const OwnMatmul kE4m3BlockScalesMatmul, kE4m3BlockTileScalesMatmul, kE4m3TileScalesMatmul,
    kE4m3TileScalesMnMajorAMatmul;
extern const OwnMatmul kE5m2BlockScalesMatmul, kE5m2BlockTileScalesMatmul, kE5m2TileScalesMatmul,
    kE5m2TileScalesMnMajorAMatmul;

}  // namespace quern::cuda
