#include "ab/arms.h"

#include <doctest/doctest.h>

#include "quern/error.h"

using namespace quern;
using namespace quern::ab;

namespace {

std::vector<std::string> names(const std::vector<Arm>& arms) {
  std::vector<std::string> result;
  for (const Arm& arm : arms) result.push_back(arm.name);
  return result;
}

}  // namespace

TEST_CASE("values are separated by commas outside brackets and quotes") {
  using Words = std::vector<std::string>;
  CHECK(split_values("bf16,fp32") == Words{"bf16", "fp32"});
  CHECK(split_values(" [\"a\", \"b\"] , []") == Words{"[\"a\", \"b\"]", "[]"});
  CHECK(split_values(R"("a,\",b",'c,"d')") == Words{R"("a,\",b")", R"('c,"d')"});
  CHECK(split_values("a,") == Words{"a", ""});
  CHECK(split_values("\"open,") == Words{"\"open,"});
}

TEST_CASE("several keys make all combinations, the first key slowest") {
  auto arms = make_arms({"precision.id=bf16,fp32", "train.micro_batch=1,2"}, {});
  CHECK(names(arms) ==
        std::vector<std::string>{"precision.id=bf16, train.micro_batch=1", "precision.id=bf16, train.micro_batch=2",
                                 "precision.id=fp32, train.micro_batch=1", "precision.id=fp32, train.micro_batch=2"});
  CHECK(arms[3].overrides == std::vector<std::string>{"precision.id=fp32", "train.micro_batch=2"});
  CHECK(arms[3].folder == "4-precision.id=fp32__train.micro_batch=2");
}

TEST_CASE("arms by hand follow, and set several keys") {
  auto arms = make_arms({}, {"precision.id=bf16", R"(precision.id=fp32, memory.recompute=["a","b"])"});
  REQUIRE(arms.size() == 2);
  CHECK(arms[1].overrides == std::vector<std::string>{"precision.id=fp32", R"(memory.recompute=["a","b"])"});
  CHECK(arms[1].folder.find_first_of("[]\", ") == std::string::npos);
  CHECK(make_arms({"a.b=1,2"}, {"a.b=3"}).size() == 3);
  CHECK(make_arms({"a.b=/x/../y," + std::string(500, 'z')}, {})[1].folder.size() < 100);
}

TEST_CASE("what cannot be compared is refused, with the words") {
  auto refused = [](const std::vector<std::string>& vary, const std::vector<std::string>& by_hand, const char* part) {
    CAPTURE(part);
    CHECK_THROWS_WITH_AS(make_arms(vary, by_hand), doctest::Contains(part), Error);
  };
  refused({}, {}, "0 arms");
  refused({"a.b=1"}, {}, "1 arm,");
  refused({"a.b"}, {}, "not an assignment");
  refused({"a.b=1,,2"}, {}, "empty value");
  refused({"a.b=1,1"}, {}, "the same arm twice");
  refused({"log.directory=x,y"}, {}, "log.directory");
  refused({"a.b=1,2"}, {"a.b=2"}, "the same arm twice");
  refused({}, {"a.b=1", "junk"}, "junk");
}
