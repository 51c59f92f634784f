#include "ops.h"

#include "quern/error.h"
#include "quern/numeric.h"

namespace squared_relu {

using namespace quern;

namespace {

// Every value rounds at its declared dtype, so kernels compute in fp32 and read and write what the views hold.
float load(const View& view, std::int64_t i) {
  return view.dtype == DType::f32 ? view.as<float>()[i] : bf16_to_float(view.as<std::uint16_t>()[i]);
}

void store(const View& view, std::int64_t i, float value) {
  if (view.dtype == DType::f32)
    view.as<float>()[i] = value;
  else
    view.as<std::uint16_t>()[i] = float_to_bf16(value);
}

float forward(float x) { return x > 0 ? x * x : 0.0f; }
float slope(float x) { return x > 0 ? 2 * x : 0.0f; }

// squared_relu(x) -> y and squared_relu_grad(dy, x) -> dx. Each element is read before it is written, so an output may
// overwrite an input.
class ElementKernel final : public Kernel {
 public:
  explicit ElementKernel(bool gradient) : gradient_(gradient) {}
  void launch(std::span<const View> in, std::span<const View> out, const Exec&) const override {
    const std::int64_t count = out[0].count();
    if (gradient_)
      for (std::int64_t i = 0; i < count; ++i) store(out[0], i, load(in[0], i) * slope(load(in[1], i)));
    else
      for (std::int64_t i = 0; i < count; ++i) store(out[0], i, forward(load(in[0], i)));
  }

 private:
  bool gradient_;
};

// Called once for each form of the op in a run; what it cannot do it refuses here, before anything runs.
std::unique_ptr<Kernel> prepare(const OpInstance& op) {
  auto check = [&op](const Operand& operand) {
    if (operand.dtype != DType::f32 && operand.dtype != DType::bf16)
      throw Error(ErrorCode::config, {.where = op.kind + " on the cpu device",
                                      .what = "no kernel for the operand's dtype",
                                      .found = std::string(name_of(operand.dtype)),
                                      .expected = "f32 or bf16",
                                      .next = "choose a precision whose activations are one of these"});
  };
  for (const Operand& operand : op.inputs) check(operand);
  check(op.outputs[0]);
  return std::make_unique<ElementKernel>(op.inputs.size() == 2);
}

void like_first_input(InferContext& c) {
  c.outputs[0].shape = c.inputs[0]->shape;
  c.outputs[0].dtype = c.inputs[0]->dtype;
}

}  // namespace

void add_ops(Manifest& manifest) {
  manifest.ops.push_back({.kind = "squared_relu",
                          .inputs = {"x"},
                          .outputs = {"y"},
                          .infer = like_first_input,
                          // Emits the gradient's op: output 0 is the gradient of input 0.
                          .backward =
                              [](BackwardContext& b) {
                                b.emit("squared_relu_grad", {b.output_grad(), b.input(0)}, {0});
                              },
                          .may_overwrite = {{0, 0}},
                          .op_class = OpClass::activation});
  manifest.ops.push_back({.kind = "squared_relu_grad",
                          .inputs = {"dy", "x"},
                          .outputs = {"dx"},
                          .infer = like_first_input,
                          .may_overwrite = {{0, 0}, {0, 1}}});
  // One line a device: a device without one refuses the op when the run is planned.
  for (const char* op : {"squared_relu", "squared_relu_grad"}) manifest.kernels.push_back({"cpu", op, prepare});
}

}  // namespace squared_relu
