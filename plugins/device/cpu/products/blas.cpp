// The library is loaded by the first run that opens the device, not with the plugin: OpenBLAS takes memory as it is
// loaded, by its idea of the number of threads, and does not end where it gets none. Its own threads are not used,
// since where it divides a GEMM between them, and so how it sums, depends on their number. Its kernel is chosen for
// it by the CPU's abilities (products/blas_kernel.h), unless OPENBLAS_CORETYPE is set.
#include "products/blas.h"

#include <cblas.h>
#include <dlfcn.h>
#include <omp.h>

#include <algorithm>
#include <cstdlib>
#include <optional>
#include <vector>

#include "products/blas_kernel.h"
#include "quern/error.h"

namespace quern::cpu {

namespace {

/// Sets a variable of the environment for as long as it lives.
class Environment {
 public:
  Environment(const char* name, const char* value) : name_(name) {
    if (const char* before = std::getenv(name)) before_ = before;
    ::setenv(name, value, 1);
  }
  ~Environment() { before_ ? ::setenv(name_, before_->c_str(), 1) : ::unsetenv(name_); }
  Environment(const Environment&) = delete;
  Environment& operator=(const Environment&) = delete;

 private:
  const char* name_;
  std::optional<std::string> before_;
};

constexpr const char* kKernelVariable = "OPENBLAS_CORETYPE";

class Library {
 public:
  Library() {
    const Environment alone("OPENBLAS_NUM_THREADS", "1");
    const std::string best(best_kernel(cpu_features()));
    std::optional<Environment> kernel;
    if (chosen.empty() && !best.empty()) kernel.emplace(kKernelVariable, best.c_str());
    for (const char* file : {QUERN_BLAS_NAME, QUERN_BLAS_FILE})  // as a linked library is found, or where it was built
      if (handle_ == nullptr) handle_ = ::dlopen(file, RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
    if (handle_ != nullptr) sgemm = function<decltype(cblas_sgemm)>("cblas_sgemm");
    if (sgemm == nullptr) {
      const char* reason = ::dlerror();
      throw Error(ErrorCode::resources, {.where = "device cpu",
                                         .what = "the BLAS cannot be loaded",
                                         .found = reason ? reason : "no reason",
                                         .expected = QUERN_BLAS_NAME,
                                         .next = "install it (OpenBLAS)"});
    }
  }

  /// Null where the library has no such function.
  template <class Function>
  Function* function(const char* name) const {
    return reinterpret_cast<Function*>(::dlsym(handle_, name));
  }

 private:
  static std::string users_choice() {
    const char* value = std::getenv(kKernelVariable);
    return value ? value : "";
  }

  void* handle_ = nullptr;

 public:
  const std::string chosen = users_choice();  ///< the kernel; empty: none
  decltype(&cblas_sgemm) sgemm = nullptr;
};

const Library& library() {
  static const Library library;
  return library;
}

/// In a team of several threads OpenBLAS takes the calling one alone; elsewhere it needs a call.
class OneThread {
 public:
  OneThread() : before_(omp_in_parallel() ? 1 : omp_get_max_threads()) {
    if (before_ > 1) omp_set_num_threads(1);
  }
  ~OneThread() {
    if (before_ > 1) omp_set_num_threads(before_);
  }
  OneThread(const OneThread&) = delete;
  OneThread& operator=(const OneThread&) = delete;

 private:
  int before_;
};

/// Rows [row, ...) and columns [column, ...) of what a view reads.
MatrixView part(const MatrixView& x, std::int64_t row, std::int64_t column) {
  if (x.read == MatrixView::Read::transposed) std::swap(row, column);
  return {x.data + row * x.stride + column, x.stride, x.read};
}

}  // namespace

void gemm_here(std::int64_t m, std::int64_t n, std::int64_t k, float alpha, const MatrixView& a, const MatrixView& b,
               float beta, float* c, std::int64_t c_stride) {
  if (m == 0 || n == 0) return;
  auto read = [](const MatrixView& x) { return x.read == MatrixView::Read::transposed ? CblasTrans : CblasNoTrans; };
  auto size = [](std::int64_t x) { return static_cast<blasint>(x); };
  const OneThread alone;
  library().sgemm(CblasRowMajor, read(a), read(b), size(m), size(n), size(k), alpha, a.data, size(a.stride), b.data,
                  size(b.stride), beta, c, size(c_stride));
}

void gemm(std::int64_t m, std::int64_t n, std::int64_t k, float alpha, const MatrixView& a, const MatrixView& b,
          float beta, float* c, std::int64_t c_stride) {
  // Tiles of 256 take 3% longer than one GEMM, of 128 8%; a few of them would not keep many cores busy.
  auto count = [](std::int64_t size, std::int64_t tile) { return (size + tile - 1) / tile; };
  const std::int64_t tile = count(m, 256) * count(n, 256) >= 32 ? 256 : 128;
  const std::int64_t rows = count(m, tile), columns = count(n, tile);
#pragma omp parallel for collapse(2) schedule(dynamic) if (rows * columns > 1)
  for (std::int64_t row = 0; row < rows; ++row) {
    for (std::int64_t column = 0; column < columns; ++column) {
      const std::int64_t i = row * tile, j = column * tile;
      gemm_here(std::min(tile, m - i), std::min(tile, n - j), k, alpha, part(a, i, 0), part(b, 0, j), beta,
                c + i * c_stride + j, c_stride);
    }
  }
}

void load_blas(int threads) {
  auto* take = library().function<void*(int)>("blas_memory_alloc");
  auto* give = library().function<void(void*)>("blas_memory_free");
  if (take == nullptr || give == nullptr) return;
  std::vector<void*> buffers(static_cast<std::size_t>(threads));
  for (void*& buffer : buffers) buffer = take(0);
  for (void* buffer : buffers) give(buffer);  // kept by the library
}

std::string blas_warning() {
  auto* core = library().function<char*()>("openblas_get_corename");
  return core == nullptr ? "" : kernel_warning(core(), cpu_features(), library().chosen);
}

std::string blas_name() {
  auto* config = library().function<char*()>("openblas_get_config");
  auto* core = library().function<char*()>("openblas_get_corename");
  if (config == nullptr || core == nullptr) return QUERN_BLAS_NAME;
  const std::string text = config();  // "OpenBLAS 0.3.21 NO_LAPACKE ..."
  return text.substr(0, text.find(' ', text.find(' ') + 1)) + ", " + core();
}

}  // namespace quern::cpu
