#pragma once
// An optimizer's update by itself, on tensors of its caller, who changes an operand and sees where results differ.

#include <cmath>
#include <cstdint>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "optimizer/update_traits.h"
#include "quern/numeric.h"
#include "quern/step_state.h"
#include "quern/testkit/op_launch.h"

namespace quern::conformance {

using testkit::PoisonedTensor;

/// The update of parameters of one shape, of which it takes `rows` rows from `first` on.
class UpdateRun {
 public:
  UpdateRun(Device& device, const OpSet& ops, const Optimizer& optimizer, const ParameterSpec& spec,
            DType master = DType::f32)
      : device_(device),
        ops_(ops),
        optimizer_(optimizer),
        spec_(spec),
        states_(optimizer.states(spec)),
        master_(master) {}

  /// Adds a tensor of equal elements.
  void add_equal() {
    std::vector<PoisonedTensor>& tensor = tensors_.emplace_back();
    auto fill = [&](DType dtype, const Extents& extents, float value) {
      tensor.emplace_back(dtype, extents, std::vector<float>(static_cast<std::size_t>(element_count(extents)), value));
    };
    fill(DType::f32, spec_.extents, 0.5f);
    fill(master_, spec_.extents, 1);
    for (const OptimizerState& state : states_) fill(state.evaluated ? master_ : state.dtype, state.extents, 1);
  }
  /// Adds a tensor: its gradient, master and states, with values of that seed.
  void add(std::uint64_t seed) {
    std::vector<PoisonedTensor>& tensor = tensors_.emplace_back();
    auto fill = [&](DType dtype, const Extents& extents, double mean, double deviation) {
      std::vector<float> values = testkit::random_normal(element_count(extents), seed * 64 + tensor.size(), deviation);
      for (float& value : values) value = static_cast<float>(mean + std::fabs(value));
      tensor.emplace_back(dtype, extents, values);
    };
    fill(DType::f32, spec_.extents, -0.5, 1);
    fill(DType::f32, spec_.extents, -0.5, 1);
    for (const OptimizerState& state : states_)  // positive, as second moments are
      size_of(state.dtype) == 1 ? fill(state.dtype, state.extents, 1, 30) : fill(state.dtype, state.extents, 0.01, 0.1);
  }
  PoisonedTensor& operand(std::size_t tensor, std::size_t i) { return tensors_[tensor][i]; }
  std::size_t operands() const { return 2 + states_.size(); }
  std::string name_of(std::size_t i) const { return i == 0 ? "gradient" : i == 1 ? "master" : states_[i - 2].name; }

  /// New masters and states, by tensor and operand (from 1).
  std::vector<PoisonedTensor> run(std::int64_t first = 0, std::int64_t rows = -1) const {
    const std::int64_t taken = rows < 0 ? spec_.extents[0] : rows;
    UpdateBuilder builder = update_builder(ops_, "step");
    std::vector<PoisonedTensor> values;  // of the program
    const UpdateState update{.gradient_scale = 0.5f, .gradient_norm = 1.0f, .apply = 1.0f};
    StepState step{.step = 6, .seed_low = 5, .learning_rate = 0.01f, .clip_norm = 1.0f, .updates = 6};
    step.average = 0.2f;
    values.emplace_back(DType::f32, Extents{4});
    values.emplace_back(DType::u32, Extents{16});
    std::memcpy(values[0].view().data, &update, sizeof update);
    std::memcpy(values[1].view().data, &step, sizeof step);
    std::vector<std::size_t> results;
    for (const auto& tensor : tensors_) {
      const std::int64_t number = &tensor - tensors_.data();
      UpdateBuilder::Tensors given{.spec = &spec_, .states = states_, .object = 3 + number};
      given.offset = first * spec_.count() / spec_.extents[0];
      for (std::size_t i = 0; i < tensor.size(); ++i) {
        if (i > 0) results.push_back(values.size());
        values.push_back(rows_of(tensor[i].view(), first, taken));
        const Extents& extents = values.back().view().extents;
        const ValueId id = builder.program().add_value({.name = name_of(i) + "." + std::to_string(number),
                                                        .shape = Shape(extents.begin(), extents.end()),
                                                        .dtype = values.back().view().dtype,
                                                        .role = Role::state});
        (i == 0 ? given.gradient : i == 1 ? given.master : given.state_values.emplace_back()) = id;
      }
      builder.begin(std::move(given));
      optimizer_.update(builder, spec_);
      add_locals(builder.program(), values);
    }
    launch(builder.take(), values);
    std::vector<PoisonedTensor> made;
    for (std::size_t i : results) made.push_back(std::move(values[i]));
    return made;
  }

 private:
  static PoisonedTensor rows_of(const View& whole, std::int64_t first, std::int64_t rows) {
    View view = whole;
    const auto row = static_cast<std::int64_t>(whole.bytes()) / whole.extents[0];
    view.data = whole.as<char>() + first * row;
    view.extents[0] = rows;
    PoisonedTensor part(view.dtype, view.extents);
    std::memcpy(part.view().data, view.data, view.bytes());
    return part;
  }

  static void add_locals(const Program& program, std::vector<PoisonedTensor>& values) {
    for (std::size_t i = values.size(); i < program.values.size(); ++i)
      values.emplace_back(program.values[i].dtype, fixed_extents(program.values[i].shape));
  }

  void launch(const Program& program, std::vector<PoisonedTensor>& values) const {
    const std::vector<bool> read = read_values(program);
    for (const Op& op : program.ops) {
      std::vector<View> inputs;
      for (ValueId id : op.inputs)
        inputs.push_back(id == kNoValue ? View{} : values[static_cast<std::size_t>(id)].view());
      std::vector<std::pair<int, int>> in_place;
      for (std::size_t o = 0; o < op.outputs.size(); ++o)
        for (std::size_t i = 0; i < op.inputs.size(); ++i)
          if (op.outputs[o] != kNoValue && op.outputs[o] == op.inputs[i])
            in_place.emplace_back(static_cast<int>(o), static_cast<int>(i));
      std::vector<PoisonedTensor> results =
          testkit::launch_once(device_, instantiate(program, op, {}, read), inputs, in_place);
      for (std::size_t o = 0; o < op.outputs.size(); ++o)
        if (op.outputs[o] != kNoValue) values[static_cast<std::size_t>(op.outputs[o])] = std::move(results[o]);
    }
  }

  Device& device_;
  const OpSet& ops_;
  const Optimizer& optimizer_;
  const ParameterSpec& spec_;
  std::vector<OptimizerState> states_;
  DType master_;
  std::vector<std::vector<PoisonedTensor>> tensors_;
};

}  // namespace quern::conformance
