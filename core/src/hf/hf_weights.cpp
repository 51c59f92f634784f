#include "hf/hf_weights.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <set>

#include "base/shorten.h"
#include "checkpoint/names.h"
#include "quern/error.h"

namespace quern {

namespace {

constexpr std::int64_t kPiece = std::int64_t{1} << 20;  // elements; 4 MiB of fp32
constexpr std::string_view kTiedHead = "lm_head.weight";
constexpr std::string_view kRopeBuffer = ".rotary_emb.inv_freq";  // older exports store what the config states
constexpr const char* kBelongs = "check that config.json belongs to these weights";

/// A model's packed parts in the order in which they are visited.
template <class Visit>
void for_each_part(std::span<const ParameterSpec> parameters, std::int64_t layers, Visit visit) {
  auto visit_all = [&](const ParameterSpec& parameter, std::int64_t layer) {
    std::int64_t first = 0;
    for (const ParameterPart& part : parameter.parts) {
      visit(parameter, layer, part, first);
      first += part.rows * parameter.columns();
    }
  };
  for (ParameterGroup group : {ParameterGroup::embedding, ParameterGroup::block, ParameterGroup::head}) {
    std::int64_t begin = group == ParameterGroup::block ? 0 : -1, end = group == ParameterGroup::block ? layers : 0;
    for (std::int64_t layer = begin; layer < end; ++layer)
      for (const ParameterSpec& parameter : parameters)
        if (parameter.group == group) visit_all(parameter, layer);
  }
}

bool same_bytes(WeightFiles::Tensor a, WeightFiles::Tensor b) {
  if (a.stored->type != b.stored->type || a.stored->extents != b.stored->extents) return false;
  std::vector<std::byte> left(kPiece), right(kPiece);
  for (std::uint64_t done = 0; done < a.stored->bytes; done += kPiece) {
    const auto size = static_cast<std::size_t>(std::min<std::uint64_t>(kPiece, a.stored->bytes - done));
    a.file->read(*a.stored, done, std::span(left).first(size));
    b.file->read(*b.stored, done, std::span(right).first(size));
    if (std::memcmp(left.data(), right.data(), size) != 0) return false;
  }
  return true;
}

/// Names that the model asks for, and the embedding's, which a tied head repeats.
struct Wanted {
  std::set<std::string, std::less<>> names;
  std::vector<std::string> embeddings;
};

bool may_be_ignored(const WeightFiles& files, const Wanted& wanted, const std::string& name,
                    WeightFiles::Tensor tensor) {
  if (name.ends_with(kRopeBuffer)) return true;
  if (name != kTiedHead) return false;
  for (const std::string& embedding : wanted.embeddings)
    if (same_bytes(tensor, files.find(embedding))) return true;
  throw Error(
      ErrorCode::input,
      {tensor.file->path(), "tensor " + quote_name(name) + " differs from the embedding, although the config ties them",
       "", "", "set tie_word_embeddings to false, or remove the tensor"});
}

}  // namespace

void check_hf_weights(const WeightFiles& files, std::span<const ParameterSpec> parameters, std::int64_t layers) {
  Wanted wanted;
  std::vector<std::string> missing, unknown;
  for_each_part(parameters, layers,
                [&](const ParameterSpec& parameter, std::int64_t layer, const ParameterPart& part, std::int64_t) {
                  std::string name = hf_tensor_name(part, layer);
                  if (!wanted.names.insert(name).second) fail_internal(parameter.name, "two parts are called " + name);
                  if (parameter.group == ParameterGroup::embedding) wanted.embeddings.push_back(name);
                  if (files.find(name).file == nullptr && !part.optional) missing.push_back(name);
                });
  if (!missing.empty())
    throw Error(ErrorCode::input,
                {files.path(), std::to_string(missing.size()) + " tensors are missing: " + list_names(missing), "", "",
                 kBelongs});
  for (const auto& [name, tensor] : files.tensors())
    if (wanted.names.find(name) == wanted.names.end() && !may_be_ignored(files, wanted, name, tensor))
      unknown.push_back(name);
  if (!unknown.empty())
    throw Error(ErrorCode::input, {files.path(), std::to_string(unknown.size()) + " tensors are not part of the model",
                                   list_names(unknown), "", kBelongs});
  for_each_part(
      parameters, layers,
      [&](const ParameterSpec& parameter, std::int64_t layer, const ParameterPart& part, std::int64_t) {
        WeightFiles::Tensor tensor = files.find(hf_tensor_name(part, layer));
        if (!tensor.file) return;
        Extents expected = hf_tensor_extents(parameter, part);
        if (tensor.stored->extents != expected)
          throw Error(ErrorCode::input, {tensor.file->path(), "shape of tensor " + quote_name(tensor.stored->name),
                                         to_string(tensor.stored->extents), to_string(expected), kBelongs});
        if (!is_floating(tensor.stored->type))
          throw Error(ErrorCode::input,
                      {tensor.file->path(), "type of tensor " + quote_name(tensor.stored->name),
                       std::string(name_of(tensor.stored->type)), "a floating type", "use the unquantized model"});
      });
}

namespace {

// The whole tensor is looked at, so that the message tells a stray value from a tensor that is lost.
[[noreturn]] void refuse_not_finite(WeightFiles::Tensor tensor) {
  std::vector<float> values = tensor.file->read_floats(tensor.stored->name);
  auto bad = [](float value) { return !std::isfinite(value); };
  auto first = std::find_if(values.begin(), values.end(), bad);
  throw Error(ErrorCode::input,
              {tensor.file->path(),
               std::to_string(std::count_if(first, values.end(), bad)) + " of " + std::to_string(values.size()) +
                   " elements of tensor " + quote_name(tensor.stored->name) + " are not finite, the first at element " +
                   std::to_string(first - values.begin()),
               std::to_string(*first), "finite numbers",
               "download the model again, or use another; training would only spread them"});
}

}  // namespace

std::string hf_tensor_name(const ParameterPart& part, std::int64_t layer) {
  constexpr std::string_view kPlaceholder = "{layer}";
  std::string name = part.hf_name;
  for (std::size_t at = name.find(kPlaceholder); at != std::string::npos; at = name.find(kPlaceholder, at))
    name.replace(at, kPlaceholder.size(), std::to_string(layer));
  return name;
}

Extents hf_tensor_extents(const ParameterSpec& parameter, const ParameterPart& part) {
  if (!part.shape.empty()) {
    if (element_count(part.shape) != part.rows * parameter.columns())
      fail_internal("parameter " + parameter.name, part.hf_name + " has a shape of other elements");
    return part.shape;
  }
  if (parameter.extents.size() == 1) return {part.rows};
  return part.transposed ? Extents{parameter.columns(), part.rows} : Extents{part.rows, parameter.columns()};
}

namespace {

/// Calls visit(stored index, index in the tensor) for each element.
template <class Visit>
void for_each_element(const ParameterPart& part, std::int64_t columns, Visit visit) {
  const auto group = static_cast<std::int64_t>(part.row_order.size());
  for (std::int64_t row = 0; row < part.rows; ++row) {
    const std::int64_t of =
        group == 0 ? row : row - row % group + part.row_order[static_cast<std::size_t>(row % group)];
    for (std::int64_t column = 0; column < columns; ++column)
      visit(static_cast<std::size_t>(row * columns + column),
            static_cast<std::size_t>(part.transposed ? column * part.rows + of : of * columns + column));
  }
}

}  // namespace

std::vector<float> hf_tensor_values(const ParameterPart& part, std::int64_t columns, const std::vector<float>& stored) {
  std::vector<float> tensor(stored.size());
  for_each_element(part, columns, [&](std::size_t at, std::size_t in_tensor) {
    tensor[in_tensor] = static_cast<float>(stored[at] - part.offset);
  });
  return tensor;
}

std::vector<float> stored_values(const ParameterPart& part, std::int64_t columns, const std::vector<float>& tensor) {
  std::vector<float> stored(tensor.size());
  for_each_element(part, columns, [&](std::size_t at, std::size_t in_tensor) {
    stored[at] = static_cast<float>(tensor[in_tensor] + part.offset);
  });
  return stored;
}

void read_hf_part(const WeightFiles& files, const ParameterSpec& parameter, const ParameterPart& part,
                  std::int64_t layer, std::int64_t first, std::span<float> values) {
  const WeightFiles::Tensor tensor = files.find(hf_tensor_name(part, layer));
  if (part.as_stored()) {
    tensor.file->read_floats(*tensor.stored, first, values);
  } else {
    const std::vector<float> stored =
        stored_values(part, parameter.columns(), tensor.file->read_floats(tensor.stored->name));
    std::copy(stored.begin(), stored.end(), values.begin());
  }
  if (!std::all_of(values.begin(), values.end(), [](float value) { return std::isfinite(value); }))
    refuse_not_finite(tensor);
}

}  // namespace quern
