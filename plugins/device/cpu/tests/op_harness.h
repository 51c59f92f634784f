#pragma once
// For tests: runs one op of this device on views as the engine would, and compares with references in double precision.

#include <omp.h>

#include <cmath>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include "quern/testkit/compare.h"
#include "runtime/kernels.h"

namespace quern::cpu::harness {

using testkit::PoisonedTensor;
using testkit::random_normal;
using Doubles = std::vector<double>;

inline OpTable all_ops() {
  OpTable table;
  add_norm_ops(table);
  add_rope_ops(table);
  add_elementwise_ops(table);
  add_optimizer_ops(table);
  return table;
}

/// One op instance being put together, with the memory it will run on.
class OpRun {
 public:
  explicit OpRun(std::string kind, Attributes attributes = {}, Geometry geometry = {}) {
    op_.kind = std::move(kind);
    op_.attributes = std::move(attributes);
    op_.geometry = geometry;
  }
  OpRun& in(const View& view) {
    op_.inputs.push_back({view.dtype, view.extents, true, false});
    inputs_.push_back(view);
    return *this;
  }
  OpRun& out(const View& view, bool accumulate = false) {
    op_.outputs.push_back({view.dtype, view.extents, true, accumulate});
    outputs_.push_back(view);
    return *this;
  }
  /// An output that nobody reads: no memory, but a dtype to which its value is rounded.
  OpRun& unread(DType dtype, Extents extents) {
    op_.outputs.push_back({dtype, std::move(extents), false, false});
    outputs_.push_back({});
    return *this;
  }
  std::string refusal() const { return all_ops().at(op_.kind).query(op_).refusal; }
  /// Runs once in a poisoned workspace of the stated size, whose end is watched.
  void run() const {
    OpTable table = all_ops();
    const CpuOp& entry = table.at(op_.kind);
    OpSupport support = entry.query(op_);
    REQUIRE(support.refusal == "");
    constexpr double kGuard = 12345.0;
    std::vector<double> workspace((support.workspace_bytes + 7) / 8 + 1, std::nan(""));
    workspace.back() = kGuard;
    entry.prepare(op_)(inputs_, outputs_, Exec{{}, workspace.data()});
    CHECK(workspace.back() == kGuard);
  }

 private:
  OpInstance op_;
  std::vector<View> inputs_, outputs_;
};

inline PoisonedTensor normal(DType dtype, Extents extents, std::uint64_t seed, double mean = 0, double deviation = 1) {
  std::vector<float> values = random_normal(element_count(extents), seed, deviation);
  for (float& value : values) value += static_cast<float>(mean);
  return PoisonedTensor(dtype, std::move(extents), values);
}

/// What a failing case names.
inline std::string label(DType dtype, const Extents& size) {
  return std::string(name_of(dtype)) + " " + to_string(size);
}

/// A copy with memory of its own.
inline PoisonedTensor copy_of(const View& view) {
  PoisonedTensor copy(view.dtype, view.extents);
  std::memcpy(copy.view().data, view.data, view.bytes());
  return copy;
}

inline Doubles doubles(const View& view) {
  std::vector<float> floats = testkit::to_floats(view);
  return Doubles(floats.begin(), floats.end());
}

/// Empty when `got` is `want` rounded to got's dtype. Values are of order one and sums have a few hundred terms at
/// most, so fp32 arithmetic errs by less than `slack`, relative or absolute; storing as bf16 adds half an ulp, 2^-8 of
/// the value.
inline std::string compare(const View& got, const Doubles& want, double slack = 1e-5) {
  std::vector<float> rounded(want.begin(), want.end());
  return testkit::mismatch(testkit::to_floats(got), rounded, slack + (got.dtype == DType::bf16 ? 0x1p-8 : 0.0), slack);
}

/// Empty when both views hold the same bytes.
inline std::string difference(const View& got, const View& want) {
  if (got.bytes() != want.bytes()) return "sizes differ";
  for (std::size_t i = 0; i < got.bytes(); ++i) {
    if (got.as<unsigned char>()[i] == want.as<unsigned char>()[i]) continue;
    std::size_t at = i / size_of(got.dtype);
    return "element " + std::to_string(at) + " differs: got " + std::to_string(testkit::to_floats(got)[at]) +
           ", want " + std::to_string(testkit::to_floats(want)[at]);
  }
  return {};
}

/// d loss / d at[i] by central differences: with double precision and this step, good to about 1e-9.
inline Doubles numeric_gradient(const std::function<double(const Doubles&)>& loss, Doubles at) {
  constexpr double kStep = 1e-5;
  Doubles gradient(at.size());
  for (std::size_t i = 0; i < at.size(); ++i) {
    double value = at[i];
    at[i] = value + kStep;
    double above = loss(at);
    at[i] = value - kStep;
    gradient[i] = (above - loss(at)) / (2 * kStep);
    at[i] = value;
  }
  return gradient;
}

inline double dot(const Doubles& a, const Doubles& b) {
  double sum = 0;
  for (std::size_t i = 0; i < a.size(); ++i) sum += a[i] * b[i];
  return sum;
}

inline Doubles plus(Doubles a, const Doubles& b) {
  for (std::size_t i = 0; i < a.size(); ++i) a[i] += b[i];
  return a;
}

/// Sets the number of OpenMP threads, and puts the old one back.
class Threads {
 public:
  explicit Threads(int count) : before_(omp_get_max_threads()) { omp_set_num_threads(count); }
  ~Threads() { omp_set_num_threads(before_); }
  Threads(const Threads&) = delete;
  Threads& operator=(const Threads&) = delete;

 private:
  int before_;
};

}  // namespace quern::cpu::harness
