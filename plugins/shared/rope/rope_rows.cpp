#include "shared/rope/rope_rows.h"

#include <cmath>
#include <vector>

namespace quern::rope {

void make_rows(const OpInstance& op, std::int64_t begin, std::int64_t end, double turn, float* rows) {
  const bool is_long = op.attributes.has("long_beyond") && op.geometry.sequence > op.attributes.integer("long_beyond");
  const std::vector<double>& frequencies =
      op.attributes.list(is_long ? "long_inverse_frequencies" : "inverse_frequencies");
  const double magnitude = op.attributes.real("magnitude");
  auto scale = [&](double frequency) { return frequency == 0 ? 1 : magnitude; };
  for (std::int64_t position = begin; position < end; ++position) {
    for (const double frequency : frequencies)
      *rows++ = static_cast<float>(scale(frequency) * std::cos(static_cast<double>(position) * frequency));
    for (const double frequency : frequencies)
      *rows++ = static_cast<float>(turn * scale(frequency) * std::sin(static_cast<double>(position) * frequency));
  }
}

}  // namespace quern::rope
