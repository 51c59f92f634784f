#include "tests/op_harness.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <utility>
#include <vector>

#include <doctest/doctest.h>

#include "quern/numeric.h"
#include "quern/step_state.h"

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
        // One row is elsewhere, and the sum takes its place; x's is not read.
        for (std::int64_t own = 0; own < ranks; ++own) {
          PoisonedTensor others = normal(dtype, {ranks, count}, 3), row(dtype, {count});
          const std::size_t bytes = row.view().bytes();
          char* const there = others.view().as<char>() + static_cast<std::size_t>(own) * bytes;
          std::memcpy(row.view().data, there, bytes);
          std::memset(there, 0xFF, bytes);
          TestOp{"reduce_ranks",
                 {others.view(), row.view()},
                 {row.view()},
                 {{"reduction", std::string("sum")}, {"own", own}}}
              .run();
          REQUIRE(row.floats() == got);
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

namespace {

/// The first half of a tree is as large as a power of two can be.
template <class T>
T sum_of(const std::vector<T>& x, std::size_t begin, std::size_t end) {
  if (end - begin == 1) return x[begin];
  const std::size_t middle = begin + std::bit_floor(end - begin - 1);
  return sum_of(x, begin, middle) + sum_of(x, middle, end);
}

}  // namespace

TEST_CASE("micro-batches summed in blocks, and then ranks, are summed in one tree") {
  for (const auto& [count, block] : {std::pair(1, 1), {2, 2}, {7, 8}, {7, 2}, {7, 4}, {8, 2}, {12, 4}, {11, 1}}) {
    CAPTURE(count);
    CAPTURE(block);
    const int ranks = (count + block - 1) / block, levels = std::bit_width(static_cast<unsigned>(block)) - 1;
    const std::vector<float> all = normal(DType::f32, {count}, 5).floats();
    const PoisonedTensor x(DType::f32, {ranks, 1}), y(DType::f32, {1}), step(DType::u32, {16});
    for (int rank = 0; rank < ranks; ++rank) {
      const PoisonedTensor sum(DType::f32, {1}), partials(DType::f32, {levels, 1});
      for (int number = rank * block; number < std::min(count, (rank + 1) * block); ++number) {
        StepState state;
        state.micro_step = static_cast<std::uint32_t>(number);
        std::memcpy(step.view().data, &state, sizeof state);
        *sum.view().as<float>() = all[static_cast<std::size_t>(number)];
        TestOp{"sum_tree",
               {step.view(), sum.view(), partials.view()},
               {sum.view(), partials.view()},
               {{"block", std::int64_t{block}}, {"count", std::int64_t{count}}}}
            .run();
      }
      x.view().as<float>()[rank] = *sum.view().as<float>();
    }
    reduce(x, y, "tree").run();
    CHECK(*y.view().as<float>() == sum_of(all, 0, all.size()));
  }
}

TEST_CASE("other reductions are refused") {
  const PoisonedTensor x(DType::bf16, {2, 4}), y(DType::bf16, {4}), other(DType::f32, {4});
  CHECK(reduce(x, y, "maximum").refusal().find("found maximum of bf16") != std::string::npos);
  CHECK(reduce(x, y, "median").refusal().find("found median") != std::string::npos);
  CHECK(reduce(x, other, "sum").refusal() != "");
}
