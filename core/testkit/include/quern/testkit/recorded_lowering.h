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
  std::vector<StateRequest> states;
  std::vector<WorkingCopy> copies;

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
  ValueId state(StateRequest request) override {
    states.push_back(std::move(request));
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

}  // namespace quern::testkit
