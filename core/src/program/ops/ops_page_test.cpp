// docs/ops.md against the specs: each op has one row, which begins with its operands and outputs.
#include <algorithm>
#include <fstream>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include "quern/op_spec.h"
#include "test_paths.h"

using namespace quern;

namespace {

std::string joined(const std::vector<std::string>& names) {
  std::string text;
  for (const std::string& name : names) text += (text.empty() ? "" : ", ") + name;
  return text;
}

/// Lines of the page's tables that begin with a name in code.
std::vector<std::string> rows_of_page() {
  std::ifstream page(QUERN_SOURCE_DIR "/docs/ops.md");
  std::vector<std::string> rows;
  for (std::string line; std::getline(page, line);)
    if (line.starts_with("| `") && !line.starts_with("| `scale_rows_b`")) rows.push_back(line);
  return rows;
}

}  // namespace

TEST_CASE("the page of ops has each op with its operands and outputs, and no other") {
  const OpSet ops = builtin_ops();
  const std::vector<std::string> rows = rows_of_page();
  for (const std::string& kind : ops.kinds()) {
    const OpSpec& spec = ops.at(kind);
    const std::string row = "| `" + kind + "` | " + joined(spec.inputs) + " | " + joined(spec.outputs) + " | ";
    CAPTURE(row);
    CHECK(std::count_if(rows.begin(), rows.end(), [&](const std::string& line) { return line.starts_with(row); }) == 1);
  }
  CHECK(rows.size() == ops.kinds().size());
}
