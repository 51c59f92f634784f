#pragma once
// Contracts of ops that a plugin brings, in the forms that a plan has them.

#include <string>

#include "conformance/subject.h"
#include "plan/plan.h"

namespace quern::conformance {

/// Runs each form of the plugin's ops in the plan on the oracle, with random operands.
std::string check_own_ops(const Subject& subject, const Plan& plan);

/// The op with one of its inputs in bf16, activations and weights, in another dtype, as its OpSpec infers it, is
/// refused, or has the same values. Returns how many such forms are accepted.
int need_known_dtypes(const OpInstance& op, const OpSpec& spec, Device& device);

}  // namespace quern::conformance
