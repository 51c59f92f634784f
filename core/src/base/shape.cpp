#include "quern/shape.h"

#include <cstdlib>

#include "quern/error.h"

namespace quern {

Extents extents_at(const Shape& shape, const Geometry& geometry) {
  Extents extents;
  extents.reserve(shape.size());
  for (const Dim& dim : shape) {
    extents.push_back(dim.at(geometry));
    if (extents.back() < 0)
      throw Error(ErrorCode::config, {.where = "train.sequence",
                                      .what = "fewer tokens in a row than the model adds",
                                      .found = std::to_string(geometry.sequence) + ", of a value " + to_string(shape)});
  }
  return extents;
}

Extents fixed_extents(const Shape& shape) {
  for (const Dim& dim : shape)
    if (!dim.is_fixed()) fail_internal("shape", to_string(shape) + " depends on the micro-batch");
  return extents_at(shape, {});
}

std::int64_t element_count(const Extents& extents) {
  std::int64_t count = 1;
  for (std::int64_t extent : extents) count = checked_product(count, extent);
  return count;
}

std::int64_t byte_count(const Extents& extents, DType dtype) {
  return checked_product(element_count(extents), static_cast<std::int64_t>(size_of(dtype)));
}

std::string to_string(const Shape& shape) {
  std::string text = "(";
  for (const Dim& dim : shape) {
    if (text.size() > 1) text += ", ";
    std::string terms;
    auto add = [&](std::int64_t count, const char* unit) {
      if (count == 0) return;
      if (!terms.empty()) terms += count < 0 ? " - " : " + ";
      const std::int64_t size = terms.empty() ? count : std::abs(count);
      terms += size == 1 ? unit : std::to_string(size) + " " + unit;
    };
    add(dim.per_token, "N");
    add(dim.per_row, "B");
    if (dim.fixed != 0 || dim.is_fixed()) terms += (terms.empty() ? "" : " + ") + std::to_string(dim.fixed);
    text += terms;
  }
  return text + ")";
}

std::string to_string(const Extents& extents) { return to_string(Shape(extents.begin(), extents.end())); }

}  // namespace quern
