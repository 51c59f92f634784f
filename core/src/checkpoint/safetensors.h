#pragma once
// Reads and writes one safetensors file: u64 header length, a JSON header, then the tensors' bytes, little endian.
// https://github.com/huggingface/safetensors states the format. Files read are untrusted and checked whole on opening.

#include <cstddef>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/files/durable_file.h"
#include "base/files/input_file.h"
#include "checkpoint/stored_tensor.h"

namespace quern {

class SafetensorsFile {
 public:
  /// Opens `path`; every fault, here and below, is an input error that names the file and what in it.
  explicit SafetensorsFile(std::string path);

  const std::string& path() const { return file_.path(); }
  /// In order of offset.
  const std::vector<StoredTensor>& tensors() const { return contents_.tensors; }
  const std::map<std::string, std::string>& metadata() const { return contents_.metadata; }
  /// Null when there is none of that name.
  const StoredTensor* find(std::string_view name) const;
  /// An input error when there is none of that name.
  const StoredTensor& at(std::string_view name) const;

  /// The tensor's bytes first, first + 1, ...
  void read(const StoredTensor& tensor, std::uint64_t first, std::span<std::byte> out) const;
  std::vector<std::byte> bytes(const StoredTensor& tensor) const;
  /// Of all of the file, header included.
  std::uint64_t checksum() const;
  /// Elements first, first + 1, ... as fp32; f64 is rounded. Other than floating types are refused.
  void read_floats(const StoredTensor& tensor, std::int64_t first, std::span<float> out) const;
  std::vector<float> read_floats(std::string_view name) const;

 private:
  InputFile file_;
  std::uint64_t data_at_ = 0;
  StoredTensors contents_;
  std::map<std::string, std::size_t, std::less<>> index_;
};

struct TensorDeclaration {
  std::string name;
  StoredType type = StoredType::f32;
  Extents extents;
  bool operator==(const TensorDeclaration&) const = default;
};

/// Writes a file that appears whole or not at all. The tensors are declared first; their bytes then come in that order,
/// in pieces of any size. Alignment is kept when larger element types are declared first.
class SafetensorsWriter {
 public:
  SafetensorsWriter(const std::string& path, const std::vector<TensorDeclaration>& tensors,
                    const std::map<std::string, std::string>& metadata = {});

  /// The next bytes of the data.
  void write(std::span<const std::byte> bytes);
  /// Durable at its final name; an internal error when bytes are missing.
  FileRecord finish();

 private:
  std::string path_;
  DurableFile file_;
  std::uint64_t remaining_ = 0;
};

}  // namespace quern
