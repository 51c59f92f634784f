#include "quern/error.h"

#include <utility>

#include "base/shorten.h"
#include "quern/checked.h"

namespace quern {

namespace {

// Bytes of the parts. A quotation in them may be a name of any length; `what` may be a list of findings, and names
// in it are shortened where they are put in.
constexpr std::size_t kMostWhat = 16000, kMostOther = 500;

std::string join(const ErrorDetail& d) {
  std::string text = bounded(d.where, kMostOther);
  auto part = [&text](std::string_view separator, std::string_view label, const std::string& value, std::size_t most) {
    if (value.empty()) return;
    if (!text.empty()) text += separator;
    text += label;
    text += bounded(value, most);
  };
  part(": ", "", d.what, kMostWhat);
  part(": ", "found ", d.found, kMostOther);
  part(d.found.empty() ? ": " : ", ", "expected ", d.expected, kMostOther);
  part("; ", "", d.next, kMostOther);
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

void fail_too_large(std::int64_t a, char operation, std::int64_t b) {
  throw Error(ErrorCode::resources, {.where = "plan",
                                     .what = "a size is beyond what 64-bit numbers hold",
                                     .found = std::to_string(a) + " " + operation + " " + std::to_string(b),
                                     .expected = {},
                                     .next = "lower train.micro_batch, train.sequence or the sizes of the model"});
}

}  // namespace quern
