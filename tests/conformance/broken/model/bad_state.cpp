// Faults in a state that an op advances, the running mean of the final norm: 1 multiplies it until it is
// infinite, 2 drops the sums of earlier micro-batches, 3 adds to what is there where it should not.
#include <algorithm>

#include "plain.h"
#include "quern/error.h"
#include "quern/numeric.h"

namespace {

using namespace quern;

/// bad_state_sums(x (N, C), mean, which keeps the state in the program) -> (C + 1) f64; bad_state_advance(mean, sums)
/// -> mean
class State final : public Kernel {
 public:
  explicit State(const OpInstance& op)
      : sums_(op.kind == "bad_state_sums"), add_(op.outputs[0].accumulate), fault_(op.attributes.integer("fault")) {}
  void launch(std::span<const View> in, std::span<const View> out, const Exec&) const override {
    const std::int64_t columns = in[0].columns();
    if (!sums_) {
      for (std::int64_t c = 0; c < in[0].count(); ++c) {
        const double mean = in[1].as<double>()[c] / in[1].as<double>()[in[0].count()];
        const float value = in[0].as<float>()[c];
        out[0].as<float>()[c] = static_cast<float>(fault_ == 1 ? 100.0 * value + mean : 0.9 * value + 0.1 * mean);
      }
      return;
    }
    double* sums = out[0].as<double>();
    if ((!add_ && fault_ != 3) || fault_ == 2) std::fill_n(sums, columns + 1, 0.0);
    for (std::int64_t i = 0; i < in[0].count(); ++i)
      sums[i % columns] +=
          in[0].dtype == DType::f32 ? in[0].as<float>()[i] : bf16_to_float(in[0].as<std::uint16_t>()[i]);
    sums[columns] += static_cast<double>(in[0].rows());
  }

 private:
  bool sums_, add_;
  std::int64_t fault_;
};

class BadState final : public FaultyModel {
 public:
  using FaultyModel::FaultyModel;
  void head(ProgramBuilder& b) const override {
    ValueId x = b.stream(traits().width);
    ValueId normed = b.rms_norm(x, "final_norm.weight", 1e-6, "final_norm");
    ValueId mean = b.state({.name = "mean",
                            .extents = {traits().width},
                            .advance = "bad_state_advance",
                            .attributes = {{"fault", fault_}}});
    b.advance_by(mean, b.op("bad_state_sums", {normed, mean}, "sums", {{"fault", fault_}})[0]);
    b.output(b.lm_loss(normed, "lm_head.weight"));
  }
};

}  // namespace

QUERN_PLUGIN("model", "bad_state", manifest) {
  manifest.ops.push_back({.kind = "bad_state_sums",
                          .inputs = {"x", "mean"},
                          .outputs = {"sums"},
                          .infer =
                              [](InferContext& c) {
                                c.outputs[0].shape = {c.inputs[0]->shape[1].fixed + 1};
                                c.outputs[0].dtype = DType::f64;
                              },
                          .statistics = true});
  manifest.ops.push_back({.kind = "bad_state_advance",
                          .inputs = {"mean", "sums"},
                          .outputs = {"advanced"},
                          .infer =
                              [](InferContext& c) {
                                c.outputs[0].shape = c.inputs[0]->shape;
                                c.outputs[0].dtype = c.inputs[0]->dtype;
                              },
                          .updates = {{0, 0}}});
  for (const char* op : {"bad_state_sums", "bad_state_advance"})
    manifest.kernels.push_back({"cpu", op, [](const OpInstance& op) {
                                  if (op.inputs[0].dtype != DType::f32 && op.inputs[0].dtype != DType::bf16)
                                    throw Error(ErrorCode::config, {.where = op.kind, .what = "f32 and bf16 only"});
                                  return std::make_unique<State>(op);
                                }});
  add_faulty_model<BadState>(manifest, "bad_state", "a state that goes wrong", 3);
}
