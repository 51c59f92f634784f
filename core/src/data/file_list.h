#pragma once
// Paths out of a config: each names a file, or with *, ? or [...] all files that match.

#include <string>
#include <vector>

namespace quern {

/// The files behind one entry, sorted by bytes, so that every machine has the same order. A pattern that matches
/// nothing is an input error at `where`; a plain path is taken as it is.
std::vector<std::string> files_of(const std::string& entry, const std::string& where);

}  // namespace quern
