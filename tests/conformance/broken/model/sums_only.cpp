// An op whose kernel takes only the form that adds up: the embedding is tied, so its gradient adds to the head's.
// Sound, or a fault: 1 keeps memory with each kernel, 2 drops what is there.
#include <algorithm>
#include <vector>

#include "plain.h"
#include "quern/error.h"
#include "quern/numeric.h"

namespace {

using namespace quern;

float load(const View& view, std::int64_t i) {
  return view.dtype == DType::f32 ? view.as<float>()[i] : bf16_to_float(view.as<std::uint16_t>()[i]);
}

void store(const View& view, std::int64_t i, float value) {
  if (view.dtype == DType::f32)
    view.as<float>()[i] = value;
  else
    view.as<std::uint16_t>()[i] = float_to_bf16(value);
}

/// shift(x (N, C), w (V, C)) -> x + row 0 of w; shift_grad(dy, w) -> dw, which adds up.
class Shift final : public Kernel {
 public:
  explicit Shift(const OpInstance& op) : gradient_(op.kind == "shift_grad"), fault_(op.attributes.integer("fault")) {
    if (gradient_ && !op.outputs[0].accumulate)
      throw Error(ErrorCode::config, {.where = op.kind, .what = "adds to the head's gradient only"});
    if (gradient_ && fault_ == 1) (new std::vector<float>(16))->push_back(1);
  }
  void launch(std::span<const View> in, std::span<const View> out, const Exec&) const override {
    const std::int64_t columns = in[0].columns();
    if (!gradient_) {
      for (std::int64_t i = 0; i < in[0].count(); ++i) store(out[0], i, load(in[0], i) + load(in[1], i % columns));
      return;
    }
    std::vector<float> sums(static_cast<std::size_t>(columns));
    for (std::int64_t i = 0; i < in[0].count(); ++i) sums[static_cast<std::size_t>(i % columns)] += load(in[0], i);
    for (std::int64_t c = 0; c < columns; ++c)
      store(out[0], c, (fault_ == 2 ? 0 : load(out[0], c)) + sums[static_cast<std::size_t>(c)]);
  }

 private:
  bool gradient_;
  std::int64_t fault_;
};

class SumsOnly final : public FaultyModel {
 public:
  using FaultyModel::FaultyModel;
  std::vector<ParameterSpec> parameters() const override {
    auto list = FaultyModel::parameters();
    std::erase_if(list, [](const ParameterSpec& spec) { return spec.name == "lm_head.weight"; });
    return list;
  }
  void embed(ProgramBuilder& b) const override {
    const ValueId x = b.embedding(b.tokens(), "embedding.weight");
    b.output(b.op("shift", {x, b.parameter("embedding.weight")}, "shifted", {{"fault", fault_}})[0]);
  }
  void head(ProgramBuilder& b) const override {
    const ValueId normed = b.rms_norm(b.stream(traits().width), "final_norm.weight", 1e-6, "final_norm");
    b.output(b.lm_loss(normed, "embedding.weight"));
  }
};

OpSpec spec_like(std::string kind, std::vector<std::string> inputs, std::size_t input) {
  return {.kind = std::move(kind), .inputs = std::move(inputs), .outputs = {"y"}, .infer = [input](InferContext& c) {
            c.outputs[0].shape = c.inputs[input]->shape;
            c.outputs[0].dtype = c.inputs[input]->dtype;
          }};
}

}  // namespace

QUERN_PLUGIN("model", "sums_only", manifest) {
  manifest.ops = {spec_like("shift", {"x", "w"}, 0), spec_like("shift_grad", {"dy", "w"}, 1)};
  manifest.ops[0].backward = [](BackwardContext& b) {
    b.set_input_grad(0, b.output_grad());
    b.emit("shift_grad", {b.output_grad(), b.input(1)}, {1}, b.op().attributes);
  };
  for (const char* op : {"shift", "shift_grad"})
    manifest.kernels.push_back({"cpu", op, [](const OpInstance& op) {
                                  for (const Operand& input : op.inputs)
                                    if (input.dtype != DType::f32 && input.dtype != DType::bf16)
                                      throw Error(ErrorCode::config, {.where = op.kind, .what = "f32 and bf16 only"});
                                  return std::make_unique<Shift>(op);
                                }});
  add_faulty_model<SumsOnly>(manifest, "sums_only", "a model whose op adds up only", 2);
}
