#include "quern/shape.h"

namespace quern {

Extents extents_at(const Shape& shape, std::int64_t tokens) {
  Extents extents;
  extents.reserve(shape.size());
  for (const Dim& dim : shape) extents.push_back(dim.at(tokens));
  return extents;
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
    if (dim.per_token == 0) {
      text += std::to_string(dim.fixed);
      continue;
    }
    text += dim.per_token == 1 ? "N" : std::to_string(dim.per_token) + " N";
    if (dim.fixed != 0) text += " + " + std::to_string(dim.fixed);
  }
  return text + ")";
}

std::string to_string(const Extents& extents) { return to_string(Shape(extents.begin(), extents.end())); }

}  // namespace quern
