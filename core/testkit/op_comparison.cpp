#include "quern/testkit/op_comparison.h"

#include <algorithm>
#include <cstring>
#include <deque>
#include <utility>

#include "quern/error.h"
#include "quern/random.h"
#include "quern/testkit/device_memory.h"

namespace quern::testkit {

namespace {

bool same_bytes(const View& a, const View& b) { return a.bytes() == 0 || std::memcmp(a.data, b.data, a.bytes()) == 0; }

std::string compare(const View& got, const View& want, const Tolerance& tolerance) {
  if (got.dtype == DType::u32 || got.dtype == DType::i32) return same_bytes(got, want) ? "" : "integers differ";
  return testkit::mismatch(to_floats(got), to_floats(want), tolerance.relative, tolerance.absolute);
}

std::string numbered(const char* what, std::size_t i) { return std::string(what) + " " + std::to_string(i); }

}  // namespace

OpComparison::OpComparison(std::string kind, Attributes attributes, Geometry geometry) {
  op_.kind = std::move(kind);
  op_.attributes = std::move(attributes);
  op_.geometry = geometry;
}

OpComparison& OpComparison::in(PoisonedTensor tensor) {
  op_.inputs.push_back({tensor.view().dtype, tensor.view().extents, true, false});
  inputs_.push_back(std::move(tensor));
  return *this;
}

OpComparison& OpComparison::nan_beside_inputs() {
  beside_inputs_ = 0xFF;
  return *this;
}

OpComparison& OpComparison::absent() {
  op_.inputs.push_back({});
  inputs_.emplace_back(DType::u8, Extents{0});
  return *this;
}

OpComparison& OpComparison::out(DType dtype, Extents extents, Tolerance tolerance) {
  op_.outputs.push_back({dtype, std::move(extents), true, false});
  outputs_.push_back({.tolerance = tolerance});
  return *this;
}

OpComparison& OpComparison::opaque(DType dtype, Extents extents) {
  out(dtype, std::move(extents), {});
  outputs_.back().compared = false;
  return *this;
}

OpComparison& OpComparison::sum(DType dtype, Extents extents, Tolerance tolerance) {
  outputs_.push_back({.tolerance = tolerance, .initial = static_cast<int>(initial_.size())});
  initial_.push_back(normal(dtype, extents, 1000 + initial_.size()));
  op_.outputs.push_back({dtype, std::move(extents), true, true});
  return *this;
}

OpComparison& OpComparison::unread(DType dtype, Extents extents) {
  op_.outputs.push_back({dtype, std::move(extents), false, false});
  outputs_.push_back({});
  return *this;
}

OpComparison& OpComparison::update(std::size_t i, Tolerance tolerance) {
  Operand operand = op_.inputs.at(i);
  op_.outputs.push_back(operand);
  outputs_.push_back({.tolerance = tolerance, .updates = static_cast<int>(i)});
  return *this;
}

std::string OpComparison::label() const {
  std::string text = op_.kind + "(";
  for (const Operand& input : op_.inputs)
    text += (input.present ? std::string(name_of(input.dtype)) + to_string(input.extents) : "-") + " ";
  text += ") -> (";
  for (const Operand& output : op_.outputs)
    text += std::string(name_of(output.dtype)) + to_string(output.extents) +
            (output.accumulate ? "+ "
             : output.present  ? " "
                               : "? ");
  return text + ")";
}

/// Operands in device memory, with their expected values.
class OpComparison::Launch {
 public:
  Launch(const OpComparison& op, Device& device) : op_(op), device_(device) {
    for (std::size_t i = 0; i < op.inputs_.size(); ++i) {
      const Operand& operand = op.op_.inputs[i];
      input_blocks_.push_back(operand.present ? block_of(operand, op.inputs_[i].view().data) : -1);
      inputs.push_back(view_of(operand, input_blocks_.back()));
    }
    for (std::size_t i = 0; i < op.outputs_.size(); ++i) {
      const Operand& operand = op.op_.outputs[i];
      const Output& output = op.outputs_[i];
      int block = -1;
      if (output.updates >= 0) {
        block = input_blocks_[static_cast<std::size_t>(output.updates)];
      } else if (operand.present) {
        block = block_of(
            operand, output.initial < 0 ? nullptr : op.initial_[static_cast<std::size_t>(output.initial)].view().data);
      }
      output_blocks_.push_back(block);
      outputs.push_back(view_of(operand, block));
    }
  }

  Results results() const {
    Results results;
    for (std::size_t i = 0; i < outputs.size(); ++i) {
      const Operand& operand = op_.op_.outputs[i];
      results.emplace_back(operand.dtype, operand.present ? operand.extents : Extents{0});
      if (output_blocks_[i] >= 0) block(output_blocks_[i]).read(results.back().view().data);
    }
    return results;
  }

