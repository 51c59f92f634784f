#pragma once
// Runs an op on the oracle and on another device, from equal inputs and poisoned outputs, and says what differs. On the
// other device it runs eagerly, again, and captured where it can: all must give the same bits, no input may change, and
// no byte before or behind an operand.

#include <string>
#include <vector>

#include "quern/device.h"
#include "quern/testkit/compare.h"

namespace quern::testkit {

/// |got - want| <= absolute + relative * |want|.
struct Tolerance {
  double relative = 0, absolute = 0;
};

class OpComparison;

/// An action on each case of a list (op_cases.h): run on a pair of devices, planned only, counted.
class OpRunner {
 public:
  virtual ~OpRunner() = default;
  virtual void run(const OpComparison& op) const = 0;
};

/// One op instance being put together, with the operands it will run on.
class OpComparison {
 public:
  explicit OpComparison(std::string kind, Attributes attributes = {}, Geometry geometry = {});

  OpComparison& in(PoisonedTensor tensor);
  OpComparison& absent();
  OpComparison& out(DType dtype, Extents extents, Tolerance tolerance);
  /// An output whose layout is the device's own business, so that it is not compared between devices.
  OpComparison& opaque(DType dtype, Extents extents);
  /// An output that starts with random numbers and is added to.
  OpComparison& sum(DType dtype, Extents extents, Tolerance tolerance);
  /// An output that no op reads: no memory, but a dtype to which its value is rounded.
  OpComparison& unread(DType dtype, Extents extents);
  /// An output that is input `i`, updated in place.
  OpComparison& update(std::size_t i, Tolerance tolerance);

  /// A read beyond an input gives NaN.
  OpComparison& nan_beside_inputs();

  void run(const OpRunner& runner) const { runner.run(*this); }
  const OpInstance& instance() const { return op_; }
  std::string label() const;

  enum class How { eager, captured };
  using Results = std::vector<PoisonedTensor>;  ///< an output that is not present is empty
  /// Outputs of one run on an open device that takes the instance. What it does beside its outputs is added to
  /// `faults`.
  Results run_on(Device& device, How how, std::vector<std::string>& faults) const;
  /// Both devices are open and take the instance. One text a fault; empty when none.
  std::vector<std::string> faults(Device& oracle, Device& device) const;

 private:
  struct Output {
    Tolerance tolerance = {};
    int updates = -1;  ///< input that it is, or -1
    int initial = -1;  ///< tensor in initial_ that it is added to, or -1
    bool compared = true;
  };
  class Launch;

  static constexpr std::uint8_t kBesideOutputs = 0xA5;

  std::uint8_t beside_inputs_ = kBesideOutputs;
  OpInstance op_;
  std::vector<PoisonedTensor> inputs_;  ///< absent ones are empty
  std::vector<PoisonedTensor> initial_;
  std::vector<Output> outputs_;
};

// ---- operands ----

PoisonedTensor normal(DType dtype, Extents extents, std::uint64_t seed, double deviation = 1, double mean = 0);
/// Reproducible numbers from `lowest` up to `end`, the end excluded.
PoisonedTensor integers(std::int64_t count, std::int64_t lowest, std::int64_t end, std::uint64_t seed);
PoisonedTensor integer_list(const std::vector<std::int32_t>& values);
/// A block of memory as words: StepState, LossStats, UpdateState.
template <class Block>
PoisonedTensor words(DType dtype, const Block& block) {
  PoisonedTensor tensor(dtype, {static_cast<std::int64_t>(sizeof block / size_of(dtype))});
  __builtin_memcpy(tensor.view().data, &block, sizeof block);
  return tensor;
}

/// Tolerance of a value rounded to `dtype` when fp32 values differ in the last bits: a step of bf16 is 2^-7 of
/// the smallest value that has it; `slack` is what fp32 arithmetic may differ by.
inline Tolerance one_step(DType dtype, double slack) {
  return dtype == DType::bf16 ? Tolerance{0x1p-7, slack} : Tolerance{slack, slack};
}

}  // namespace quern::testkit
