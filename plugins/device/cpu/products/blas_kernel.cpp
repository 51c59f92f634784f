#include "products/blas_kernel.h"

namespace quern::cpu {

namespace {

/// Bits of the vectors that a kernel computes with. OpenBLAS has one fp32 kernel for AVX-512, under several names.
int vector_bits(std::string_view kernel) {
  if (kernel == "SkylakeX" || kernel == "Cooperlake" || kernel == "SapphireRapids") return 512;
  if (kernel == "Haswell" || kernel == "Zen") return 256;
  return 128;
}

}  // namespace

CpuFeatures cpu_features() {
  CpuFeatures cpu;
#if defined(__x86_64__)
  __builtin_cpu_init();
  cpu.amd = __builtin_cpu_is("amd");
  cpu.avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  cpu.avx512 = cpu.avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
               __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
               __builtin_cpu_supports("avx512cd");
  cpu.avx512_bf16 = cpu.avx512 && __builtin_cpu_supports("avx512bf16");
#endif
  return cpu;
}

std::string_view best_kernel(const CpuFeatures& cpu) {
  if (cpu.avx512_bf16) return "Cooperlake";
  if (cpu.avx512) return "SkylakeX";
  if (cpu.avx2) return cpu.amd ? "Zen" : "Haswell";
  return {};
}

std::string kernel_warning(std::string_view kernel, const CpuFeatures& cpu, std::string_view chosen) {
  const std::string_view best = best_kernel(cpu);
  if (vector_bits(kernel) >= vector_bits(best)) return {};
  auto described = [](std::string_view name) {
    return std::string(name) + " (" + std::to_string(vector_bits(name)) + "-bit vectors)";
  };
  return "matmuls may be slow: OpenBLAS runs its kernel " + described(kernel) + ", and this CPU could run " +
         described(best) + ": " +
         (chosen.empty()
              ? "install a newer OpenBLAS, built for every CPU (DYNAMIC_ARCH), as Debian's libopenblas0-openmp"
              : "unset OPENBLAS_CORETYPE, which is " + std::string(chosen));
}

}  // namespace quern::cpu
