#pragma once
// For tests: runs an op on the CPU device, the oracle, and on the GPU, from equal inputs and poisoned outputs, and
// compares. On the GPU it runs eagerly, again, and captured: all three must give the same bits, and no byte behind an
// operand may change.

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include "quern/device.h"
#include "quern/testkit/compare.h"

namespace quern::cuda {

/// |got - want| <= absolute + relative * |want|.
struct Tolerance {
  double relative = 0, absolute = 0;
};

/// Both devices, open.
struct DevicePair {
  std::unique_ptr<Device> cpu, gpu;
};
/// Empty, after a message "skipped: <reason>", where no GPU can be opened.
std::optional<DevicePair> open_pair();

/// `QUERN_GPU_OR_SKIP(pair);` declares the pair, or leaves the test case.
#define QUERN_GPU_OR_SKIP(pair)                                               \
  std::optional<::quern::cuda::DevicePair> pair = ::quern::cuda::open_pair(); \
  if (!pair) return

/// One op instance being put together, with the operands it will run on.
class OpComparison {
 public:
  explicit OpComparison(std::string kind, Attributes attributes = {}, Geometry geometry = {});

  OpComparison& in(testkit::PoisonedTensor tensor);
  OpComparison& absent();
  OpComparison& out(DType dtype, Extents extents, Tolerance tolerance);
  /// An output that starts with random numbers and is added to.
  OpComparison& sum(DType dtype, Extents extents, Tolerance tolerance);
  /// An output that nobody reads: no memory, but a dtype to which its value is rounded.
  OpComparison& unread(DType dtype, Extents extents);
  /// An output that is input `i`, updated in place.
  OpComparison& update(std::size_t i, Tolerance tolerance);

  /// Checks all outputs. An instance that the GPU refuses is a failure.
  void run(DevicePair& devices) const;
  const OpInstance& instance() const { return op_; }
  std::string label() const;

 private:
  struct Output {
    Tolerance tolerance;
    int updates = -1;  ///< input that it is, or -1
    int initial = -1;  ///< tensor in initial_ that it is added to, or -1
  };
  using Results = std::vector<testkit::PoisonedTensor>;
  enum class How { eager, captured };
  Results run_on(Device& device, How how) const;

  OpInstance op_;
  std::vector<testkit::PoisonedTensor> inputs_;  ///< absent ones are empty
  std::vector<testkit::PoisonedTensor> initial_;
  std::vector<Output> outputs_;
};

// ---- operands ----

testkit::PoisonedTensor normal(DType dtype, Extents extents, std::uint64_t seed, double deviation = 1, double mean = 0);
/// Reproducible numbers from `lowest` up to `end`, the end excluded.
testkit::PoisonedTensor integers(std::int64_t count, std::int64_t lowest, std::int64_t end, std::uint64_t seed);
testkit::PoisonedTensor integer_list(const std::vector<std::int32_t>& values);
/// A block of memory as words: StepState, LossStats, UpdateState.
template <class Block>
testkit::PoisonedTensor words(DType dtype, const Block& block) {
  testkit::PoisonedTensor tensor(dtype, {static_cast<std::int64_t>(sizeof block / size_of(dtype))});
  __builtin_memcpy(tensor.view().data, &block, sizeof block);
  return tensor;
}

/// What rounding one value to `dtype` may differ by when fp32 sums differ in the last bits: a step of bf16 is 2^-7 of
/// the smallest value that has it; `slack` is what fp32 arithmetic may differ by.
inline Tolerance one_step(DType dtype, double slack) {
  return dtype == DType::bf16 ? Tolerance{0x1p-7, slack} : Tolerance{slack, slack};
}

}  // namespace quern::cuda
