#pragma once
// Comparison of tensors with a message that names the worst element: index, got, want.

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "quern/view.h"

namespace quern::testkit {

/// Empty when every |got - want| <= absolute + relative * |want| and NaNs coincide; else a text naming the worst
/// element and the number of bad ones.
std::string mismatch(std::span<const float> got, std::span<const float> want, double relative, double absolute = 0);

/// ||got - want|| / ||want||, NaN when either has one.
double relative_error(std::span<const float> got, std::span<const float> want);

/// All elements of a view of any real dtype, as floats.
std::vector<float> to_floats(const View& view);

/// Memory of a view, owned: filled with bytes 0xFF (NaN in every float format) so that unwritten outputs show.
class PoisonedTensor {
 public:
  PoisonedTensor(DType dtype, Extents extents);
  /// Filled with `values`, rounded to dtype.
  PoisonedTensor(DType dtype, Extents extents, std::span<const float> values);
  PoisonedTensor(const PoisonedTensor& other) : memory_(other.memory_), view_(other.view_) {
    view_.data = memory_.data();
  }
  PoisonedTensor(PoisonedTensor&& other) noexcept = default;
  PoisonedTensor& operator=(PoisonedTensor other) noexcept {
    memory_.swap(other.memory_);
    view_ = other.view_;
    view_.data = memory_.data();
    return *this;
  }
  const View& view() const { return view_; }
  std::vector<float> floats() const { return to_floats(view_); }

 private:
  std::vector<std::uint64_t> memory_;
  View view_;
};

/// `count` reproducible normal numbers times `deviation`, rounded to `dtype`'s grid.
std::vector<float> random_normal(std::int64_t count, std::uint64_t seed, double deviation = 1.0,
                                 DType dtype = DType::f32);

}  // namespace quern::testkit
