#pragma once
// The one exception type of quern. Libraries throw it and never print or exit; the frontend prints it once and
// leaves with its code. A message says where, what was found, what was expected and what to do next.

#include <exception>
#include <string>
#include <string_view>

namespace quern {

/// Process exit codes, one per kind of fault.
enum class ErrorCode : int { internal = 1, config = 2, input = 3, resources = 4, numerics = 5, communication = 6 };

/// The parts of a message; empty parts are left out. All text is for people.
struct ErrorDetail {
  std::string where = {};     ///< file:line:col, path, config key or program value
  std::string what = {};      ///< what is wrong, one clause
  std::string found = {};     ///< the offending value, as found
  std::string expected = {};  ///< the valid values
  std::string next = {};      ///< the next step for the user
};

class Error : public std::exception {
 public:
  Error(ErrorCode code, ErrorDetail detail);

  ErrorCode code() const noexcept { return code_; }
  const ErrorDetail& detail() const noexcept { return detail_; }
  /// "where: what: found X, expected Y; next", parts that are empty left out.
  const char* what() const noexcept override { return message_.c_str(); }

 private:
  ErrorCode code_;
  ErrorDetail detail_;
  std::string message_;
};

/// Throws an internal error: a broken invariant of quern itself, not a user's mistake.
[[noreturn]] void fail_internal(std::string_view where, std::string_view what);

}  // namespace quern
