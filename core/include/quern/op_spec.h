#pragma once
// Defines an op kind in one place: operands, shape rule, backward, which output may overwrite which input, flops and
// bytes. The built-in kinds are one file per family under core/src/program/ops/; a plugin adds its own through its
// manifest. Devices have the kernels (device.h).

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "quern/program.h"

namespace quern {

/// An op with concrete operands, as a device sees it.
struct Operand {
  DType dtype = DType::f32;
  Extents extents = {};
  bool present = false;
  bool accumulate = false;  ///< outputs only: add to the present value (parameter_grad and state)
  std::int64_t count() const { return present ? element_count(extents) : 0; }
  std::int64_t bytes() const { return present ? byte_count(extents, dtype) : 0; }
  bool operator==(const Operand&) const = default;
};

struct OpInstance {
  std::string kind = {};
  std::vector<Operand> inputs = {};
  std::vector<Operand> outputs = {};
  Attributes attributes = {};
  Geometry geometry;
  bool operator==(const OpInstance&) const = default;
};

/// Work of one op instance. `bytes` counts each operand once, as a perfect kernel would move it.
struct Cost {
  double flops = 0;
  double repeated_flops = 0;  ///< part of `flops` that recomputes a forward op
  double bytes = 0;
  bool tensor_core = false;  ///< flops run at the matmul rate of `format`
  DType format = DType::f32;
};

/// Shapes and dtypes of an op's inputs going in; the rule fills in the outputs'.
struct InferContext {
  std::span<const Value* const> inputs;  ///< null for an absent operand
  const Attributes& attributes;
  std::span<Value> outputs;  ///< names are set; the rule sets shape and dtype
  DType activation_dtype;    ///< dtype of values that do not inherit an input's dtype

  /// Refuses the op, naming it and the operand.
  [[noreturn]] void refuse(std::size_t input, const std::string& what) const;
  std::string_view kind;
};

class BackwardContext;

/// The three matmuls of y = x W^T + b, W (out, in), and the language-model loss, which contains three more.
enum class Product : std::uint8_t {
  output,           ///< y = x W^T + b; inputs x, W, b
  input_gradient,   ///< dx = dy W; inputs dy, W
  weight_gradient,  ///< dW (+)= dy^T x; inputs dy, x, W
  loss,             ///< inputs x, W and more
};

/// The family of an op, for passes that treat families alike: the named choices of recomputation, and `rotate`.
enum class OpClass : std::uint8_t {
  other,
  add,  ///< residual add
  norm,
  activation,  ///< between the matrices of a feed-forward part
  attention,
  conversion,  ///< input 0 in another format or layout; recomputed with it
};

/// What an element of a tensor's new master and states may depend on, of the same parameter's tensors, beside "update",
/// "step" and the tensor's entries of "objects" and "offsets".
enum class UpdateLocality : std::uint8_t {
  element,  ///< the same element of the gradient, the master and the states
  row,      ///< the same row of these
  matrix,   ///< all of these
};

struct OpSpec {
  std::string kind = {};
  std::vector<std::string> inputs = {};  ///< operand names; "bias?" is optional, "more*" (last) repeats
  std::vector<std::string> outputs =
      {};  ///< output names as suffixes of the value's name; the first is the value itself
  std::function<void(InferContext&)> infer = {};
  std::function<void(BackwardContext&)> backward = {};  ///< empty: not differentiable
  /// Output `first` may share memory with input `second` if that input is not read later.
  std::vector<std::pair<int, int>> may_overwrite = {};
  /// Output `first` is input `second`, updated in place.
  std::vector<std::pair<int, int>> updates = {};
  /// Of an op in an optimizer's update. Unless it is `matrix`, the core may run the op on some rows of a parameter: on
  /// a rank's shard, or in windows.
  UpdateLocality locality = UpdateLocality::matrix;
  std::function<Cost(const OpInstance&)> cost = {};  ///< empty: bytes of all operands, no flops
  bool commutative = false;                          ///< inputs 0 and 1 may be exchanged
  OpClass op_class = OpClass::other;
  std::optional<Product> product = {};  ///< set: the precision backend lowers this op
  bool statistics = false;              ///< outputs add up over the micro-batches of a step
  bool objective = false;   ///< adds its inputs to the objective: backward is asked without an output gradient
  bool transposes = false;  ///< output 0 is input 0, transposed
  /// The kind that computes this op and its gradients at once; its extra outputs follow this op's own, and
  /// `training_gradients` says which input each belongs to. Such an op ends a program: it needs no output gradient.
  std::string training_kind = {};
  std::vector<std::pair<int, int>> training_gradients = {};
  /// What an op that a head ends with takes and gives; a run that needs more is refused by name. Losses whose matmuls
  /// a precision may quantize have `product`.
  struct Loss {
    bool z_loss = false;  ///< attribute `z_loss`, of train.z_loss
    bool chunk = false;   ///< attribute `chunk`, of train.loss_chunk
    bool logits = false;  ///< inputs 0 and 1 are x and W of logits x W^T, for samples, texts and logits
    int correct = -1;     ///< output: f32, 1 for each target that was predicted right; -1: there is none
  };
  Loss loss = {};

