#pragma once
// The weights of a Hugging Face model: one safetensors file, or shards that model.safetensors.index.json lists.

#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/safetensors.h"

namespace quern {

class WeightFiles {
 public:
  struct Tensor {
    const SafetensorsFile* file = nullptr;
    const StoredTensor* stored = nullptr;
  };

  /// `path`: a model directory, a .safetensors file or an index. Shards are beside their index (links only within the
  /// directory, or into the blobs folder of a Hugging Face cache); missing ones, and tensors that the index and the
  /// shards do not agree on, are input errors that name them.
  explicit WeightFiles(const std::string& path);

  const std::string& path() const { return path_; }
  const std::map<std::string, Tensor, std::less<>>& tensors() const { return tensors_; }
  /// Null members when there is none of that name.
  Tensor find(std::string_view name) const;

 private:
  void open_index(const std::string& index_path);
  void open_file(const std::string& path);

  std::string path_;
  std::vector<std::unique_ptr<SafetensorsFile>> files_;
  std::map<std::string, Tensor, std::less<>> tensors_;
};

}  // namespace quern
