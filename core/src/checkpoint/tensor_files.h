#pragma once
// The tensors of a checkpoint, whole, whatever ranks wrote: each wrote a file with some rows of each tensor, and the
// rows follow each other as the files do.

#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/safetensors.h"

namespace quern {

class TensorFiles {
 public:
  /// Opens files that are in the order of their ranks. Every fault, here and below, is an input error that names the
  /// file and the tensor: also where files do not agree on a tensor's type and row length.
  explicit TensorFiles(const std::vector<std::string>& paths);

  const std::vector<SafetensorsFile>& files() const { return files_; }
  /// Whole; of `offset` nothing is said.
  const std::vector<StoredTensor>& tensors() const { return tensors_; }
  /// Null when there is none of that name.
  const StoredTensor* find(std::string_view name) const;
  /// An input error when there is none of that name.
  const StoredTensor& at(std::string_view name) const;

  /// The tensor's bytes first, first + 1, ...
  void read(const StoredTensor& tensor, std::uint64_t first, std::span<std::byte> out) const;
  std::vector<std::byte> bytes(const StoredTensor& tensor) const;
  /// Elements first, first + 1, ... as fp32; other than floating types are refused.
  void read_floats(const StoredTensor& tensor, std::int64_t first, std::span<float> out) const;
  std::vector<float> read_floats(std::string_view name) const;

 private:
  struct Part {
    std::size_t file;
    const StoredTensor* stored;
    std::uint64_t first;  ///< byte of the whole
  };
  void add(std::size_t file, const StoredTensor& stored);
  template <class Visit>
  void for_each_part(const StoredTensor& tensor, std::uint64_t first, std::uint64_t bytes, const Visit& visit) const;

  std::vector<SafetensorsFile> files_;
  std::vector<StoredTensor> tensors_;
  std::vector<std::vector<Part>> parts_;  ///< as tensors_
  std::map<std::string, std::size_t, std::less<>> index_;
};

}  // namespace quern
