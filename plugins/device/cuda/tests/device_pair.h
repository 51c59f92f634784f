#pragma once
// For tests: the CPU device, which is the oracle, and the GPU. Comparisons of ops run on both and check what they find.

#include <functional>
#include <initializer_list>
#include <memory>
#include <vector>

#include <doctest/doctest.h>

#include "options.h"
#include "quern/testkit/op_comparison.h"

namespace quern::cuda {

using testkit::integer_list;
using testkit::integers;
using testkit::normal;
using testkit::one_step;
using testkit::OpComparison;
using testkit::Tolerance;
using testkit::words;

struct DevicePair final : testkit::OpRunner {
  std::unique_ptr<Device> cpu, gpu;
  bool open = false;  ///< false: no GPU here, `gpu` answers for the one that plans assume

  /// Checks all outputs. An instance that the GPU refuses is a failure, unless it is too old for the format.
  void run(const OpComparison& op) const override;
};
/// Whether the GPU is a real one, or emulated (tests/emulator) and the op small: passes over so many elements, or
/// multiplies and adds so often. Otherwise a message says that it is left to a GPU.
bool affordable(std::int64_t elements, std::int64_t products = 0);
/// A number below `count`; -1, which stands for all, on a real GPU. The emulated one takes a second for what a GPU does
/// in microseconds: of values in all combinations it gets some, drawn by QUERN_EMULATOR_SEED.
int draw(std::size_t count);
/// All of them on a real GPU, a drawn one on the emulated GPU.
template <class T>
std::vector<T> all_or_one(std::initializer_list<T> values) {
  const int drawn = draw(values.size());
  return drawn < 0 ? std::vector<T>(values) : std::vector<T>{values.begin()[drawn]};
}
/// Whether there are cuBLASLt and cuDNN. The emulated GPU lacks them: a message says "skipped: <reason>".
bool has_libraries();

/// Whether Hopper's kernels are built, and the open GPU runs them. Otherwise a message says "skipped: <reason>".
bool runs_hopper_kernels(const DevicePair& pair);

/// Runs `check` with kernels prepared for 2 multiprocessors, and on a real GPU for 14 and 66 too.
void on_fewer_multiprocessors(Device& gpu, const std::function<void()>& check);

/// Both devices. Where no GPU can be opened a message says "skipped: <reason>", and comparisons check no more than that
/// the plan accepts their ops.
DevicePair open_pair(CudaOptions options = {});

}  // namespace quern::cuda
