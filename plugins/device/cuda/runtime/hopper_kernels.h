#pragma once
// Kernels with instructions that Hopper alone has (wgmma, TMA, clusters). Their files are compiled for sm_90a and
// nothing else, and are left out of a build without it: the list is in CMakeLists.txt. Everything else calls them
// through this table, so that no kernel has a branch for other architectures.

#include <cstddef>

#include "attention/attention.h"
#include "products/library/matmul_plan.h"
#include "runtime/kernels.h"

namespace quern::cuda {

struct HopperKernels {
  // products/own/own_matmul.h
  void (*load_own_matmul)(const MatmulKey& key);
  void (*run_own_matmul)(const MatmulKey& key, const MatmulOperands& operands, int multiprocessors,
                         cudaStream_t stream);
  // attention/attention.h
  std::size_t (*attention_workspace)(const AttentionShape& shape);
  void (*load_attention)(const AttentionShape& shape);
  void (*attention)(const AttentionShape& shape, const AttentionOperands& operands, int multiprocessors,
                    cudaStream_t stream);
  std::size_t (*attention_grad_workspace)(const AttentionShape& shape);
  void (*load_attention_grad)(const AttentionShape& shape);
  void (*attention_grad)(const AttentionShape& shape, const AttentionOperands& operands, int multiprocessors,
                         cudaStream_t stream);
  /// Matmuls fused with SwiGLU.
  void (*add_ops)(OpTable& table);
};

/// Whether this build has them.
bool has_hopper_kernels();
/// An internal error where this build has none: plans ask CudaTraits::wgmma first.
const HopperKernels& hopper_kernels();

}  // namespace quern::cuda
