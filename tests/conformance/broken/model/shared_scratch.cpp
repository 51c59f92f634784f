// Faults of a copy that goes through scratch: 1 all launches of a prepared kernel share it, which the kernel says they
// do not; 2 all kernels of the process share it; 3 as 2, though it says that launches do not run side by side.
#include <algorithm>
#include <chrono>
#include <thread>
#include <vector>

#include "plain.h"

namespace {

using namespace quern;

const char* const kOps[] = {"own_copy", "kernel_copy", "process_copy", "exclusive_copy"};

std::vector<std::byte>& of_process() {
  static std::vector<std::byte> scratch(std::size_t{1} << 20);
  return scratch;
}

class Copy final : public Kernel {
 public:
  explicit Copy(const OpInstance& op) : kind_(op.kind), scratch_(static_cast<std::size_t>(op.inputs[0].bytes())) {
    of_process();
  }
  void launch(std::span<const View> inputs, std::span<const View> outputs, const Exec&) const override {
    std::vector<std::byte> own(kind_ == kOps[0] ? scratch_.size() : 0);
    std::byte* scratch = (kind_ == kOps[0] ? own : kind_ == kOps[1] ? scratch_ : of_process()).data();
    std::copy_n(inputs[0].as<std::byte>(), scratch_.size(), scratch);
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
    std::copy_n(scratch, scratch_.size(), outputs[0].as<std::byte>());
  }

 private:
  std::string kind_;
  mutable std::vector<std::byte> scratch_;
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
