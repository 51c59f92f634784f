#include "ops.h"

#include <algorithm>
#include <cmath>

#include "quern/error.h"
#include "quern/numeric.h"

namespace patch_classifier {

using namespace quern;

namespace {

float load(const View& view, std::int64_t i) {
  return view.dtype == DType::f32 ? view.as<float>()[i] : bf16_to_float(view.as<std::uint16_t>()[i]);
}

void store(const View& view, std::int64_t i, float value) {
  if (view.dtype == DType::f32)
    view.as<float>()[i] = value;
  else
    view.as<std::uint16_t>()[i] = float_to_bf16(value);
}

/// Adds up in its scratch, which the core gives to each launch: a kernel that keeps none of its own may run on several
/// streams at once. `query` states the size.
class PatchMean final : public Kernel {
 public:
  explicit PatchMean(const Geometry& geometry) : geometry_(geometry) {}
  void launch(std::span<const View> in, std::span<const View> out, const Exec& exec) const override {
    const std::int64_t columns = in[0].columns(), sequence = geometry_.sequence;
    auto* sums = static_cast<float*>(exec.workspace);
    std::fill_n(sums, geometry_.batch * columns, 0.0f);
    for (std::int64_t token = 0; token < geometry_.tokens(); ++token)
      for (std::int64_t c = 0; c < columns; ++c)
        sums[token / sequence * columns + c] += load(in[0], token * columns + c);
    for (std::int64_t i = 0; i < geometry_.batch * columns; ++i)
      store(out[0], i, sums[i] / static_cast<float>(sequence));
  }
  static OpSupport query(const OpInstance& op) {
    return {.workspace_bytes = static_cast<std::size_t>(op.outputs[0].count()) * sizeof(float)};
  }

 private:
  Geometry geometry_;
};

class PatchMeanGradient final : public Kernel {
 public:
  explicit PatchMeanGradient(const Geometry& geometry) : geometry_(geometry) {}
  void launch(std::span<const View> in, std::span<const View> out, const Exec&) const override {
    const std::int64_t columns = in[0].columns(), sequence = geometry_.sequence;
    for (std::int64_t i = 0; i < geometry_.tokens() * columns; ++i)
      store(out[0], i, load(in[0], i / columns / sequence * columns + i % columns) / static_cast<float>(sequence));
  }

 private:
  Geometry geometry_;
};

/// smooth_loss(logits, labels) -> loss, and smooth_loss_grad(dloss, logits, labels) -> dlogits: the target of a class
/// is (1 - smoothing) where it is the label, and smoothing / K more. A label of -1 does not count.
class ClassLoss final : public Kernel {
 public:
  ClassLoss(bool gradient, double smoothing) : gradient_(gradient), smoothing_(smoothing) {}
  void launch(std::span<const View> in, std::span<const View> out, const Exec&) const override {
    const View &logits = in[gradient_ ? 1 : 0], &labels = in[gradient_ ? 2 : 1];
    const std::int64_t classes = logits.columns();
    for (std::int64_t row = 0; row < logits.rows(); ++row) {
      const std::int32_t label = labels.as<std::int32_t>()[row];
      double largest = -INFINITY, sum = 0, total = 0;
      for (std::int64_t k = 0; k < classes; ++k) largest = std::max<double>(largest, load(logits, row * classes + k));
      for (std::int64_t k = 0; k < classes; ++k) {
        const double logit = load(logits, row * classes + k);
        sum += std::exp(logit - largest);
        total += target(k, label, classes) * logit;
      }
      const double logsumexp = largest + std::log(sum);
      if (!gradient_) {
        out[0].as<float>()[row] = label < 0 ? 0.0f : static_cast<float>(logsumexp - total);
        continue;
      }
      const double upper = label < 0 ? 0.0 : in[0].as<float>()[row];
      for (std::int64_t k = 0; k < classes; ++k) {
        const double share = std::exp(load(logits, row * classes + k) - logsumexp);
        store(out[0], row * classes + k, static_cast<float>(upper * (share - target(k, label, classes))));
      }
    }
  }

 private:
  double target(std::int64_t k, std::int32_t label, std::int64_t classes) const {
    return smoothing_ / static_cast<double>(classes) + (k == label ? 1 - smoothing_ : 0.0);
  }
  bool gradient_;
  double smoothing_;
};

/// The running mean of the pooled rows, a state (C): pooled_sums(x (B, C)) -> (C + 1) f64 adds up over the
/// micro-batches and ranks of a step, the number of rows last; advance_mean(mean, sums) runs once per step; centred(x,
/// mean) -> x - mean.
class RunningMean final : public Kernel {
 public:
  explicit RunningMean(const OpInstance& op)
      : kind_(op.kind), add_(op.outputs[0].accumulate), momentum_(op.attributes.real_or("momentum", 0)) {}
  void launch(std::span<const View> in, std::span<const View> out, const Exec&) const override {
    const std::int64_t columns = in[0].columns(), count = in[0].count();
    if (kind_ == "advance_mean") {  // out[0] is in[0]
      const double* sums = in[1].as<double>();
      for (std::int64_t c = 0; c < count; ++c)
        out[0].as<float>()[c] =
            static_cast<float>(momentum_ * in[0].as<float>()[c] + (1 - momentum_) * sums[c] / sums[count]);
    } else if (kind_ == "centred") {
      for (std::int64_t i = 0; i < count; ++i) store(out[0], i, load(in[0], i) - in[1].as<float>()[i % columns]);
    } else {
      auto* sums = out[0].as<double>();
      if (!add_) std::fill_n(sums, columns + 1, 0.0);
      for (std::int64_t i = 0; i < count; ++i) sums[i % columns] += load(in[0], i);
      sums[columns] += static_cast<double>(in[0].rows());
    }
  }

