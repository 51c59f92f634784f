#pragma once
// For tests: runs one op of this device on views as the engine would, and compares with references in double precision.

#include <omp.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include "quern/testkit/compare.h"
#include "runtime/cpu_device.h"

namespace quern::cpu::harness {

using testkit::PoisonedTensor;
using testkit::random_normal;
using Doubles = std::vector<double>;

/// Open devices by their number of threads: to open one takes longer than most ops.
inline std::unique_ptr<CpuDevice>& device_of(std::int64_t threads) {
  static std::map<std::int64_t, std::unique_ptr<CpuDevice>> devices;
  std::unique_ptr<CpuDevice>& device = devices[threads];
  if (device == nullptr) {
    device = std::make_unique<CpuDevice>(CpuOptions{.threads = threads});
    device->open(0);
  }
  return device;
}

/// A view without data is an absent input or an unread output.
struct TestOp {
  std::string kind;
  std::vector<View> inputs = {};
  std::vector<View> outputs = {};
  Attributes attributes = {};
  Geometry geometry = {};
  std::uint32_t accumulate = 0;  ///< bit i: output i is added to, if it is there

  OpInstance instance() const {
    OpInstance op{kind, {}, {}, attributes, geometry};
    for (const View& view : inputs) op.inputs.push_back({view.dtype, view.extents, static_cast<bool>(view), false});
    for (const View& view : outputs)
      op.outputs.push_back(
          {view.dtype, view.extents, static_cast<bool>(view), view && (accumulate >> op.outputs.size() & 1) != 0});
    return op;
  }

  std::string refusal() const { return CpuDevice({}).query(instance()).refusal; }

  /// Runs once, as the engine would, in a poisoned workspace of the stated size whose end is watched.
  void run(std::int64_t threads = 0) const {
    std::unique_ptr<CpuDevice>& opened = device_of(threads);
    CpuDevice& device = *opened;
    const OpInstance op = instance();
    constexpr std::int64_t kGuard = 8;
    const auto bytes = static_cast<std::int64_t>(device.query(op).workspace_bytes);
    PoisonedTensor workspace(DType::u8, {bytes + kGuard});
    std::vector<View> written = outputs;
    for (View& view : written)
      if (!view) view = View{};
    const Stream stream = device.stream(StreamKind::compute);
    try {
      device.prepare(op)->launch(inputs, written, {stream, workspace.view().data});
      device.synchronize(stream);
    } catch (...) {
      opened.reset();  // its stream holds the error
      throw;
    }
    const auto* end = workspace.view().as<std::uint8_t>() + bytes;
    CHECK(std::count(end, end + kGuard, std::uint8_t{0xFF}) == kGuard);
  }
};

/// The same, put together operand by operand.
struct OpRun : TestOp {
  explicit OpRun(std::string name, Attributes with = {}, Geometry at = {})
      : TestOp{.kind = std::move(name), .attributes = std::move(with), .geometry = at} {}
  OpRun& in(const View& view) {
    inputs.push_back(view);
    return *this;
  }
  OpRun& out(const View& view, bool added = false) {
    accumulate |= std::uint32_t{added} << outputs.size();
    outputs.push_back(view);
    return *this;
  }
  /// An unread output: no memory, but a dtype to which its value is rounded.
  OpRun& unread(DType dtype, Extents extents) { return out({nullptr, dtype, std::move(extents)}); }
};

inline View absent(DType dtype = DType::f32, Extents extents = {}) { return {nullptr, dtype, std::move(extents)}; }

inline PoisonedTensor normal(DType dtype, Extents extents, std::uint64_t seed, double mean = 0, double deviation = 1) {
  std::vector<float> values = random_normal(element_count(extents), seed, deviation);
  for (float& value : values) value += static_cast<float>(mean);
  return PoisonedTensor(dtype, std::move(extents), values);
}

inline PoisonedTensor integer_tensor(const std::vector<std::int32_t>& values) {
  PoisonedTensor tensor(DType::i32, {static_cast<std::int64_t>(values.size())});
  std::copy(values.begin(), values.end(), tensor.view().as<std::int32_t>());
  return tensor;
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

inline Doubles doubles(const PoisonedTensor& tensor) { return doubles(tensor.view()); }

/// Empty when `got` is `want` rounded to got's dtype, but for `absolute` and `relative` errors. Storing as bf16 adds
/// half an ulp, 2^-8 of the value, and as f32 less than 2^-23. By default: values are of order one and sums have a few
/// hundred terms at most, so that fp32 arithmetic errs by less than 1e-5 of both.
inline std::string compare(const View& got, const Doubles& want, double absolute, double relative) {
  if (got.dtype == DType::bf16) relative += 0x1p-8;
  if (got.dtype == DType::f32) relative = std::max(relative, 0x1p-23);
  std::vector<float> rounded(want.begin(), want.end());
  return testkit::mismatch(testkit::to_floats(got), rounded, relative, absolute);
}
inline std::string compare(const View& got, const Doubles& want, double slack = 1e-5) {
  return compare(got, want, slack, slack);
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
