#include <algorithm>

#include "quern/data_source.h"

namespace quern {

void Batch::discount(std::int64_t first, const Geometry& geometry) {
  const auto count = static_cast<std::int64_t>(targets.size());
  // A row counts if its first token does.
  const std::int64_t from = count == geometry.tokens() ? first : (first + geometry.sequence - 1) / geometry.sequence;
  std::fill(targets.begin() + std::min(from, count), targets.end(), -1);
}

}  // namespace quern
