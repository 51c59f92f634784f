// Faults of a copy that goes through scratch: 1 all launches of a prepared kernel share it, which the kernel says they
// do not; 2 all kernels of the process share it; 3 as 2, though it says that launches do not run side by side.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <thread>
#include <vector>

#include "plain.h"

namespace {

using namespace quern;

const char* const kOps[] = {"own_copy", "kernel_copy", "process_copy", "exclusive_copy"};

/// Bytes, and how often they were written.
struct Scratch {
  std::vector<std::byte> bytes;
  std::atomic<int> writes = 0;
  explicit Scratch(std::size_t size) : bytes(size) {}
};

Scratch& of_process() {
  static Scratch scratch(std::size_t{1} << 20);
  return scratch;
}

/// From its second launch on, a kernel holds shared scratch until another launch has written there: in contracts that
/// launch again and again there is another one, and 0.2 s are a limit for those where there is none.
class Copy final : public Kernel {
 public:
  explicit Copy(const OpInstance& op) : kind_(op.kind), scratch_(static_cast<std::size_t>(op.inputs[0].bytes())) {
    of_process();
  }
  void launch(std::span<const View> inputs, std::span<const View> outputs, const Exec&) const override {
    if (kind_ == kOps[0]) {
      Scratch own(scratch_.bytes.size());
      return copy(inputs[0], outputs[0], own);
    }
    copy(inputs[0], outputs[0], kind_ == kOps[1] ? scratch_ : of_process());
  }

 private:
  void copy(const View& in, const View& out, Scratch& scratch) const {
    using Clock = std::chrono::steady_clock;
    std::copy_n(in.as<std::byte>(), scratch_.bytes.size(), scratch.bytes.data());
    const int written = ++scratch.writes;
    const Clock::time_point latest = Clock::now() + std::chrono::milliseconds(200);
    const bool waits = kind_ != kOps[0] && ++launches_ > 1;
    while (waits && scratch.writes == written && Clock::now() < latest)
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    std::copy_n(scratch.bytes.data(), scratch_.bytes.size(), out.as<std::byte>());
  }

  std::string kind_;
  mutable Scratch scratch_;
  mutable std::atomic<int> launches_ = 0;
};

class SharedScratch final : public FaultyModel {
 public:
  using FaultyModel::FaultyModel;
  void embed(ProgramBuilder& b) const override {
    b.output(b.op(kOps[fault_], {b.embedding(b.tokens(), "embedding.weight")}, "copied")[0]);
  }
};

}  // namespace

QUERN_PLUGIN("model", "shared_scratch", manifest) {
  for (const char* op : kOps) {
    manifest.ops.push_back(op_like_its_input(op));
    manifest.kernels.push_back({"cpu", op, [](const OpInstance& op) { return std::make_unique<Copy>(op); },
                                [](const OpInstance& op) { return OpSupport{.concurrent = op.kind != kOps[3]}; }});
  }
  add_faulty_model<SharedScratch>(manifest, "shared_scratch", "a model with races between launches", 3);
}
