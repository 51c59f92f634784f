// Fault: all launches of a prepared kernel share its scratch, which it says they do not.
#include <chrono>
#include <thread>
#include <vector>

#include "plain.h"

namespace {

using namespace quern;

class SlowCopy final : public Kernel {
 public:
  explicit SlowCopy(const OpInstance& op) : scratch_(static_cast<std::size_t>(op.inputs[0].bytes())) {}
  void launch(std::span<const View> inputs, std::span<const View> outputs, const Exec&) const override {
    const auto* from = inputs[0].as<std::byte>();
    std::copy_n(from, scratch_.size(), scratch_.begin());
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    std::copy(scratch_.begin(), scratch_.end(), outputs[0].as<std::byte>());
  }

 private:
  mutable std::vector<std::byte> scratch_;
};

class SharedScratch final : public PlainModel {
 public:
  void embed(ProgramBuilder& b) const override {
    b.output(b.op("test_copy", {b.embedding(b.tokens(), "embedding.weight")}, "copied")[0]);
  }
};

}  // namespace

QUERN_PLUGIN("model", "shared_scratch", manifest) {
  manifest.version = "1.0";
  manifest.licence = "Apache-2.0";
  manifest.ops.push_back({.kind = "test_copy",
                          .inputs = {"x"},
                          .outputs = {"y"},
                          .infer =
                              [](InferContext& c) {
                                c.outputs[0].shape = c.inputs[0]->shape;
                                c.outputs[0].dtype = c.inputs[0]->dtype;
                              },
                          .backward = [](BackwardContext& b) { b.set_input_grad(0, b.output_grad()); }});
  manifest.kernels.push_back({"cpu", "test_copy", [](const OpInstance& op) { return std::make_unique<SlowCopy>(op); },
                              [](const OpInstance&) { return OpSupport{}; }});
  manifest.add<Model>("shared_scratch", "a model with a race between launches", {},
                      [](const OptionValues&) { return std::make_unique<SharedScratch>(); });
}
