#pragma once
// An optimizer is a program over the tensors of one parameter: it names the state that it keeps and emits the ops that
// update the master weights. The core places the state, shards it, and cuts the update into windows, where the ops
// allow that.

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "quern/op_spec.h"
#include "quern/parameter.h"

namespace quern {

/// A tensor that an optimizer keeps for a parameter, zero at first. Where its first extent is not the parameter's, the
/// update is of whole matrices.
struct OptimizerState {
  std::string name;  ///< "moment1"
  DType dtype = DType::f32;
  Extents extents = {};
  /// Evaluations, samples and exports use it in place of the master, with which it changes places for them: of the
  /// master's dtype and extents, and at first its copy.
  bool evaluated = false;

  /// An element for each of the parameter's.
  static OptimizerState elements(const ParameterSpec& spec, std::string name, DType dtype);
  /// (rows, 1): one for each row.
  static OptimizerState rows(const ParameterSpec& spec, std::string name, DType dtype);
  /// (rows, blocks): one for each `block` elements of a row, the last of which may have fewer.
  static OptimizerState blocks(const ParameterSpec& spec, std::string name, DType dtype, std::int64_t block);
};

/// Emits the ops of an update, parameter by parameter.
class UpdateBuilder {
 public:
  /// What the core gives for one parameter of one layer, or for some of its rows.
  struct Tensors {
    const ParameterSpec* spec = nullptr;
    std::span<const OptimizerState> states = {};
    ValueId gradient = kNoValue, master = kNoValue;
    std::vector<ValueId> state_values = {};
    std::string suffix = {};  ///< of names of local values: ".qkv.weight.3"
    std::int64_t object = 0;  ///< random key
    std::int64_t offset = 0;  ///< global index of the first element
  };
  UpdateBuilder(const OpSet& ops, Program program, ValueId update, ValueId step);

  ValueId update() const { return update_; }  ///< UpdateState
  ValueId step() const { return step_; }      ///< StepState
  ValueId gradient() const { return tensors_.gradient; }
  ValueId master() const { return tensors_.master; }
  /// An unknown name is an internal error.
  ValueId state(std::string_view name) const;

  /// Any op kind. An output that the op updates in place (OpSpec::updates) is that input, another is a new local value
  /// named after `name`. Returns the outputs. Such an op gets number lists: "objects", random keys, and "offsets", the
  /// global indices of first elements. If its last input repeats ("tensors*", from input 2 on), the parameter's first
  /// op is joined with other parameters' ops of the same attributes.
  std::vector<ValueId> op(std::string kind, std::vector<ValueId> inputs, const std::string& name,
                          Attributes attributes = {});

  // ---- for the core ----
  Program& program() { return program_; }
  void begin(Tensors tensors);
  /// In the master's place: a local value that ops made of it.
  void take_for_master(ValueId value) { tensors_.master = value; }
  Program take();

 private:
  struct InPlace {  ///< an op that updates tensors in place
    std::size_t op = 0;
    Attributes attributes;
    std::vector<double> objects, offsets;
    bool joins = false;
  };
  /// Notes the op. Whether it became a part of another.
  bool join(const OpSpec& spec, const Op& op);

  const OpSet& ops_;
  Program program_;
  ValueId update_, step_;
  Tensors tensors_;
  bool first_ = true;  // op of the parameter
  std::vector<InPlace> updates_;
};

class Optimizer {
 public:
  virtual ~Optimizer() = default;
  /// Of a run, before its updates: all parameters that it updates. Throws a config error, whose `where` is the key, if
  /// an option would be without effect on them.
  virtual void check(std::span<const ParameterSpec> /*parameters*/) const {}
  /// Alike for parameters of equal extents, group and settings.
  virtual std::vector<OptimizerState> states(const ParameterSpec& parameter) const = 0;
  /// Depends on the parameter alone. A parameter's new master and states depend on what the localities of all its ops
  /// (OpSpec::locality) say.
  virtual void update(UpdateBuilder& builder, const ParameterSpec& parameter) const = 0;
};

/// Learning-rate schedule: a pure function of the step.
class Schedule {
 public:
  virtual ~Schedule() = default;
  /// Factor on the peak rate for step `step` of `steps`, from 0; the last step gets the final fraction exactly.
  virtual double factor(std::int64_t step, std::int64_t steps) const = 0;
};

}  // namespace quern
