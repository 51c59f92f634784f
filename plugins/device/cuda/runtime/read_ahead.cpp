#include "runtime/read_ahead.h"

#include <cublasLt.h>
#include <cudnn.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <unistd.h>

#include <filesystem>
#include <string>

namespace quern::cuda {

namespace {

/// The shared library that a function is in.
std::filesystem::path library_of(const void* function) {
  Dl_info found{};
  return dladdr(function, &found) != 0 && found.dli_fname != nullptr ? found.dli_fname : "";
}

void read_ahead(const std::filesystem::path& file) {
  const int descriptor = ::open(file.c_str(), O_RDONLY | O_CLOEXEC);
  if (descriptor < 0) return;
  posix_fadvise(descriptor, 0, 0, POSIX_FADV_WILLNEED);
  ::close(descriptor);
}

}  // namespace

void read_ahead_libraries() noexcept try {
  const std::filesystem::path dnn = library_of(reinterpret_cast<const void*>(&cudnnCreate));
  // In the order in which a first start needs them; cuDNN's are loaded when it first plans.
  for (const char* part : {"graph", "heuristic", "engines_precompiled"})
    read_ahead(dnn.parent_path() / ("libcudnn_" + std::string(part) + ".so." + std::to_string(CUDNN_MAJOR)));
  read_ahead(library_of(reinterpret_cast<const void*>(&cublasLtCreate)));
} catch (...) {  // a start without it is a slower one
}

}  // namespace quern::cuda
