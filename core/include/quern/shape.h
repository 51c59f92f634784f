#pragma once
// Shapes of program values. The size of a micro-batch is not known when a model writes its program, so a dimension is
// `fixed + per_token * tokens + per_row * rows`; a Geometry gives the numbers when the program is instantiated.

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "quern/checked.h"
#include "quern/dtype.h"

namespace quern {

/// Size of one micro-batch: `batch` sequences of `sequence` tokens each, token-major in memory.
struct Geometry {
  std::int64_t batch = 1;
  std::int64_t sequence = 1;
  std::int64_t tokens() const { return checked_product(batch, sequence); }
  bool operator==(const Geometry&) const = default;
};

struct Dim {
  std::int64_t fixed = 0;
  std::int64_t per_token = 0;
  std::int64_t per_row = 0;  ///< a row is one sequence of the micro-batch; below 0: less than all tokens

  Dim() = default;
  Dim(std::int64_t size) : fixed(size) {}  // NOLINT: a plain number is a dimension
  static Dim tokens(std::int64_t per_token = 1, std::int64_t plus = 0) {
    Dim dim(plus);
    dim.per_token = per_token;
    return dim;
  }
  static Dim rows(std::int64_t per_row = 1) {
    Dim dim;
    dim.per_row = per_row;
    return dim;
  }
  bool is_fixed() const { return per_token == 0 && per_row == 0; }
  std::int64_t at(const Geometry& geometry) const {
    const std::int64_t varies = is_fixed() ? 0
                                           : checked_sum(checked_product(per_token, geometry.tokens()),
                                                         checked_product(per_row, geometry.batch));
    return checked_sum(fixed, varies);
  }
  bool operator==(const Dim&) const = default;
};

using Shape = std::vector<Dim>;
/// A shape with numbers.
using Extents = std::vector<std::int64_t>;

Extents extents_at(const Shape& shape, const Geometry& geometry);
/// Of a shape that is the same for every micro-batch.
Extents fixed_extents(const Shape& shape);
std::int64_t element_count(const Extents& extents);
std::int64_t byte_count(const Extents& extents, DType dtype);
/// "(N, 896)", N being the tokens and B the rows; "(8192, 896)" for extents.
std::string to_string(const Shape& shape);
std::string to_string(const Extents& extents);

}  // namespace quern
