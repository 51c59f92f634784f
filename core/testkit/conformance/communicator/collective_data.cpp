#include "conformance/communicator/collective_data.h"

#include <cmath>
#include <cstring>

#include "quern/numeric.h"

namespace quern::conformance::collectives {

namespace {

constexpr std::int64_t kLarge = 1300021;  // elements, more than staging holds
constexpr DType kDtypes[] = {DType::f64, DType::f32, DType::bf16, DType::e4m3, DType::e5m2, DType::i8,
                             DType::u8,  DType::u16, DType::i32,  DType::u32,  DType::i64};

}  // namespace

std::vector<Case> cases(int size) {
  std::vector<Case> all;
  auto add = [&](DType dtype, Sizes counts, bool equal) {
    for (const bool in_place : {false, true})
      all.push_back({dtype, counts, equal, in_place, static_cast<int>(all.size())});
  };
  const auto ranks = static_cast<std::size_t>(size);
  for (const std::int64_t count :
       {std::int64_t{0}, std::int64_t{1}, std::int64_t{7}, std::int64_t{4099}, kLarge / size + 1})
    add(DType::f32, Sizes(ranks, count), true);
  for (const DType dtype : kDtypes) {
    add(dtype, Sizes(ranks, 127), true);
    Sizes rising, last(ranks, 0);
    for (std::int64_t rank = 0; rank < size; ++rank) rising.push_back(3 * rank + 1);
    last.back() = 257;
    add(dtype, rising, false);
    add(dtype, last, false);
  }
  add(DType::bf16, {Sizes(ranks, 0)}, false);
  return all;
}

Bytes data_of(DType dtype, int rank, int salt, std::int64_t count) {
  Bytes bytes(static_cast<std::size_t>(count) * size_of(dtype));
  std::uint64_t state = 0x9e3779b97f4a7c15 * static_cast<std::uint64_t>(1 + rank + 100 * salt);
  auto next = [&state] {  // splitmix64
    std::uint64_t word = state += 0x9e3779b97f4a7c15;
    word = (word ^ (word >> 30)) * 0xbf58476d1ce4e5b9;
    word = (word ^ (word >> 27)) * 0x94d049bb133111eb;
    return word ^ (word >> 31);
  };
  for (std::int64_t i = 0; i < count; ++i) {
    const std::uint64_t word = next();
    const double real = static_cast<double>(static_cast<std::int64_t>(word)) * 0x1p-63;
    const auto single = static_cast<float>(real);
    const std::uint16_t half = float_to_bf16(single);
    const void* from = dtype == DType::f64    ? static_cast<const void*>(&real)
                       : dtype == DType::f32  ? static_cast<const void*>(&single)
                       : dtype == DType::bf16 ? static_cast<const void*>(&half)
                                              : static_cast<const void*>(&word);
    std::memcpy(bytes.data() + static_cast<std::size_t>(i) * size_of(dtype), from, size_of(dtype));
  }
  return bytes;
}

double value_of(const Bytes& bytes, DType dtype, std::int64_t at) {
  const std::uint8_t* from = bytes.data() + static_cast<std::size_t>(at) * size_of(dtype);
  double real = 0;
  float single = 0;
  std::uint16_t half = 0;
  if (dtype == DType::f64) return std::memcpy(&real, from, sizeof real), real;
  if (dtype == DType::f32) return std::memcpy(&single, from, sizeof single), single;
  return std::memcpy(&half, from, sizeof half), bf16_to_float(half);
}

void put_value(Bytes& bytes, DType dtype, std::int64_t at, double value) {
  std::uint8_t* to = bytes.data() + static_cast<std::size_t>(at) * size_of(dtype);
  const auto single = static_cast<float>(value);
  const std::uint16_t half = float_to_bf16(single);
  std::memcpy(to,
              dtype == DType::f64   ? static_cast<const void*>(&value)
              : dtype == DType::f32 ? static_cast<const void*>(&single)
                                    : static_cast<const void*>(&half),
              size_of(dtype));
}

void need_bytes(const Bytes& got, const Bytes& want, const Case& one, const std::string& what) {
  if (got == want) return;
  std::size_t at = 0;
  while (at < got.size() && got[at] == want[at]) ++at;
  const auto element = static_cast<std::int64_t>(at / size_of(one.dtype));
  auto shown = [&](const Bytes& bytes) {
    if (one.dtype == DType::f64 || one.dtype == DType::f32 || one.dtype == DType::bf16) {
      char text[40];
      std::snprintf(text, sizeof text, "%.9g", value_of(bytes, one.dtype, element));
      return std::string(text);
    }
    return "byte " + std::to_string(bytes[at]);
  };
  broken(what + " of " + one.text() + ", element " + std::to_string(element), shown(got), shown(want));
}

void need_sums(const Bytes& got, const Bytes& want, const Case& one, const Joined& group, const std::string& what) {
  if (group.communicator->traits().sums_in_rank_order) return need_bytes(got, want, one, what);
  const int size = group.communicator->size();
  const double roundoff = one.dtype == DType::f64 ? 0x1p-52 : one.dtype == DType::f32 ? 0x1p-23 : 0x1p-7;
  for (std::size_t i = 0; i < got.size() / size_of(one.dtype); ++i) {
    const double sum = value_of(got, one.dtype, static_cast<std::int64_t>(i));
    const double fair = value_of(want, one.dtype, static_cast<std::int64_t>(i));
    if (!(std::abs(sum - fair) <= roundoff * size * size))
      broken(what + " of " + one.text() + ", element " + std::to_string(i), std::to_string(sum), std::to_string(fair));
  }
}

Bytes part(const Bytes& whole, const Case& one, std::int64_t begin, std::int64_t count) {
  const auto first = whole.begin() + begin * static_cast<std::int64_t>(size_of(one.dtype));
  return {first, first + count * static_cast<std::int64_t>(size_of(one.dtype))};
}

}  // namespace quern::conformance::collectives
