#include "tests/op_harness.h"

#include <cmath>
#include <cstring>

#include <doctest/doctest.h>

#include "quern/numeric.h"

using namespace quern;
using namespace quern::cpu::harness;
using testkit::PoisonedTensor;

namespace {

TestOp reduce(const PoisonedTensor& x, const PoisonedTensor& y, const char* reduction) {
  return {"reduce_ranks", {x.view()}, {y.view()}, {{"reduction", std::string(reduction)}}};
}

}  // namespace

TEST_CASE("sums over ranks are taken in rank order, in fp32, and rounded once") {
  for (std::int64_t ranks : {1, 2, 3, 5})
    for (std::int64_t count : {1, 7, 4099})
      for (DType dtype : {DType::f32, DType::bf16}) {
        CAPTURE(ranks);
        CAPTURE(count);
        const PoisonedTensor x = normal(dtype, {ranks, count}, 3);
        const PoisonedTensor y(dtype, {count});
        reduce(x, y, "sum").run();
        const std::vector<float> all = x.floats(), got = y.floats();
        for (std::int64_t i = 0; i < count; ++i) {
          float sum = all[static_cast<std::size_t>(i)];
          for (std::int64_t rank = 1; rank < ranks; ++rank) sum += all[static_cast<std::size_t>(rank * count + i)];
          REQUIRE(got[static_cast<std::size_t>(i)] == round_to(dtype, sum));
        }
      }
}

TEST_CASE("f64 is summed in f64, and a maximum is NaN where an element is") {
  PoisonedTensor x(DType::f64, {3, 2}), y(DType::f64, {2});
  const double values[] = {1, 1e300, 0x1p-52, 1, 0x1p-52, -1e300};
  std::memcpy(x.view().data, values, sizeof values);
  reduce(x, y, "sum").run();
  CHECK(y.view().as<double>()[0] == 1 + 0x1p-51);
  CHECK(y.view().as<double>()[1] == 0);
  const float nan = std::nanf("");
  const PoisonedTensor rows(DType::f32, {3, 5},
                            std::vector<float>{-1, nan, 2, 3, nan, -2, 0, nan, 4, nan, -3, 0, 1, 2, nan});
  const PoisonedTensor most(DType::f32, {5});
  reduce(rows, most, "maximum").run();
  const float* got = most.view().as<float>();
  CHECK((got[0] == -1 && std::isnan(got[1]) && std::isnan(got[2]) && got[3] == 4 && std::isnan(got[4])));
}

TEST_CASE("other reductions are refused") {
  const PoisonedTensor x(DType::bf16, {2, 4}), y(DType::bf16, {4}), other(DType::f32, {4});
  CHECK(reduce(x, y, "maximum").refusal().find("found maximum of bf16") != std::string::npos);
  CHECK(reduce(x, y, "product").refusal().find("found product") != std::string::npos);
  CHECK(reduce(x, other, "sum").refusal() != "");
}
