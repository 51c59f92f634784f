#include "program/heads.h"

namespace quern {

std::string heads_fault(const ParameterPart& part) {
  std::int64_t rows = 0;
  for (const HeadRows& run : part.heads) {
    if (run.heads < 1 || run.rows < 1 || run.group < 1 || run.heads % run.group != 0)
      return "are not whole groups of at least one head with at least one row";
    rows += run.heads * run.rows;
  }
  return part.heads.empty() || rows == part.rows ? "" : "do not have the part's rows";
}

}  // namespace quern