  /// Writes outside of outputs.
  void add_faults(std::vector<std::string>& faults) const {
    auto guard = [&](const char* what, std::size_t i, int number) {
      std::string side = number < 0 ? "" : block(number).touched();
      if (!side.empty()) faults.push_back("written " + side + " " + numbered(what, i));
    };
    for (std::size_t i = 0; i < inputs.size(); ++i) {
      guard("input", i, input_blocks_[i]);
      bool output = std::find(output_blocks_.begin(), output_blocks_.end(), input_blocks_[i]) != output_blocks_.end();
      if (input_blocks_[i] < 0 || output) continue;
      PoisonedTensor now(op_.op_.inputs[i].dtype, op_.op_.inputs[i].extents);
      block(input_blocks_[i]).read(now.view().data);
      if (!same_bytes(now.view(), op_.inputs_[i].view())) faults.push_back(numbered("input", i) + " was written to");
    }
    for (std::size_t i = 0; i < outputs.size(); ++i) guard("output", i, output_blocks_[i]);
  }

  std::vector<View> inputs, outputs;

 private:
  int block_of(const Operand& operand, const void* content) {
    const std::uint8_t guard = content != nullptr ? op_.beside_inputs_ : kBesideOutputs;
    blocks_.emplace_back(device_, static_cast<std::size_t>(operand.bytes()), MemoryKind::device, guard);
    if (content != nullptr) blocks_.back().write(content);
    return static_cast<int>(blocks_.size()) - 1;
  }
  const DeviceMemory& block(int number) const { return blocks_[static_cast<std::size_t>(number)]; }
  View view_of(const Operand& operand, int number) const {
    return number < 0 ? View{} : View{block(number).data(), operand.dtype, operand.extents};
  }

  const OpComparison& op_;
  Device& device_;
  std::deque<DeviceMemory> blocks_;
  std::vector<int> input_blocks_, output_blocks_;
};

OpComparison::Results OpComparison::run_on(Device& device, How how, std::vector<std::string>& faults) const {
  OpSupport support = device.query(op_);
  if (!support.refusal.empty()) fail_internal(label(), "is refused: " + support.refusal);
  Launch operands(*this, device);
  DeviceMemory workspace(device, support.workspace_bytes);
  Stream stream = device.stream(StreamKind::compute);
  std::unique_ptr<Kernel> kernel = device.prepare(op_);
  auto launch = [&] { kernel->launch(operands.inputs, operands.outputs, {stream, workspace.data()}); };
  std::unique_ptr<Graph> graph;
  if (how == How::captured) {
    graph = device.capture(stream, launch);
    graph->launch(stream);
  } else {
    launch();
  }
  device.synchronize(stream);
  if (std::string side = workspace.touched(); !side.empty()) faults.push_back("written " + side + " the workspace");
  operands.add_faults(faults);
  return operands.results();
}

std::vector<std::string> OpComparison::faults(Device& oracle, Device& device) const {
  std::vector<std::string> faults, of_oracle;
  Results want = run_on(oracle, How::eager, of_oracle), got = run_on(device, How::eager, faults);
  Results again = run_on(device, How::eager, faults);
  Results captured = device.traits().can_capture ? run_on(device, How::captured, faults) : got;
  for (std::size_t i = 0; i < outputs_.size(); ++i) {
    if (!op_.outputs[i].present) continue;
    auto fault = [&](const std::string& what) { faults.push_back(numbered("output", i) + ": " + what); };
    if (outputs_[i].compared)
      if (std::string differs = compare(got[i].view(), want[i].view(), outputs_[i].tolerance); !differs.empty())
        fault(differs);
    if (!same_bytes(got[i].view(), again[i].view())) fault("a second run gives other bits");
    if (!same_bytes(got[i].view(), captured[i].view())) fault("capture changes bits");
  }
  return faults;
}

PoisonedTensor normal(DType dtype, Extents extents, std::uint64_t seed, double deviation, double mean) {
  std::vector<float> values = random_normal(element_count(extents), seed, deviation);
  for (float& value : values) value += static_cast<float>(mean);
  return PoisonedTensor(dtype, std::move(extents), values);
}

PoisonedTensor integers(std::int64_t count, std::int64_t lowest, std::int64_t end, std::uint64_t seed) {
  PoisonedTensor tensor(DType::i32, {count});
  RandomKey key{seed, RandomPurpose::init, 0};
  for (std::int64_t i = 0; i < count; ++i)
    tensor.view().as<std::int32_t>()[i] = static_cast<std::int32_t>(
        lowest + random_word(key, 0, static_cast<std::uint64_t>(i)) % static_cast<std::uint64_t>(end - lowest));
  return tensor;
}

PoisonedTensor integer_list(const std::vector<std::int32_t>& values) {
  PoisonedTensor tensor(DType::i32, {static_cast<std::int64_t>(values.size())});
  std::memcpy(tensor.view().data, values.data(), values.size() * sizeof(std::int32_t));
  return tensor;
}

}  // namespace quern::testkit
