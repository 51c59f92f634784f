#include "quern/testkit/tensor_sums.h"

#include <algorithm>
#include <cstring>
#include <span>
#include <vector>

#include "quern/testkit/compare.h"
#include "quern/testkit/device_memory.h"

namespace quern::testkit {

namespace {

constexpr std::size_t kTensors = 1000;
constexpr std::size_t kLists[] = {1, 447, 448, 449, kTensors};
constexpr std::size_t kUneven[] = {1, 2, 299, 3, 64, 256, 257};  // repeated until all tensors are in a list

std::int64_t size_of_tensor(std::size_t i) {
  if (i == 3 || i == 700) return 300001;
  if (i == 17 || i == 446) return 65536;
  if (i % 50 == 5) return static_cast<std::int64_t>(i % 2);
  return static_cast<std::int64_t>(i * i * 7 % 1000);
}

/// Tensors in device memory, one behind the other.
class Tensors {
 public:
  Tensors(Device& device, DType dtype, std::size_t alignment)
      : values_(dtype, {kMost}, random_normal(kMost, 11, 100, dtype)),
        dtype_(dtype),
        alignment_(std::max(alignment, size_of(dtype))),
        memory_(device, layout()) {
    const Stream stream = device.stream(StreamKind::compute);
    for (std::size_t i = 0; i < kTensors; ++i) {
      const View to = view(i);  // each tensor begins elsewhere among the values
      device.copy(to.data, values_.view().as<char>() + i * size_of(dtype), to.bytes(), stream);
    }
    device.synchronize(stream);
  }
  View view(std::size_t i) const {
    return {static_cast<char*>(memory_.data()) + begin_[i], dtype_, {size_of_tensor(i)}};
  }

 private:
  static constexpr std::int64_t kMost = 300001 + kTensors;

  std::size_t layout() {
    std::size_t bytes = 0;
    for (std::size_t i = 0; i < kTensors; ++i) {
      begin_.push_back(bytes);
      bytes += static_cast<std::size_t>(size_of_tensor(i)) * size_of(dtype_);
      bytes = (bytes + alignment_ - 1) / alignment_ * alignment_;
    }
    return bytes;
  }

  PoisonedTensor values_;
  DType dtype_;
  std::size_t alignment_;
  std::vector<std::size_t> begin_;
  DeviceMemory memory_;
};

std::vector<double> sums_of(Device& device, const std::vector<View>& tensors) {
  OpInstance op{"sum_squares", {}, {{DType::f64, {static_cast<std::int64_t>(tensors.size())}, true, false}}, {}, {}};
  for (const View& x : tensors) op.inputs.push_back({x.dtype, x.extents, true, false});
  DeviceMemory workspace(device, device.query(op).workspace_bytes), sums(device, tensors.size() * sizeof(double));
  const View out{sums.data(), DType::f64, op.outputs[0].extents};
  const Stream stream = device.stream(StreamKind::compute);
  device.prepare(op)->launch(tensors, std::span(&out, 1), {stream, workspace.data()});
  device.synchronize(stream);
  std::vector<double> result(tensors.size());
  sums.read(result.data());
  return result;
}

std::vector<std::size_t> uneven_lists() {
  std::vector<std::size_t> lengths;
  for (std::size_t done = 0; done < kTensors; done += lengths.back())
    lengths.push_back(std::min(kUneven[lengths.size() % std::size(kUneven)], kTensors - done));
  return lengths;
}

}  // namespace

OpInstance sum_of_one_tensor(DType dtype) {
  return {"sum_squares", {{dtype, {size_of_tensor(1)}, true, false}}, {{DType::f64, {1}, true, false}}, {}, {}};
}

std::string tensor_sums_fault(Device& device, DType dtype, std::size_t alignment) {
  std::vector<double> alone;
  {
    const Tensors tensors(device, dtype, device.traits().alignment);
    for (std::size_t i = 0; i < kTensors; ++i) alone.push_back(sums_of(device, {tensors.view(i)})[0]);
  }
  const Tensors tensors(device, dtype, alignment);
  auto fault_of = [&](std::size_t first, std::size_t count) -> std::string {
    std::vector<View> list;
    for (std::size_t i = first; i < first + count; ++i) list.push_back(tensors.view(i));
    const std::vector<double> sums = sums_of(device, list);
    for (std::size_t i = 0; i < count; ++i)
      if (std::memcmp(&sums[i], &alone[first + i], sizeof(double)) != 0)
        return "tensor " + std::to_string(first + i) + " of " + std::to_string(size_of_tensor(first + i)) +
               " elements, in a list of " + std::to_string(count) + ": got " + std::to_string(sums[i]) + ", want " +
               std::to_string(alone[first + i]) + " as alone";
    return {};
  };
  for (std::size_t count : kLists)
    if (std::string fault = fault_of(0, count); !fault.empty()) return fault;
  std::size_t first = 0;
  for (std::size_t count : uneven_lists()) {
    if (std::string fault = fault_of(first, count); !fault.empty()) return fault;
    first += count;
  }
  return {};
}

}  // namespace quern::testkit
