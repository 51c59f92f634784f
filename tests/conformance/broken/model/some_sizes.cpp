// Faults of a copy's kernel: 1 copies whole packs of 32 bytes only, 2 counts elements in 16 bits.
#include <algorithm>
#include <cstdint>

#include "plain.h"
#include "quern/hf_config.h"
#include "quern/options.h"

namespace {

using namespace quern;

struct Options {
  std::int64_t fault = 0;
};

OptionTable<Options> options() {
  OptionTable<Options> t;
  t.add("fault", &Options::fault, "0: nothing, 1: whole packs, 2: 16 bits").at_least(0).at_most(2);
  return t;
}

HfModel hf_model() { return {.model_type = "plain", .architecture = "PlainForCausalLM", .options = options().specs()}; }

const char* const kOps[] = {"whole_copy", "pack_copy", "short_copy"};

class Copy final : public Kernel {
 public:
  explicit Copy(const OpInstance& op) : kind_(op.kind) {}
  void launch(std::span<const View> inputs, std::span<const View> outputs, const Exec&) const override {
    const auto elements = static_cast<std::size_t>(inputs[0].count());
    std::size_t bytes = inputs[0].bytes();
    if (kind_ == kOps[1]) bytes -= bytes % 32;
    if (kind_ == kOps[2]) bytes = bytes / elements * static_cast<std::uint16_t>(elements);
    std::copy_n(inputs[0].as<std::byte>(), bytes, outputs[0].as<std::byte>());
  }

 private:
  std::string kind_;
};

class SomeSizes final : public PlainModel {
 public:
  explicit SomeSizes(std::int64_t fault) : PlainModel({.vocabulary = 64}), fault_(fault) {}
  void embed(ProgramBuilder& b) const override {
    b.output(b.op(kOps[fault_], {b.embedding(b.tokens(), "embedding.weight")}, "copied")[0]);
  }
  std::string hf_config() const override {
    OptionValues fields;
    fields.set("fault", fault_);
    return write_hf_config(hf_model(), fields);
  }

 private:
  std::int64_t fault_;
};

}  // namespace

QUERN_PLUGIN("model", "some_sizes", manifest) {
  manifest.version = "1.0";
  manifest.licence = "Apache-2.0";
  for (const char* op : kOps) {
    manifest.ops.push_back({.kind = op,
                            .inputs = {"x"},
                            .outputs = {"y"},
                            .infer =
                                [](InferContext& c) {
                                  c.outputs[0].shape = c.inputs[0]->shape;
                                  c.outputs[0].dtype = c.inputs[0]->dtype;
                                },
                            .backward = [](BackwardContext& b) { b.set_input_grad(0, b.output_grad()); }});
    manifest.kernels.push_back({"cpu", op, [](const OpInstance& op) { return std::make_unique<Copy>(op); }});
  }
  manifest.add<Model>("some_sizes", "an op that is right at some sizes", hf_model().options,
                      [](const OptionValues& given) {
                        const Options made = options().bind(model_options(given, hf_model()));
                        return std::make_unique<SomeSizes>(made.fault);
                      });
}
