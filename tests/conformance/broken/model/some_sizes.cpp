// Faults of a copy's kernel: 1 copies whole packs of 32 bytes only, 2 counts elements in 16 bits, 3 takes numbers of
// any dtype but f32 for bf16, 4 keeps memory with each kernel, 5 adds the number behind
// its input, times a small number.
#include <algorithm>
#include <cstdint>

#include "plain.h"

namespace {

using namespace quern;

const char* const kOps[] = {"whole_copy", "pack_copy", "short_copy", "any_copy", "kept_copy", "peeking_copy"};

class Copy final : public Kernel {
 public:
  explicit Copy(const OpInstance& op) : kind_(op.kind) {
    if (kind_ == kOps[4]) (new std::vector<float>(16))->push_back(1);
  }
  void launch(std::span<const View> inputs, std::span<const View> outputs, const Exec&) const override {
    const auto elements = static_cast<std::size_t>(inputs[0].count());
    std::size_t bytes = kind_ == kOps[3] && inputs[0].dtype != DType::f32 ? 2 * elements : inputs[0].bytes();
    if (kind_ == kOps[1]) bytes -= bytes % 32;
    if (kind_ == kOps[2]) bytes = bytes / elements * static_cast<std::uint16_t>(elements);
    std::copy_n(inputs[0].as<std::byte>(), bytes, outputs[0].as<std::byte>());
    if (kind_ == kOps[5] && inputs[0].dtype == DType::f32)
      outputs[0].as<float>()[0] += 1e-9f * inputs[0].as<float>()[elements];
  }

 private:
  std::string kind_;
};

class SomeSizes final : public FaultyModel {
 public:
  using FaultyModel::FaultyModel;
  void embed(ProgramBuilder& b) const override {
    b.output(b.op(kOps[fault_], {b.embedding(b.tokens(), "embedding.weight")}, "copied")[0]);
  }
};

}  // namespace

QUERN_PLUGIN("model", "some_sizes", manifest) {
  for (const char* op : kOps) {
    OpSpec& spec = manifest.ops.emplace_back(op_like_its_input(op));
    if (op == kOps[3])
      spec.infer = [](InferContext& c) {
        c.outputs[0].shape = c.inputs[0]->shape;
        c.outputs[0].dtype = c.inputs[0]->dtype;
      };
    manifest.kernels.push_back({"cpu", op, [](const OpInstance& op) { return std::make_unique<Copy>(op); }});
  }
  add_faulty_model<SomeSizes>(manifest, "some_sizes", "an op that is right at some sizes", 5);
}
