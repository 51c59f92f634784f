#include "products/blas_kernel.h"

#include <string>

#include <doctest/doctest.h>

using namespace quern::cpu;

namespace {

constexpr CpuFeatures kOld{}, kOldAmd{.amd = true};
constexpr CpuFeatures kAvx2{.avx2 = true}, kAvx2Amd{.amd = true, .avx2 = true};
constexpr CpuFeatures kAvx512{.avx2 = true, .avx512 = true};
constexpr CpuFeatures kBf16{.avx2 = true, .avx512 = true, .avx512_bf16 = true};
constexpr CpuFeatures kBf16Amd{.amd = true, .avx2 = true, .avx512 = true, .avx512_bf16 = true};

}  // namespace

TEST_CASE("a kernel is chosen by what the CPU can do, whatever its model") {
  const struct {
    const char* cpu;
    CpuFeatures features;
    std::string kernel;
  } cases[] = {
      {"Granite Rapids", kBf16, "Cooperlake"},
      {"Emerald Rapids", kBf16, "Cooperlake"},
      {"Sapphire Rapids", kBf16, "Cooperlake"},
      {"Ice Lake", kAvx512, "SkylakeX"},
      {"Emerald Rapids in a VM without AVX-512", kAvx2, "Haswell"},
      {"Sierra Forest", kAvx2, "Haswell"},
      {"Raptor Lake", kAvx2, "Haswell"},
      {"Haswell", kAvx2, "Haswell"},
      {"Sandy Bridge", kOld, ""},
      {"a VM with SSE alone", kOld, ""},
      {"Zen 5", kBf16Amd, "Cooperlake"},
      {"Zen 4", kBf16Amd, "Cooperlake"},
      {"Zen 4 in a VM without AVX-512", kAvx2Amd, "Zen"},
      {"Zen 3", kAvx2Amd, "Zen"},
      {"Piledriver", kOldAmd, ""},
  };
  for (const auto& c : cases) {
    CAPTURE(c.cpu);
    CHECK(best_kernel(c.features) == c.kernel);
    CHECK(kernel_warning(c.kernel, c.features, "") == "");
  }
}

TEST_CASE("a kernel below the CPU is a warning with the fix") {
  CHECK(kernel_warning("Prescott", kBf16, "Prescott") ==
        "matmuls may be slow: OpenBLAS runs its kernel Prescott (128-bit vectors), and this CPU could run "
        "Cooperlake (512-bit vectors): unset OPENBLAS_CORETYPE, which is Prescott");
  CHECK(kernel_warning("Nehalem", kAvx2, "") ==
        "matmuls may be slow: OpenBLAS runs its kernel Nehalem (128-bit vectors), and this CPU could run "
        "Haswell (256-bit vectors): install a newer OpenBLAS, built for every CPU (DYNAMIC_ARCH), as Debian's "
        "libopenblas0-openmp");
  CHECK(kernel_warning("Haswell", kAvx512, "Haswell") != "");
  CHECK(kernel_warning("Sandybridge", kAvx2, "") != "");
  // OpenBLAS has the same fp32 kernel under all of these names.
  CHECK(kernel_warning("SkylakeX", kBf16, "SkylakeX") == "");
  CHECK(kernel_warning("SapphireRapids", kBf16, "") == "");
  CHECK(kernel_warning("Zen", kAvx2, "Zen") == "");
  CHECK(kernel_warning("Prescott", kOld, "") == "");
}
