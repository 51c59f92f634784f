#pragma once
// The conformance kit: runs every contract of a plugin's kind, against the CPU device as the oracle. Behind
// `quern plugins check`.

#include "conformance/report.h"
#include "conformance/subject.h"

namespace quern::conformance {

/// `what` is a plugin's file, or KIND/ID of one that is built in or found by search. Everything that a file offers is
/// checked. A file that is refused is a broken contract; a KIND/ID that there is not is a config error. `progress`: see
/// Report.
Report check(PluginHost& host, const std::string& what, const CheckOptions& options, Progress* progress = nullptr);

}  // namespace quern::conformance
