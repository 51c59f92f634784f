#pragma once
// The forms in which an op of a program runs, which are what a device is asked about: in steps that observe and in the
// others, where less is read; and writing or adding, where its outputs sum up over micro-batches.

#include <vector>

#include "program/passes/observe.h"
#include "quern/op_spec.h"

namespace quern {

class OpForms {
 public:
  /// `program` and `ops` are borrowed.
  OpForms(const Program& program, const OpSet& ops, const Geometry& geometry);

  /// Of an op of the program, each form once. Outputs that sum up write all or add all.
  std::vector<OpInstance> of(const Op& op) const;

 private:
  const Program& program_;
  const OpSet& ops_;
  Geometry geometry_;
  std::vector<bool> observed_, unobserved_;  ///< values that are read
};

}  // namespace quern
