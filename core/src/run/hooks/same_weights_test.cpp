// Who differs, by what each rank has.
#include "run/hooks/same_weights.h"

#include <doctest/doctest.h>

using namespace quern;

TEST_CASE("ranks that differ from more than half of all are named, or all") {
  CHECK(ranks_that_differ({"a"}, 0, 1) == "");
  CHECK(ranks_that_differ({"a", "a", "a"}, 0, 1) == "");
  CHECK(ranks_that_differ({"a", "a", "b"}, 0, 1) == "rank 2");
  CHECK(ranks_that_differ({"b", "a", "a", "a"}, 0, 1) == "rank 0");
  CHECK(ranks_that_differ({"a", "b", "a", "c", "a"}, 0, 1) == "ranks 1, 3");
  CHECK(ranks_that_differ({"a", "b"}, 0, 1) == "ranks 0, 1");
  CHECK(ranks_that_differ({"a", "a", "b", "b"}, 0, 1) == "ranks 0, 1, 2, 3");
  CHECK(ranks_that_differ({"a", "a", "b"}, 1, 4) == "rank 9");
  CHECK(ranks_that_differ({"a", "b"}, 3, 8) == "ranks 3, 11");
}
