#pragma once
// Whether a call leaves something behind each time: memory that is not freed or unmapped, an open file, a thread.

#include <cstdint>
#include <functional>
#include <string>

namespace quern::conformance {

/// How often a call is made, and by how many bytes the heap may grow: less than a thousand of the least that malloc
/// gives, more than what its caches and amortized arrays take.
struct Repeats {
  int first = 100, calls = 1000;
  std::int64_t most_growth = 24'000;
};

/// Makes calls behind the first ones, and breaks the contract if the process's heap, shared mappings, open files
/// or threads grew with them. `what` names a call. Returns a detail for the table. A build whose allocator tells
/// nothing of its heap (address sanitizer) does not look at it.
std::string need_no_growth(const std::string& what, const std::function<void()>& call, const Repeats& repeats = {});

}  // namespace quern::conformance
