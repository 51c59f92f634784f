#pragma once
// A Lowering that only writes down what a precision backend asks for, so that a backend is tested without a program.

#include <string>
#include <utility>
#include <vector>

#include "quern/precision.h"

namespace quern::testkit {

class RecordedLowering final : public Lowering {
 public:
  struct WorkingCopy {
    std::string parameter, kind;
    Attributes attributes;
  };
  /// By emit(). Values that the backend is given are numbered from 1000; here and in a working copy there are three, of
  /// which it takes as many as the op has.
  std::vector<Op> emitted;
  std::vector<Op> produced;  ///< by produce()
  std::vector<StateSpec> states;
  std::vector<WorkingCopy> copies;

  RecordedLowering() {
    for (int i = 0; i < 10; ++i) program_.add_value({.name = "value " + std::to_string(i)});
  }

  /// Values of a site, without shapes.
  const Program& program() const override { return program_; }
  bool training() const override { return true; }
  std::vector<ValueId> emit(std::string kind, std::vector<ValueId> inputs, Attributes attributes,
                            std::string) override {
    emitted.push_back({.kind = std::move(kind),
                       .inputs = std::move(inputs),
                       .outputs = three(),
                       .attributes = std::move(attributes)});
    return emitted.back().outputs;
  }
  void produce(std::string kind, std::vector<ValueId> inputs, Attributes attributes) override {
    produced.push_back({.kind = std::move(kind), .inputs = std::move(inputs), .attributes = std::move(attributes)});
  }
  ValueId state(StateSpec spec) override {
    states.push_back(std::move(spec));
    return next_++;
  }
  std::vector<ValueId> working_copy(std::string_view parameter, std::string kind, Attributes attributes) override {
    copies.push_back({std::string(parameter), std::move(kind), std::move(attributes)});
    return three();
  }

 private:
  std::vector<ValueId> three() {
    next_ += 3;
    return {next_ - 3, next_ - 2, next_ - 1};
  }

  Program program_;
  ValueId next_ = 1000;
};

/// A backend's lowering of a linear's matmuls: the output with a bias, the output without, the gradient of the input
/// and of the weight. x is value 1, the weight 2 (parameter "w"), the bias 3 and dy 4.
inline RecordedLowering lowered_linear(const PrecisionBackend& backend) {
  RecordedLowering lowering;
  ProductSite site{.product = Product::output, .parameter = "w", .x = 1, .weight = 2, .bias = 3, .result = 9};
  backend.lower(site, lowering);
  site.bias = kNoValue;
  backend.lower(site, lowering);
  backend.lower({.product = Product::input_gradient, .parameter = "w", .weight = 2, .dy = 4, .result = 9}, lowering);
  backend.lower({.product = Product::weight_gradient, .parameter = "w", .x = 1, .dy = 4, .result = 9}, lowering);
  return lowering;
}

/// An op as "matmul(1, 2, -) transpose_a=0 transpose_b=1".
inline std::string line_of(const Op& op) {
  std::string text;
  for (const ValueId input : op.inputs)
    text += (text.empty() ? "" : ", ") + (input == kNoValue ? "-" : std::to_string(input));
  text = op.kind + "(" + text + ")";
  for (const auto& [name, value] : op.attributes.all()) text += " " + name + "=" + to_string(value);
  return text;
}

/// Empty where a backend makes one plain matmul of each, of the operands as they are, and asks for nothing else.
inline std::string plain_linear_fault(const PrecisionBackend& backend) {
  const RecordedLowering lowering = lowered_linear(backend);
  if (!lowering.emitted.empty() || !lowering.states.empty() || !lowering.copies.empty())
    return "asks for more than matmuls";
  std::string found;
  for (const Op& op : lowering.produced) found += line_of(op) + "\n";
  constexpr const char* kExpected =
      "matmul(1, 2, 3) transpose_a=0 transpose_b=1\n"
      "matmul(1, 2, -) transpose_a=0 transpose_b=1\n"
      "matmul(4, 2) transpose_a=0 transpose_b=0\n"
      "matmul(4, 1) transpose_a=1 transpose_b=0\n";
  return found == kExpected ? "" : found + "expected\n" + kExpected;
}

}  // namespace quern::testkit
