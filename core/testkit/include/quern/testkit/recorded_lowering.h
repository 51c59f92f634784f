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
  std::vector<Op> emitted;   ///< by emit(); each has one output, numbered from 1000
  std::vector<Op> produced;  ///< by produce()
  std::vector<StateRequest> states;
  std::vector<WorkingCopy> copies;

  const Program& program() const override { return program_; }
  bool training() const override { return true; }
  std::vector<ValueId> emit(std::string kind, std::vector<ValueId> inputs, Attributes attributes,
                            std::string) override {
    emitted.push_back({.kind = std::move(kind),
                       .inputs = std::move(inputs),
                       .outputs = {next_},
                       .attributes = std::move(attributes)});
    return {next_++};
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
    return {next_++};
  }

 private:
  Program program_;
  ValueId next_ = 1000;
};

}  // namespace quern::testkit
