#pragma once
// What the author of a plugin meant, beside what every plugin of its kind does: a file of cases, options and what the
// implementation does with them, which the kit writes (`--write`), the author reviews, and later checks compare with.

#include "conformance/report.h"
#include "conformance/subject.h"

namespace quern::conformance {

/// Compares with options.expected, or writes it; nothing when there is no file.
void check_expected(Report& report, const Subject& subject);

}  // namespace quern::conformance
