#include "engine/batch_inputs.h"

#include <algorithm>
#include <cstring>
#include <span>

#include "program/names.h"
#include "quern/error.h"

namespace quern {

namespace {

// Kernels trust the offsets, so a data source that gives others is stopped here.
void check_documents(const std::vector<std::int32_t>& starts, const Geometry& geometry) {
  bool good = starts.size() > 1 && starts.front() == 0 && starts.back() == geometry.tokens();
  for (std::size_t i = 1; good && i < starts.size(); ++i)
    good = starts[i - 1] < starts[i] && starts[i] <= (starts[i - 1] / geometry.sequence + 1) * geometry.sequence;
  if (!good)
    fail_internal("engine",
                  "the batch's documents are not ascending offsets from 0 to the number of tokens, one at "
                  "the start of each row");
}

/// As the op takes them: as many as there are tokens, and one.
std::vector<std::int32_t> all_documents(const Batch& batch, const Geometry& geometry) {
  std::vector<std::int32_t> documents = batch.documents;
  if (!documents.empty())
    check_documents(documents, geometry);
  else  // one document a row
    for (std::int64_t row = 0; row <= geometry.batch; ++row)
      documents.push_back(static_cast<std::int32_t>(row * geometry.sequence));
  documents.resize(static_cast<std::size_t>(geometry.tokens()) + 1, static_cast<std::int32_t>(geometry.tokens()));
  return documents;
}

std::span<const std::byte> elements_of(const Batch& batch, const std::string& name) {
  if (name == names::kTokens) return std::as_bytes(std::span(batch.tokens));
  if (name == names::kTargets) return std::as_bytes(std::span(batch.targets));
  if (name == names::kPositions) return std::as_bytes(std::span(batch.positions));
  auto found = batch.inputs.find(name);
  return found == batch.inputs.end() ? std::span<const std::byte>{} : std::span<const std::byte>(found->second);
}

void check_size(const Value& input, const Extents& extents, std::size_t bytes) {
  if (static_cast<std::int64_t>(bytes) == byte_count(extents, input.dtype)) return;
  const std::string wanted = to_string(extents) + " " + std::string(name_of(input.dtype));
  throw Error(ErrorCode::config,
              {.where = "input " + input.name,
               .what = bytes == 0 ? "the data do not give it" : "the data give it in another size than the model reads",
               .found = bytes == 0 ? "" : std::to_string(bytes / size_of(input.dtype)) + " elements in a micro-batch",
               .expected = wanted,
               .next = "use data and a model that are made for each other"});
}

void check_bound(const Value& input, std::span<const std::byte> bytes) {
  if (input.below == 0 || input.dtype != DType::i32) return;
  const std::int32_t least = input.name == names::kTargets ? -1 : 0;
  const auto* values = reinterpret_cast<const std::int32_t*>(bytes.data());
  for (std::size_t i = 0; i < bytes.size() / sizeof *values; ++i)
    if (values[i] < least || values[i] >= input.below)
      throw Error(ErrorCode::input, {.where = "input " + input.name,
                                     .what = "element " + std::to_string(i) + " of a micro-batch is out of range",
                                     .found = std::to_string(values[i]),
                                     .expected = std::to_string(least) + " to " + std::to_string(input.below - 1),
                                     .next = "use data and a model that are made for each other"});
}

}  // namespace

std::byte* put_inputs(const Plan& plan, const Batch& batch, std::byte* to) {
  const Geometry& geometry = plan.options.geometry;
  std::vector<std::int32_t> documents;
  for (const Value& input : plan.uploaded) {
    if (input.name == names::kStep) continue;
    std::span<const std::byte> elements = elements_of(batch, input.name);
    if (input.name == names::kDocuments) {
      documents = all_documents(batch, geometry);
      elements = std::as_bytes(std::span(documents));
    }
    check_size(input, extents_at(input.shape, geometry), elements.size());
    check_bound(input, elements);
    to = std::copy(elements.begin(), elements.end(), to);
  }
  return to;
}

}  // namespace quern
