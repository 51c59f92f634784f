#pragma once
// Whether a call leaves something behind each time: memory that is not freed, an open file, a thread.

#include <functional>
#include <string>

namespace quern::conformance {

/// Makes 1,000 calls behind a first hundred, and breaks the contract if the process's heap, open files or threads grew
/// with them. `what` names a call. Returns a detail for the table. A build whose allocator tells nothing of its heap
/// (address sanitizer) looks at files and threads alone.
std::string need_no_growth(const std::string& what, const std::function<void()>& call);

}  // namespace quern::conformance
