#include "quern/error.h"

#include <utility>

#include "base/shorten.h"

namespace quern {

namespace {

std::string join(const ErrorDetail& d) {
  std::string text = d.where;
  auto part = [&text](std::string_view separator, std::string_view label, const std::string& value) {
    if (value.empty()) return;
    if (!text.empty()) text += separator;
    text += label;
    text += value;
  };
  part(": ", "", d.what);
  part(": ", "found ", d.found);
  part(d.found.empty() ? ": " : ", ", "expected ", d.expected);
  part("; ", "", d.next);
  return without_control(text);  // files that others wrote are quoted in it
}

}  // namespace

Error::Error(ErrorCode code, ErrorDetail detail) : code_(code), detail_(std::move(detail)), message_(join(detail_)) {}

void fail_internal(std::string_view where, std::string_view what) {
  throw Error(ErrorCode::internal, {.where = std::string(where),
                                    .what = std::string(what),
                                    .found = {},
                                    .expected = {},
                                    .next = "this is a fault in quern or a plugin; please report it"});
}

}  // namespace quern
