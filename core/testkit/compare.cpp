#include "quern/testkit/compare.h"

#include <algorithm>
#include <cmath>
#include <numbers>
#include <unordered_map>

#include "quern/error.h"
#include "quern/numeric.h"
#include "quern/random.h"

namespace quern::testkit {

std::string mismatch(std::span<const float> got, std::span<const float> want, double relative, double absolute) {
  if (got.size() != want.size())
    return "got " + std::to_string(got.size()) + " elements, want " + std::to_string(want.size());
  std::size_t bad = 0, worst = 0;
  double worst_excess = -1;
  for (std::size_t i = 0; i < got.size(); ++i) {
    if (std::isnan(got[i]) && std::isnan(want[i])) continue;
    if (got[i] == want[i]) continue;  // infinities of one sign
    double excess = std::fabs(double{got[i]} - want[i]) - (absolute + relative * std::fabs(double{want[i]}));
    if (excess <= 0) continue;
    ++bad;
    if (std::isnan(excess)) excess = INFINITY;
    if (excess > worst_excess) worst_excess = excess, worst = i;
  }
  if (bad == 0) return {};
  return std::to_string(bad) + " of " + std::to_string(got.size()) + " differ; worst at [" + std::to_string(worst) +
         "]: got " + std::to_string(got[worst]) + ", want " + std::to_string(want[worst]);
}

double relative_error(std::span<const float> got, std::span<const float> want) {
  double difference = 0, norm = 0;
  for (std::size_t i = 0; i < want.size(); ++i) {
    double d = double{got[i]} - want[i];
    difference += d * d;
    norm += double{want[i]} * want[i];
  }
  return norm == 0 ? std::sqrt(difference) : std::sqrt(difference / norm);
}

std::vector<float> to_floats(const View& view) {
  std::vector<float> floats(static_cast<std::size_t>(view.count()));
  for (std::size_t i = 0; i < floats.size(); ++i) {
    switch (view.dtype) {
      case DType::f64: floats[i] = static_cast<float>(view.as<double>()[i]); break;
      case DType::f32: floats[i] = view.as<float>()[i]; break;
      case DType::bf16: floats[i] = bf16_to_float(view.as<std::uint16_t>()[i]); break;
      case DType::e4m3: floats[i] = e4m3_to_float(view.as<std::uint8_t>()[i]); break;
      case DType::e5m2: floats[i] = e5m2_to_float(view.as<std::uint8_t>()[i]); break;
      case DType::i8: floats[i] = view.as<std::int8_t>()[i]; break;
      case DType::u8: floats[i] = view.as<std::uint8_t>()[i]; break;
      case DType::i32: floats[i] = static_cast<float>(view.as<std::int32_t>()[i]); break;
      default: fail_internal("to_floats", "not a numeric dtype: " + std::string(name_of(view.dtype)));
    }
  }
  return floats;
}

PoisonedTensor::PoisonedTensor(DType dtype, Extents extents) {
  view_ = View{nullptr, dtype, std::move(extents)};
  memory_.assign(view_.bytes() / 8 + 1, ~std::uint64_t{0});
  view_.data = memory_.data();
}

PoisonedTensor::PoisonedTensor(DType dtype, Extents extents, std::span<const float> values)
    : PoisonedTensor(dtype, std::move(extents)) {
  if (static_cast<std::int64_t>(values.size()) != view_.count())
    fail_internal("PoisonedTensor", "values do not fill the extents");
  for (std::size_t i = 0; i < values.size(); ++i) {
    switch (dtype) {
      case DType::f64: view_.as<double>()[i] = values[i]; break;
      case DType::f32: view_.as<float>()[i] = values[i]; break;
      case DType::bf16: view_.as<std::uint16_t>()[i] = float_to_bf16(values[i]); break;
      case DType::e4m3: view_.as<std::uint8_t>()[i] = float_to_e4m3(values[i]); break;
      case DType::e5m2: view_.as<std::uint8_t>()[i] = float_to_e5m2(values[i]); break;
      case DType::i8: view_.as<std::int8_t>()[i] = float_to_i8(values[i]); break;
      case DType::i32: view_.as<std::int32_t>()[i] = static_cast<std::int32_t>(values[i]); break;
      default: fail_internal("PoisonedTensor", "not a numeric dtype: " + std::string(name_of(dtype)));
    }
  }
}

namespace {

/// Two factors of a normal number, by Box and Muller from two uniforms.
struct Deviate {
  double radius, cosine;
};

Deviate deviate(std::uint64_t seed, std::size_t i) {
  const auto block = random_block({seed, RandomPurpose::init, 0}, 0, i);
  return {std::sqrt(-2.0 * std::log(double{to_unit(block[0])})),
          std::cos(2.0 * std::numbers::pi * double{to_unit(block[1])})};
}

/// The first of a seed. Cases have the same few seeds again and again, and logarithms took half of the kit's time.
std::span<const Deviate> first_deviates(std::uint64_t seed, std::size_t count) {
  constexpr std::size_t kMost = 1 << 16;
  static thread_local std::unordered_map<std::uint64_t, std::vector<Deviate>> kept;
  std::vector<Deviate>& deviates = kept[seed];
  for (std::size_t i = deviates.size(); i < std::min(count, kMost); ++i) deviates.push_back(deviate(seed, i));
  return deviates;
}

}  // namespace

std::vector<float> random_normal(std::int64_t count, std::uint64_t seed, double deviation, DType dtype) {
  std::vector<float> values(static_cast<std::size_t>(count));
  const std::span<const Deviate> first = first_deviates(seed, values.size());
  for (std::size_t i = 0; i < values.size(); ++i) {
    const Deviate one = i < first.size() ? first[i] : deviate(seed, i);
    values[i] = round_to(dtype, static_cast<float>(deviation * one.radius * one.cosine));
  }
  return values;
}

}  // namespace quern::testkit
