#pragma once
// For tests: runs one op through the device as the engine does (query, workspace, prepare, launch).

#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "quern/testkit/compare.h"
#include "runtime/cpu_device.h"

namespace quern::cpu {

/// A view without data is an absent input or an output nobody reads.
struct TestOp {
  std::string kind;
  std::vector<View> inputs;
  std::vector<View> outputs;
  Attributes attributes = {};
  Geometry geometry = {};
  bool accumulate = false;  ///< of all outputs that are there

  OpInstance instance() const {
    OpInstance op{kind, {}, {}, attributes, geometry};
    for (const View& view : inputs) op.inputs.push_back({view.dtype, view.extents, static_cast<bool>(view), false});
    for (const View& view : outputs)
      op.outputs.push_back({view.dtype, view.extents, static_cast<bool>(view), accumulate && view});
    return op;
  }

  std::string refusal() const { return CpuDevice({}).query(instance()).refusal; }

  void run(std::int64_t threads = 0) const {
    CpuDevice device({.threads = threads});
    device.open(0);
    const OpInstance op = instance();
    testkit::PoisonedTensor workspace(DType::u8, {static_cast<std::int64_t>(device.query(op).workspace_bytes)});
    std::vector<View> written = outputs;
    for (View& view : written) {
      if (!view) view = View{};
    }
    const Stream stream = device.stream(StreamKind::compute);
    device.prepare(op)->launch(inputs, written, {stream, workspace.view().data});
    device.synchronize(stream);
  }
};

inline View absent(DType dtype = DType::f32, Extents extents = {}) { return {nullptr, dtype, std::move(extents)}; }

inline testkit::PoisonedTensor random_tensor(DType dtype, Extents extents, std::uint64_t seed, double deviation = 1.0) {
  std::int64_t count = element_count(extents);
  return {dtype, std::move(extents), testkit::random_normal(count, seed, deviation)};
}

inline testkit::PoisonedTensor integer_tensor(const std::vector<std::int32_t>& values) {
  testkit::PoisonedTensor tensor(DType::i32, {static_cast<std::int64_t>(values.size())});
  std::copy(values.begin(), values.end(), tensor.view().as<std::int32_t>());
  return tensor;
}

inline std::vector<double> doubles(const testkit::PoisonedTensor& tensor) {
  std::vector<float> values = tensor.floats();
  return {values.begin(), values.end()};
}

/// Half a unit in the last place, relative: what rounding a reference in double precision to `dtype` may change.
inline double rounding(DType dtype) { return dtype == DType::bf16 ? 0x1p-8 : dtype == DType::f32 ? 0x1p-23 : 0; }

/// mismatch() against a reference in double precision, rounding to the tensor's dtype allowed, plus `slack`.
inline std::string compare(const testkit::PoisonedTensor& got, const std::vector<double>& want, double slack) {
  std::vector<float> floats(want.begin(), want.end());
  return testkit::mismatch(got.floats(), floats, rounding(got.view().dtype), slack);
}

}  // namespace quern::cpu
