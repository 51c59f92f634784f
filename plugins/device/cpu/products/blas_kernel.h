#pragma once
// Which of OpenBLAS's kernels suits a CPU. A library asks the CPU for its model and may take SSE3 kernels where it does
// not know it: version 0.3.21 does so on Intel's since Raptor Lake and Emerald Rapids, at a quarter of the speed.

#include <string>
#include <string_view>

namespace quern::cpu {

/// Instruction sets that the CPU has and the system lets programs use.
struct CpuFeatures {
  bool amd = false;
  bool avx2 = false;         ///< with FMA
  bool avx512 = false;       ///< F, BW, VL, DQ and CD, as Skylake's servers
  bool avx512_bf16 = false;  ///< beside these
};

CpuFeatures cpu_features();

/// The best kernel by OpenBLAS's name. Empty for a CPU without AVX2, which is older than any library in use: these
/// know it by its model.
std::string_view best_kernel(const CpuFeatures& cpu);

/// That the kernel has shorter vectors than the CPU, with the fix; empty: it has not. `chosen`: the value of
/// OPENBLAS_CORETYPE as the user set it.
std::string kernel_warning(std::string_view kernel, const CpuFeatures& cpu, std::string_view chosen);

}  // namespace quern::cpu
