#include "checkpoint/tensor_files.h"

#include <algorithm>

#include "base/shorten.h"
#include "quern/error.h"

namespace quern {

TensorFiles::TensorFiles(const std::vector<std::string>& paths) {
  files_.reserve(paths.size());
  for (const std::string& path : paths) files_.emplace_back(path);
  for (std::size_t file = 0; file < files_.size(); ++file)
    for (const StoredTensor& stored : files_[file].tensors()) add(file, stored);
}

void TensorFiles::add(std::size_t file, const StoredTensor& stored) {
  const auto [known, is_new] = index_.emplace(stored.name, tensors_.size());
  if (is_new) {
    tensors_.push_back(stored);
    parts_.push_back({{file, &stored, 0}});
    return;
  }
  StoredTensor& whole = tensors_[known->second];
  auto refuse = [&](const std::string& found, const std::string& expected) {
    throw Error(ErrorCode::input,
                {files_[file].path(),
                 "its rows of tensor " + quote_name(stored.name) + " do not continue the rows of the files before it",
                 found, expected, "resume from an older checkpoint"});
  };
  if (whole.type != stored.type) refuse(std::string(name_of(stored.type)), std::string(name_of(whole.type)));
  Extents rows = whole.extents;
  if (!rows.empty() && !stored.extents.empty()) rows[0] = stored.extents[0];
  if (rows.empty() || rows != stored.extents)
    refuse(printable(to_string(stored.extents), 60), "rows of " + printable(to_string(whole.extents), 60));
  parts_[known->second].push_back({file, &stored, whole.bytes});
  if (__builtin_add_overflow(whole.extents[0], rows[0], &whole.extents[0]) || !stored_bytes(whole.type, whole.extents))
    refuse(printable(to_string(stored.extents), 60), "a size that fits into 63 bits");
  whole.bytes += stored.bytes;
}

const StoredTensor* TensorFiles::find(std::string_view name) const {
  auto found = index_.find(name);
  return found == index_.end() ? nullptr : &tensors_[found->second];
}

const StoredTensor& TensorFiles::at(std::string_view name) const {
  const StoredTensor* tensor = find(name);
  if (tensor == nullptr)
    throw Error(ErrorCode::input,
                {files_.empty() ? "" : files_[0].path(), "no tensor " + quote_name(name), "", "", ""});
  return *tensor;
}

// Calls visit(file, its tensor, first byte there, bytes, byte of the range).
template <class Visit>
void TensorFiles::for_each_part(const StoredTensor& tensor, std::uint64_t first, std::uint64_t bytes,
                                const Visit& visit) const {
  if (first > tensor.bytes || bytes > tensor.bytes - first)
    fail_internal("checkpoint", "read past the end of tensor " + quote_name(tensor.name));
  for (const Part& part : parts_[index_.find(tensor.name)->second]) {
    const std::uint64_t begin = std::max(first, part.first);
    const std::uint64_t end = std::min(first + bytes, part.first + part.stored->bytes);
    if (begin < end) visit(files_[part.file], *part.stored, begin - part.first, end - begin, begin - first);
  }
}

void TensorFiles::read(const StoredTensor& tensor, std::uint64_t first, std::span<std::byte> out) const {
  for_each_part(tensor, first, out.size(),
                [&](const SafetensorsFile& file, const StoredTensor& stored, std::uint64_t from, std::uint64_t bytes,
                    std::uint64_t at) { file.read(stored, from, out.subspan(at, bytes)); });
}

std::vector<std::byte> TensorFiles::bytes(const StoredTensor& tensor) const {
  std::vector<std::byte> bytes(tensor.bytes);
  read(tensor, 0, bytes);
  return bytes;
}

void TensorFiles::read_floats(const StoredTensor& tensor, std::int64_t first, std::span<float> out) const {
  const std::uint64_t size = size_of(tensor.type);
  for_each_part(tensor, static_cast<std::uint64_t>(first) * size, out.size() * size,
                [&](const SafetensorsFile& file, const StoredTensor& stored, std::uint64_t from, std::uint64_t bytes,
                    std::uint64_t at) {
                  file.read_floats(stored, static_cast<std::int64_t>(from / size),
                                   out.subspan(at / size, bytes / size));
                });
}

std::vector<float> TensorFiles::read_floats(std::string_view name) const {
  const StoredTensor& tensor = at(name);
  std::vector<float> values(static_cast<std::size_t>(tensor.count()));
  read_floats(tensor, 0, values);
  return values;
}

}  // namespace quern