  /// How the op's outputs are recomputed in the backward phase, where running the op itself again would disturb a
  /// state or repeat a search: by an op of kind `kind` on inputs (input 0, output `kept_output` of the forward op,
  /// which is always kept), whose outputs are the others in order.
  struct Recompute {
    std::string kind;
    int kept_output = 0;
  };
  std::optional<Recompute> recompute = {};

  /// Quantized values of input 0 that the op writes, with their scales.
  struct QuantizedOutput {
    std::size_t codes, scale;       ///< outputs
    std::string layout = "tensor";  ///< layout of the scales, as in `observe_scale`
    int state = -1;                 ///< the input that is its ScaleState; -1: none
  };
  /// Depends on the op's attributes; empty: none. Outputs listed here can be logged (log.scales_every).
  std::function<std::vector<QuantizedOutput>(const Attributes&)> quantized = {};
  /// Name of a tensor that the op quantizes internally; empty: none. If scales are observed, the op gets one more
  /// output, a ScaleObservation of that tensor.
  std::function<std::string(const Op&)> quantized_inside = {};

  // ---- how ranks make the outputs together, of whose input 0 each has some rows ----
  /// Size of row groups: each group of input 0 alone determines the same rows of every present output; an output of one
  /// element depends only on the other inputs. 0 or empty: there are no such groups.
  std::function<std::int64_t(const OpInstance&)> row_groups = {};
  /// The kind that computes the same with one more input, the amax (1) of the whole input 0, as op `amax` computes it.
  std::string of_amax = {};
  /// Output `first` is the transpose of output `second`, and can be computed from it when all rows are present.
  std::vector<std::pair<int, int>> transposed = {};

  bool optional_input(std::size_t i) const { return i < inputs.size() && inputs[i].back() == '?'; }
};

/// The vocabulary: op kinds by name. Not global: the built-in set is copied and extended by plugins.
class OpSet {
 public:
  /// Refuses a kind that is there already.
  void add(OpSpec spec);
  /// An unknown kind is a config error that lists the nearest names.
  const OpSpec& at(std::string_view kind) const;
  const OpSpec* find(std::string_view kind) const;
  std::vector<std::string> kinds() const;

 private:
  std::map<std::string, OpSpec, std::less<>> specs_;
};

/// All op kinds that quern itself defines.
OpSet builtin_ops();

/// Given the gradients of an op's outputs, `backward` emits ops into the program and states the gradients of its
/// inputs.
class BackwardContext {
 public:
  BackwardContext(Program& program, const OpSet& ops, Op op, std::vector<ValueId> output_grads, DType activation_dtype);

  const Op& op() const { return op_; }
  ValueId input(std::size_t i) const { return i < op_.inputs.size() ? op_.inputs[i] : kNoValue; }
  ValueId output(std::size_t i) const { return op_.outputs[i]; }
  /// Gradient of output i; kNoValue when nothing depends on it.
  ValueId output_grad(std::size_t i = 0) const { return output_grads_[i]; }
  const Program& program() const { return program_; }

  /// Emits an op in the backward phase. `grad_of[i]` is the forward input whose gradient output i is (-1: none): the
  /// output is named after it, and becomes its gradient, or its parameter's.
  std::vector<ValueId> emit(std::string kind, std::vector<ValueId> inputs, std::vector<int> grad_of,
                            Attributes attributes = {});
  /// States that an existing value is the gradient of forward input i.
  void set_input_grad(std::size_t i, ValueId grad) { input_grads_[i] = grad; }
  std::span<const ValueId> input_grads() const { return input_grads_; }

 private:
  Program& program_;
  const OpSet& ops_;
  Op op_;
  std::vector<ValueId> output_grads_;
  std::vector<ValueId> input_grads_;
  DType activation_dtype_;
};

/// Appends an op whose outputs are local values with inferred shapes, named `name` and `name.<suffix>`; a name that is
/// taken gets a number. Throws a config error naming op and operand when shapes do not fit.
std::vector<ValueId> append_op(Program& program, const OpSet& ops, DType activation_dtype, Op op,
                               const std::string& name);

/// The op with concrete shapes. An output that no op reads (by `read`) is not present.
OpInstance instantiate(const Program& program, const Op& op, const Geometry& geometry, const std::vector<bool>& read);
/// Whether the op's output adds up over the micro-batches of a step: parameter gradients, statistics, observations.
bool sums_up(const Program& program, const OpSet& ops, const Op& op, std::size_t output);
/// By value: read by an op, an output of the program, or of a role that outlives the program.
std::vector<bool> read_values(const Program& program);
Cost cost_of(const OpSpec& spec, const OpInstance& op);

}  // namespace quern
