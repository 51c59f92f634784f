#pragma once
// Contracts of ops that a plugin brings, in the forms that a plan has them.

#include <string>

#include "conformance/subject.h"
#include "plan/plan.h"

namespace quern::conformance {

/// Runs each form of the plugin's ops in the plan on the oracle, with random operands.
std::string check_own_ops(const Subject& subject, const Plan& plan);

}  // namespace quern::conformance
