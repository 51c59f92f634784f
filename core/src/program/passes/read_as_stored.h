#pragma once
// Pass 3a, read as stored: a matmul that reads a transposed copy reads the original instead, with the flag of
// that operand turned, where the device takes that form. Copies without a reader are then not made. Matmuls contract
// over the same elements in both forms.

#include <functional>

#include "program/passes/differentiate.h"

namespace quern {

/// The device's answers.
struct StoredCosts {
  std::function<bool(const OpInstance&)> takes;
  std::function<double(const Program&)> seconds;  ///< about what a program takes, as it will be fused
};

/// Copies come from OpSpec::transposed and OpSpec::transposes. One goes only if all its readers are matmuls that
/// change with it, if what it is a copy of is there anyway, since else nothing is saved, and if the program then takes
/// no longer: matmuls may lose less time than the copy took, or than its maker takes where only without the copy it
/// fuses with the op before it. A device may take a matmul with one operand turned but not with both, so the largest
/// copy is tried first. The device has to take every form in which a changed matmul would run (OpForms).
JointProgram read_as_stored(JointProgram joint, const OpSet& ops, const Geometry& geometry, const StoredCosts& costs);

}  // namespace quern
