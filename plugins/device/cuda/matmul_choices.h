#pragma once
// Which algorithm each product uses, as JSON text for checkpoints and for a file in the user's cache directory. Choices
// hold for one GPU model and one version of the library; others are kept in the file and left alone.

#include <cublasLt.h>

#include <map>
#include <optional>
#include <string>
#include <string_view>

namespace quern::cuda {

class MatmulChoices {
 public:
  explicit MatmulChoices(const std::string& gpu);

  std::optional<cublasLtMatmulAlgo_t> find(const std::string& product) const;
  void set(const std::string& product, const cublasLtMatmulAlgo_t& algorithm);

  std::string text() const;
  /// Takes over choices of this GPU and library; text that is not such choices is ignored.
  void add(std::string_view text);

  /// Adds what the file has for this GPU and library; a missing or bad file is an empty one.
  void read_file(const std::string& path);
  /// Merges the choices into the file, which is replaced as a whole. A cache: faults are ignored.
  void write_file(const std::string& path) const noexcept;

 private:
  std::string owner_;                              ///< "NVIDIA H100 80GB HBM3, cuBLASLt 130100"
  std::map<std::string, std::string> algorithms_;  ///< product -> hexadecimal words
};

}  // namespace quern::cuda
