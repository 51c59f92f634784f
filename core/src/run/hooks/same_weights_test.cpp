// Who differs, by what each rank has.
#include "run/hooks/same_weights.h"

#include <doctest/doctest.h>

using namespace quern;

TEST_CASE("ranks that differ from more than half of all are named, or all") {
  CHECK(ranks_that_differ({"a"}) == "");
  CHECK(ranks_that_differ({"a", "a", "a"}) == "");
  CHECK(ranks_that_differ({"a", "a", "b"}) == "rank 2");
  CHECK(ranks_that_differ({"b", "a", "a", "a"}) == "rank 0");
  CHECK(ranks_that_differ({"a", "b", "a", "c", "a"}) == "ranks 1, 3");
  CHECK(ranks_that_differ({"a", "b"}) == "ranks 0, 1");
  CHECK(ranks_that_differ({"a", "a", "b", "b"}) == "ranks 0, 1, 2, 3");
}
