#include <cmath>
#include <vector>

#include <doctest/doctest.h>

#include "quern/numeric.h"
#include "tests/op_harness.h"

using namespace quern;
using namespace quern::cpu::harness;
using testkit::PoisonedTensor;

TEST_CASE("transpose moves every element, whatever its size") {
  for (DType dtype : {DType::i8, DType::bf16, DType::f32, DType::f64}) {
    for (Extents extents : {Extents{1, 1}, Extents{3, 7}, Extents{33, 17}, Extents{1, 65}, Extents{100, 31}}) {
      CAPTURE(name_of(dtype));
      CAPTURE(to_string(extents));
      auto x = normal(dtype, extents, 1, 0, 10);
      PoisonedTensor y(dtype, {extents[1], extents[0]});
      TestOp{"transpose", {x.view()}, {y.view()}}.run();
      auto from = x.floats(), to = y.floats();
      std::vector<float> want(to.size());
      for (std::int64_t r = 0; r < extents[0]; ++r) {
        for (std::int64_t c = 0; c < extents[1]; ++c) {
          want[static_cast<std::size_t>(c * extents[0] + r)] = from[static_cast<std::size_t>(r * extents[1] + c)];
        }
      }
      CHECK(testkit::mismatch(to, want, 0) == "");
    }
  }
}

TEST_CASE("cast rounds to nearest between all formats") {
  for (DType from : {DType::f32, DType::bf16, DType::e4m3, DType::f64}) {
    for (DType to : {DType::f32, DType::bf16, DType::e5m2, DType::i8, DType::f64}) {
      for (std::int64_t count : {1, 17, 9001}) {
        CAPTURE(name_of(from));
        CAPTURE(name_of(to));
        auto x = normal(from, {count}, 2, 0, 5);
        PoisonedTensor y(to, {count});
        TestOp{"cast", {x.view()}, {y.view()}}.run();
        auto want = x.floats();
        for (float& value : want) value = round_to(to, value);
        CHECK(testkit::mismatch(y.floats(), want, 0) == "");
      }
    }
  }
}

TEST_CASE("bytes are multiplied and added to by channel") {
  PoisonedTensor bytes(DType::u8, {4, 6}), y(DType::f32, {4, 6});
  for (int i = 0; i < 24; ++i) bytes.view().as<std::uint8_t>()[i] = static_cast<std::uint8_t>(11 * i);
  // Two images, three channels.
  const std::vector<float> scale{1, 0.5f, 2, 0, -3, 0.25f, -1, 0, 1, 7, 8, 9};
  PoisonedTensor scales(DType::f32, {2, 6}, scale);
  TestOp{"cast", {bytes.view(), scales.view()}, {y.view()}}.run();
  for (std::size_t i = 0; i < 24; ++i) {
    const std::size_t channel = i % 6 / 2, row = i / 12 * 6;
    CHECK(y.floats()[i] == static_cast<float>(11 * i) * scale[row + channel] + scale[row + 3 + channel]);
  }
  PoisonedTensor odd(DType::f32, {2, 5});
  CHECK(TestOp{"cast", {bytes.view(), odd.view()}, {y.view()}}.refusal() == "cast scale does not fit x");
}

TEST_CASE("conversions refuse what they cannot do") {
  auto x = normal(DType::f32, {3, 4}, 1);
  PoisonedTensor y(DType::f32, {3, 4});
  CHECK(TestOp{"transpose", {x.view()}, {y.view()}}.refusal() == "transpose operand y: found (3, 4), expected (4, 3)");
  CHECK(TestOp{"cast", {x.view()}, {y.view()}, {}, {}, 1}.refusal() == "cast operand y: cannot be added to");
  CHECK(TestOp{"cast", {integer_tensor({1}).view()}, {y.view()}}.refusal() ==
        "cast operand x: found i32, expected a real dtype");
}
