#pragma once
// For doctest programs: what an action that should be refused throws, and what its text holds.

#include <string>
#include <vector>

#include <doctest/doctest.h>

#include "quern/error.h"

namespace quern::testkit {

/// What `action` throws; an internal "accepted" where it throws no Error.
template <class Action>
Error error_of(Action&& action) {
  try {
    action();
  } catch (const Error& error) {
    return error;
  }
  return Error(ErrorCode::internal, {.what = "accepted"});
}

/// The text of that error, whose code is checked; "accepted" where there is none.
template <class Action>
std::string refusal(ErrorCode code, Action&& action) {
  try {
    action();
  } catch (const Error& error) {
    CHECK(error.code() == code);
    return error.what();
  }
  return "accepted";
}

inline void check_holds(const std::string& text, const std::vector<std::string>& parts) {
  CAPTURE(text);
  for (const std::string& part : parts) {
    CAPTURE(part);
    CHECK(text.find(part) != std::string::npos);
  }
}

/// `action` throws an error of that code, whose text holds the parts.
template <class Action>
void check_refused(ErrorCode code, const std::vector<std::string>& parts, Action&& action) {
  const std::string text = refusal(code, action);
  CHECK(text != "accepted");
  check_holds(text, parts);
}

}  // namespace quern::testkit
