#pragma once
// Pass 3a, read as stored: a product that reads a transposed copy reads what it is a copy of instead, with the flag of
// that operand turned, where the device takes that form. No copy is made that nobody reads then. Products contract over
// the same elements in both forms.

#include <functional>

#include "program/passes/differentiate.h"

namespace quern {

/// Copies are those of OpSpec::transposed and OpSpec::transposes. One goes only if all that reads it are products that
/// change with it, and if what it is a copy of is there anyway: else nothing is saved. A device may take a product with
/// one operand turned but not with both, so the largest copy is tried first.
/// `accepts` is asked about every form in which a changed product would run (OpForms), and has to take them all.
JointProgram read_as_stored(JointProgram joint, const OpSet& ops, const Geometry& geometry,
                            const std::function<bool(const OpInstance&)>& accepts);

}  // namespace quern
