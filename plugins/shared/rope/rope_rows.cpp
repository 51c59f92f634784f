#include "shared/rope/rope_rows.h"

#include <cmath>
#include <vector>

namespace quern::rope {

void make_rows(const OpInstance& op, std::int64_t begin, std::int64_t end, double turn, float* rows) {
  const std::vector<double>& frequencies = op.attributes.list("inverse_frequencies");
  const double magnitude = op.attributes.real("magnitude");
  for (std::int64_t position = begin; position < end; ++position) {
    for (const double frequency : frequencies)
      *rows++ = static_cast<float>(magnitude * std::cos(static_cast<double>(position) * frequency));
    for (const double frequency : frequencies)
      *rows++ = static_cast<float>(turn * magnitude * std::sin(static_cast<double>(position) * frequency));
  }
}

}  // namespace quern::rope
