// Comparisons (setp) and conversions between types (cvt), each of any two types.
#include <algorithm>
#include <cmath>
#include <limits>
#include <type_traits>

#include "emulator/machine.h"
#include "emulator/registers.h"
#include "quern/numeric.h"

namespace quern::emulator {

namespace {

enum Comparison { eq, ne, lt, le, gt, ge, equ, neu, ltu, leu, gtu, geu, num, nan, kComparisons };
const char* const kComparisonNames[kComparisons] = {"eq",  "ne",  "lt",  "le",  "gt",  "ge",  "equ",
                                                    "neu", "ltu", "leu", "gtu", "geu", "num", "nan"};

template <class T>
bool compare(int how, T a, T b) {
  const bool unordered = a != a || b != b;
  switch (how) {
    case eq: return a == b;
    case ne: return !unordered && a != b;
    case lt: return a < b;
    case le: return a <= b;
    case gt: return a > b;
    case ge: return a >= b;
    case equ: return unordered || a == b;
    case neu: return a != b;
    case ltu: return !(a >= b);
    case leu: return !(a > b);
    case gtu: return !(a <= b);
    case geu: return !(a < b);
    case num: return !unordered;
    default: return unordered;
  }
}

enum Joined { alone, with_and, with_or, with_xor };

/// p|q = comparison, and its opposite, each joined with c.
template <class T>
void set_predicate(std::uint64_t* r, const Instruction& i, Thread&) {
  const bool holds = compare(i.mode, get<T>(r[i.a]), get<T>(r[i.b]));
  const bool other = i.c >= 0 && r[i.c] != 0;
  auto joined = [&](bool value) {
    return i.type == with_and   ? value && other
           : i.type == with_or  ? value || other
           : i.type == with_xor ? value != other
                                : value;
  };
  r[i.to] = joined(holds);
  if (i.also_to >= 0) r[i.also_to] = joined(!holds);
}

Run set_predicate_of(const std::string& type) {
  if (type == "f32") return set_predicate<float>;
  if (type == "f64") return set_predicate<double>;
  if (type == "s16") return set_predicate<std::int16_t>;
  if (type == "u16" || type == "b16") return set_predicate<std::uint16_t>;
  if (type == "s32") return set_predicate<std::int32_t>;
  if (type == "u32" || type == "b32") return set_predicate<std::uint32_t>;
  if (type == "s64") return set_predicate<std::int64_t>;
  if (type == "u64" || type == "b64") return set_predicate<std::uint64_t>;
  return nullptr;
}

enum Rounding { to_even, to_zero, down, up };

template <class F>
F rounded(F value, int how) {
  return how == to_even   ? std::nearbyint(value)
         : how == to_zero ? std::trunc(value)
         : how == down    ? std::floor(value)
                          : std::ceil(value);
}

struct Half {
  std::uint16_t bits;
  operator float() const { return from_half(bits); }
};
struct Brain {
  std::uint16_t bits;
  operator float() const { return bf16_to_float(bits); }
};
template <class T>
constexpr bool kFloat = std::is_floating_point_v<T> || std::is_class_v<T>;

/// cvt: mode is the rounding, count says that floats become whole numbers.
template <class To, class From>
void convert(std::uint64_t* r, const Instruction& i, Thread&) {
  const From from = get<From>(r[i.a]);
  if constexpr (kFloat<From> && kFloat<To>) {
    double value = static_cast<double>(from);
    if (i.count != 0) value = rounded(value, i.mode);
    if (i.type != 0) value = value > 0 ? std::min(value, 1.0) : 0;  // .sat
    if constexpr (std::is_same_v<To, Brain>)
      r[i.to] = float_to_bf16(static_cast<float>(value));
    else if constexpr (std::is_same_v<To, Half>)
      r[i.to] = to_half(static_cast<float>(value));
    else
      r[i.to] = bits_of(static_cast<To>(value));
  } else if constexpr (kFloat<From>) {
    const double value = rounded(static_cast<double>(from), i.mode);
    constexpr double kMost = static_cast<double>(std::numeric_limits<To>::max());
    To result = value != value ? To{0} : value >= kMost ? std::numeric_limits<To>::max() : To{0};
    if (value < kMost)
      result = value < static_cast<double>(std::numeric_limits<To>::min()) ? std::numeric_limits<To>::min()
                                                                           : static_cast<To>(value);
    r[i.to] = sizeof(To) < 4 ? low(static_cast<std::uint64_t>(std::int64_t{0} + static_cast<std::int64_t>(result)))
                             : bits_of(result);
  } else if constexpr (std::is_same_v<To, Brain>) {
    r[i.to] = float_to_bf16(static_cast<float>(from));
  } else if constexpr (std::is_same_v<To, Half>) {
    r[i.to] = to_half(static_cast<float>(from));
  } else if constexpr (sizeof(To) < 4) {  // fills a register of 32 bits
    r[i.to] = low(static_cast<std::uint64_t>(static_cast<std::int64_t>(static_cast<To>(from))));
  } else {
    r[i.to] = bits_of(static_cast<To>(from));
  }
}

template <class To>
Run convert_from(const std::string& type) {
  if (type == "f32") return convert<To, float>;
  if (type == "f64") return convert<To, double>;
  if (type == "f16") return convert<To, Half>;
  if (type == "bf16") return convert<To, Brain>;
  if (type == "s8") return convert<To, std::int8_t>;
  if (type == "u8") return convert<To, std::uint8_t>;
  if (type == "s16") return convert<To, std::int16_t>;
  if (type == "u16") return convert<To, std::uint16_t>;
  if (type == "s32") return convert<To, std::int32_t>;
  if (type == "u32") return convert<To, std::uint32_t>;
  if (type == "s64") return convert<To, std::int64_t>;
  if (type == "u64") return convert<To, std::uint64_t>;
  return nullptr;
}

Run convert_to(const std::string& type, const std::string& from) {
  if (type == "f32") return convert_from<float>(from);
  if (type == "f64") return convert_from<double>(from);
  if (type == "f16") return convert_from<Half>(from);
  if (type == "bf16") return convert_from<Brain>(from);
  if (type == "s8") return convert_from<std::int8_t>(from);
  if (type == "u8") return convert_from<std::uint8_t>(from);
  if (type == "s16") return convert_from<std::int16_t>(from);
  if (type == "u16") return convert_from<std::uint16_t>(from);
  if (type == "s32") return convert_from<std::int32_t>(from);
  if (type == "u32") return convert_from<std::uint32_t>(from);
  if (type == "s64") return convert_from<std::int64_t>(from);
  if (type == "u64") return convert_from<std::uint64_t>(from);
  return nullptr;
}

}  // namespace

bool decode_conversion(Instruction& i, const Words& words) {
  if (words[0] == "setp") {
    const std::string& name = words[1];
    const std::string known = name == "lo"   ? "lt"
                              : name == "ls" ? "le"
                              : name == "hi" ? "gt"
                              : name == "hs" ? "ge"
                                             : name;
    const auto found = std::find(std::begin(kComparisonNames), std::end(kComparisonNames), known);
    i.mode = static_cast<int>(found - std::begin(kComparisonNames));
    i.type = has(words, "and") ? with_and : has(words, "or") ? with_or : has(words, "xor") ? with_xor : alone;
    i.run = i.mode < kComparisons ? set_predicate_of(words.back()) : nullptr;
  } else if (words[0] == "cvt" && words.size() > 2) {
    auto either = [&](const char* of_float, const char* of_integer) {
      return has(words, of_float) || has(words, of_integer);
    };
    i.mode = either("rz", "rzi") ? to_zero : either("rm", "rmi") ? down : either("rp", "rpi") ? up : to_even;
    i.count = words[1].size() == 3 && words[1][0] == 'r' ? 1 : 0;
    i.type = has(words, "sat") ? 1 : 0;
    i.run = convert_to(words[words.size() - 2], words.back());
  }
  return i.run != nullptr;
}

}  // namespace quern::emulator