 private:
  std::string kind_;
  bool add_;
  double momentum_;
};

void need_float(const OpInstance& op, const Operand& operand) {
  if (operand.dtype != DType::f32 && operand.dtype != DType::bf16)
    throw Error(ErrorCode::config, {.where = op.kind + " on the cpu device",
                                    .what = "no kernel for the operand's dtype",
                                    .found = std::string(name_of(operand.dtype)),
                                    .expected = "f32 or bf16",
                                    .next = "choose a precision whose activations are one of these"});
}

std::unique_ptr<Kernel> prepare(const OpInstance& op) {
  need_float(op, op.inputs[0]);
  need_float(op, op.outputs[0]);
  if (op.kind == "patch_mean") return std::make_unique<PatchMean>(op.geometry);
  if (op.kind == "patch_mean_grad") return std::make_unique<PatchMeanGradient>(op.geometry);
  return std::make_unique<ClassLoss>(op.kind == "smooth_loss_grad", op.attributes.real("smoothing"));
}

std::unique_ptr<Kernel> prepare_running_mean(const OpInstance& op) {
  need_float(op, op.inputs[0]);
  return std::make_unique<RunningMean>(op);
}

void give(InferContext& c, Shape shape, DType dtype) {
  c.outputs[0].shape = std::move(shape);
  c.outputs[0].dtype = dtype;
}

}  // namespace

void add_ops(Manifest& manifest) {
  manifest.ops.push_back({.kind = "patch_mean",
                          .inputs = {"x"},
                          .outputs = {"mean"},
                          .infer =
                              [](InferContext& c) {
                                if (c.inputs[0]->shape.size() != 2 || c.inputs[0]->shape[0] != Dim::tokens())
                                  c.refuse(0, "(N, C)");
                                give(c, {Dim::rows(), c.inputs[0]->shape[1]}, c.inputs[0]->dtype);
                              },
                          .backward = [](BackwardContext& b) { b.emit("patch_mean_grad", {b.output_grad()}, {0}); }});
  manifest.ops.push_back(
      {.kind = "patch_mean_grad", .inputs = {"dmean"}, .outputs = {"dx"}, .infer = [](InferContext& c) {
         give(c, {Dim::tokens(), c.inputs[0]->shape[1]}, c.inputs[0]->dtype);
       }});
  manifest.ops.push_back(
      {.kind = "smooth_loss",
       .inputs = {"logits", "labels"},
       .outputs = {"loss"},
       .infer =
           [](InferContext& c) {
             if (c.inputs[1]->shape != Shape{c.inputs[0]->shape[0]}) c.refuse(1, "a label for each row of logits");
             give(c, c.inputs[1]->shape, DType::f32);
           },
       .backward =
           [](BackwardContext& b) {
             b.emit("smooth_loss_grad", {b.output_grad(), b.input(0), b.input(1)}, {0}, b.op().attributes);
           }});
  manifest.ops.push_back({.kind = "smooth_loss_grad",
                          .inputs = {"dloss", "logits", "labels"},
                          .outputs = {"dlogits"},
                          .infer = [](InferContext& c) { give(c, c.inputs[1]->shape, c.inputs[1]->dtype); }});
  manifest.ops.push_back({.kind = "pooled_sums",
                          .inputs = {"x"},
                          .outputs = {"sums"},
                          .infer = [](InferContext& c) { give(c, {c.inputs[0]->shape[1].fixed + 1}, DType::f64); },
                          .statistics = true});
  manifest.ops.push_back({.kind = "centred",
                          .inputs = {"x", "mean"},
                          .outputs = {"y"},
                          .infer =
                              [](InferContext& c) {
                                if (c.inputs[1]->shape != Shape{c.inputs[0]->shape[1]})
                                  c.refuse(1, "a mean of columns");
                                give(c, c.inputs[0]->shape, c.inputs[0]->dtype);
                              },
                          .backward = [](BackwardContext& b) { b.set_input_grad(0, b.output_grad()); }});
  manifest.ops.push_back({.kind = "advance_mean",
                          .inputs = {"mean", "sums"},
                          .outputs = {"advanced"},
                          .infer = [](InferContext& c) { give(c, c.inputs[0]->shape, c.inputs[0]->dtype); },
                          .updates = {{0, 0}}});
  manifest.kernels.push_back({"cpu", "patch_mean", prepare, PatchMean::query});
  for (const char* op : {"pooled_sums", "centred", "advance_mean"})
    manifest.kernels.push_back({"cpu", op, prepare_running_mean});
  for (const char* op : {"patch_mean_grad", "smooth_loss", "smooth_loss_grad"})
    manifest.kernels.push_back({"cpu", op, prepare});
}

}  // namespace patch_classifier
