// The vectorised conversions against the definitions in numeric.h, bit for bit.
#include "primitives/rows.h"

#include <bit>
#include <cmath>
#include <cstring>
#include <vector>

#include <doctest/doctest.h>

#include "quern/numeric.h"
#include "quern/random.h"
#include "quern/testkit/compare.h"

using namespace quern;

namespace {

/// Random bit patterns, the neighbourhood of every 8-bit code and tie, and the specials.
std::vector<float> samples() {
  std::vector<float> values = {0.0f,    -0.0f,  INFINITY, -INFINITY, NAN,      -NAN,     126.5f,
                               -127.5f, 448.1f, 464.0f,   480.0f,    57344.0f, 61440.0f, 1e-45f};
  for (float (*to_float)(std::uint8_t) : {e4m3_to_float, e5m2_to_float}) {
    for (int code = 0; code < 0x7a; ++code) {
      float low = to_float(static_cast<std::uint8_t>(code)), high = to_float(static_cast<std::uint8_t>(code + 1));
      float tie = (low + high) / 2;
      for (float value : {low, tie, std::nextafter(tie, 0.0f), std::nextafter(tie, 1e9f)}) {
        values.push_back(value);
        values.push_back(-value);
      }
    }
  }
  for (int i = -300; i <= 300; ++i) values.push_back(static_cast<float>(i) / 2);
  for (std::uint64_t i = 0; i < 50000; ++i) values.push_back(std::bit_cast<float>(random_word({11}, 0, i)));
  return values;
}

bool same(float a, float b) {
  return std::bit_cast<std::uint32_t>(a) == std::bit_cast<std::uint32_t>(b) || (std::isnan(a) && std::isnan(b));
}

}  // namespace

TEST_CASE("store rounds exactly as numeric.h says, and load reads every code") {
  auto values = samples();
  auto count = static_cast<std::int64_t>(values.size());
  for (DType dtype : {DType::bf16, DType::e4m3, DType::e5m2, DType::i8}) {
    CAPTURE(name_of(dtype));
    testkit::PoisonedTensor got(dtype, {count});
    cpu::store(got.view(), 0, count, values.data());
    testkit::PoisonedTensor want(dtype, {count}, values);
    auto rounded = values;
    cpu::round_in_place(dtype, rounded.data(), count);
    std::vector<float> scratch(values.size());
    const float* loaded = cpu::load(got.view(), 0, count, scratch.data());
    std::size_t size = size_of(dtype);
    for (std::size_t i = 0; i < values.size(); ++i) {
      CAPTURE(i);
      CAPTURE(values[i]);
      bool equal = std::memcmp(got.view().as<char>() + i * size, want.view().as<char>() + i * size, size) == 0;
      if (!equal) CHECK(equal);
      if (!same(rounded[i], round_to(dtype, values[i]))) CHECK(rounded[i] == round_to(dtype, values[i]));
      if (!same(loaded[i], rounded[i])) CHECK(loaded[i] == rounded[i]);
    }
  }
}

TEST_CASE("every 8-bit code is read as numeric.h reads it") {
  std::vector<std::uint8_t> codes(256);
  for (std::size_t i = 0; i < codes.size(); ++i) codes[i] = static_cast<std::uint8_t>(i);
  for (DType dtype : {DType::e4m3, DType::e5m2, DType::i8}) {
    CAPTURE(name_of(dtype));
    View view{codes.data(), dtype, {256}};
    std::vector<float> scratch(256);
    cpu::load(view, 0, 256, scratch.data());
    CHECK(testkit::mismatch(scratch, testkit::to_floats(view), 0) == "");
  }
}

TEST_CASE("rows at odd offsets and lengths touch nothing else, f32 rows are used in place") {
  auto values = testkit::random_normal(5 * 7, 3);
  for (DType dtype : {DType::f32, DType::f64, DType::bf16, DType::e4m3, DType::i8}) {
    CAPTURE(name_of(dtype));
    testkit::PoisonedTensor x(dtype, {5, 7}, std::vector<float>(35, 1.0f));
    float buffer[7];
    float* row = cpu::target_row(x.view(), 3, buffer);
    CHECK((row == buffer) == (dtype != DType::f32));
    for (int i = 0; i < 7; ++i) row[i] = values[static_cast<std::size_t>(i)];
    cpu::store_row(x.view(), 3, row);
    auto got = x.floats();
    for (std::size_t i = 0; i < got.size(); ++i) CHECK(got[i] == (i / 7 == 3 ? round_to(dtype, values[i - 21]) : 1.0f));
    float again[7];
    CHECK(cpu::load_row(x.view(), 3, again)[6] == got[27]);
  }
}

TEST_CASE("accumulate adds in fp32 and rounds once") {
  const std::int64_t count = 2051;  // beyond one block of the general path
  auto base = testkit::random_normal(count, 1), delta = testkit::random_normal(count, 2);
  for (DType dtype : {DType::f32, DType::bf16, DType::e5m2, DType::i8, DType::f64}) {
    CAPTURE(name_of(dtype));
    testkit::PoisonedTensor x(dtype, {count}, base);
    auto want = x.floats();
    for (std::size_t i = 0; i < want.size(); ++i) want[i] = round_to(dtype, want[i] + delta[i]);
    cpu::accumulate(x.view(), 0, count, delta.data());
    CHECK(testkit::mismatch(x.floats(), want, 0) == "");
  }
}

TEST_CASE("scratch buffers are distinct by slot and grow") {
  float* a = cpu::scratch(0, 10);
  float* b = cpu::scratch(1, 10);
  CHECK(a != b);
  CHECK(cpu::scratch(0, 5) == a);
  CHECK(reinterpret_cast<std::uintptr_t>(cpu::scratch(0, 100000)) % 64 == 0);
}
