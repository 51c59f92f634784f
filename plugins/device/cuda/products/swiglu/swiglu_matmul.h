#pragma once
// GEMMs fused with SwiGLU, on Hopper's tensor cores: gate_up = x W^T with y = swiglu(gate_up), and the gradient of
// gate_up from dy = dout W. bf16, fp32 accumulators, values rounded as by the ops; docs/decisions/0012 has the reasons.

#include <cuda_runtime_api.h>

#include <cstdint>

#include "runtime/kernels.h"

namespace quern::cuda {

/// rows x depth times depth x width (gate_up: twice that width).
struct SwigluMatmulShape {
  std::int64_t rows = 0, width = 0, depth = 0;
  /// Of the gradient's weight: as (width, depth) instead of (depth, width). The forward weight is (2 width, depth).
  bool transposed = false;
};

struct SwigluMatmul {
  const void *x = nullptr, *weight = nullptr;
  void *gate_up = nullptr, *y = nullptr;  ///< (rows, 2 width), (rows, width); null: not wanted
};

struct SwigluGradMatmul {
  const void *dout = nullptr, *weight = nullptr, *gate_up = nullptr;
  void *dy = nullptr, *y = nullptr;  ///< y = swiglu(gate_up) again; null: not wanted
  void* dgate_up = nullptr;          ///< may be gate_up's memory
};

/// Adds matmul_swiglu, its gradients, and the 8-bit forms that quantize, by kind of scale.
void add_swiglu_matmul_ops(OpTable& table);
void add_swiglu_quantized_ops(OpTable& table);
void add_swiglu_tile_scales_ops(OpTable& table);
void add_swiglu_row_scales_ops(OpTable& table);

/// Whether the kernels take such sizes: depth and width multiples of 8. Operands are at multiples of 16 bytes.
bool wgmma_takes(const SwigluMatmulShape& shape);
/// To be called by `prepare`: loads the code.
void load_swiglu_matmuls();
void swiglu_matmul(const SwigluMatmulShape& shape, const SwigluMatmul& product, int multiprocessors,
                   cudaStream_t stream);
void swiglu_grad_matmul(const SwigluMatmulShape& shape, const SwigluGradMatmul& product, int multiprocessors,
                        cudaStream_t stream);

}  // namespace quern::cuda
