#include "products/blas.h"

#include <unistd.h>

#include <climits>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include "products/blas_kernel.h"
#include "quern/random.h"

using namespace quern;
using namespace quern::cpu;

namespace {

std::vector<float> numbers(std::int64_t count, std::uint64_t seed) {
  std::vector<float> values(static_cast<std::size_t>(count));
  for (std::size_t i = 0; i < values.size(); ++i)
    values[i] = static_cast<float>(random_word({seed, RandomPurpose::sample, 0}, 0, i)) * 0x1p-31f - 1;
  return values;
}

struct Sizes {
  std::int64_t m, n, k;
};

/// Largest error of a GEMM, in units of what rounding each of its terms to fp32 may add up to.
double worst_error(const Sizes& size, bool transpose_a, bool transpose_b, float beta) {
  const auto [m, n, k] = size;
  using Read = MatrixView::Read;
  const auto a = numbers(m * k, 1), b = numbers(k * n, 2), before = numbers(m * n, 3);
  std::vector<float> c = beta == 0 ? std::vector<float>(before.size(), NAN) : before;
  gemm(m, n, k, 0.5f, {a.data(), transpose_a ? m : k, transpose_a ? Read::transposed : Read::plain},
       {b.data(), transpose_b ? k : n, transpose_b ? Read::transposed : Read::plain}, beta, c.data(), n);
  double worst = 0;
  for (std::int64_t i = 0; i < m; ++i)
    for (std::int64_t j = 0; j < n; ++j) {
      double sum = 0, size_of_terms = 1;
      for (std::int64_t t = 0; t < k; ++t) {
        const double term = static_cast<double>(a[static_cast<std::size_t>(transpose_a ? t * m + i : i * k + t)]) *
                            b[static_cast<std::size_t>(transpose_b ? j * k + t : t * n + j)];
        sum += term;
        size_of_terms += std::abs(term);
      }
      const auto at = static_cast<std::size_t>(i * n + j);
      const double want = 0.5 * sum + beta * before[at];
      const double error = std::abs(c[at] - want) / (size_of_terms * 0x1p-24);
      worst = std::isnan(error) ? INFINITY : std::max(worst, error);
    }
  return worst;
}

}  // namespace

TEST_CASE("GEMMs at odd sizes agree with double precision") {
  for (const Sizes& size : {Sizes{1, 1, 1}, {3, 5, 7}, {17, 33, 65}, {131, 257, 63}, {255, 129, 301}, {301, 7, 513}})
    for (bool transpose_a : {false, true})
      for (bool transpose_b : {false, true})
        for (float beta : {0.0f, 1.0f}) {
          CAPTURE(size.m);
          CAPTURE(size.n);
          CAPTURE(size.k);
          CAPTURE(transpose_a);
          CAPTURE(transpose_b);
          CAPTURE(beta);
          // Kernels add up in several sums, so errors are far below the bound of one sum, k; wrong elements far above.
          CHECK(worst_error(size, transpose_a, transpose_b, beta) < 8);
        }
}

TEST_CASE("every kernel that this CPU can run multiplies, and is the one that was asked for") {
  char program[PATH_MAX] = {};
  REQUIRE(::readlink("/proc/self/exe", program, sizeof program - 1) > 0);
  const CpuFeatures cpu = cpu_features();
  std::vector<std::string> kernels{"", "Prescott"};
  if (cpu.avx2) kernels.insert(kernels.end(), {"Haswell", "Zen"});
  if (cpu.avx512) kernels.emplace_back("SkylakeX");
  if (cpu.avx512_bf16) kernels.emplace_back("Cooperlake");
  for (const std::string& kernel : kernels) {
    CAPTURE(kernel);
    // The library is loaded once in a process.
    const std::string command = "OPENBLAS_CORETYPE='" + kernel + "' QUERN_TEST_KERNEL='" + kernel + "' '" + program +
                                "' -tc='GEMMs at odd sizes*,the kernel is*' >/dev/null";
    CHECK(std::system(command.c_str()) == 0);
  }
}

TEST_CASE("the kernel is the user's choice, or else the best that this CPU can run") {
  const char* chosen = std::getenv("QUERN_TEST_KERNEL");
  if (chosen == nullptr && std::getenv("OPENBLAS_CORETYPE") != nullptr) return;  // the other test sets both
  const std::string wanted = chosen ? chosen : "", name = blas_name();
  if (!name.starts_with("OpenBLAS")) return;
  if (!wanted.empty()) CHECK(name.ends_with(", " + wanted));
  // A library may have the kernel under another name, none may be slower.
  if (wanted.empty()) CHECK(blas_warning() == "");
  const bool below = !wanted.empty() && kernel_warning(wanted, cpu_features(), wanted) != "";
  const bool warned = blas_warning().find("unset OPENBLAS_CORETYPE") != std::string::npos;
  CHECK(warned == below);
  // What it set for itself is gone.
  const char* left = std::getenv("OPENBLAS_CORETYPE");
  CHECK(std::string(left ? left : "") == wanted);
}
