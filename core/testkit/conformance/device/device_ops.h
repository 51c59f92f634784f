#pragma once
// The ops of a device: planned, and run against the oracle.

#include <functional>
#include <map>
#include <string>
#include <vector>

#include "conformance/subject.h"
#include "quern/testkit/op_comparison.h"

namespace quern::conformance {

/// A list of cases. `compare` runs them all on both devices and throws what differs; none: run each case by itself.
struct OpFamily {
  std::string name;
  std::function<void(const testkit::OpRunner&)> cases;
  std::function<std::string(Device& oracle, Device& device)> compare = {};
};
const std::vector<OpFamily>& op_families();

/// Ops of which the device refuses a case, each with the first reason.
std::map<std::string, std::string> refused_ops(const Device& device);
/// Every case is accepted or refused with a reason, every kind without operands refused; counts by kind.
std::string plans_ops(const Device& device);
/// Both devices are open.
std::string compare_family(const OpFamily& family, Device& oracle, Device& device);

/// Models give the same bits with and without the device's fusions without a matmul.
std::string fusions_change_no_bit(const Subject& subject, Device& device);
/// Losses and gradients of small models against the oracle's.
std::string models_agree(const Subject& subject, Device& device);

}  // namespace quern::conformance
