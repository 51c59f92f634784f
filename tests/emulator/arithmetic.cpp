// What a thread does alone with its registers. Approximate functions (ex2.approx and others) are
// the host's: results agree with a GPU's to rounding, and kernels that share an order of operations agree to the
// bit. Denormals are kept but for .ftz of ex2.
#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <type_traits>

#include "emulator/machine.h"
#include "emulator/registers.h"
#include "quern/numeric.h"

namespace quern::emulator {

namespace {

using Table = std::unordered_map<std::string, Run>;

/// An instruction whose result is `expression` of a, b and c, of type T.
#define QUERN_ENTRY(name, T, expression)                              \
  table[name] = [](std::uint64_t* r, const Instruction& i, Thread&) { \
    [[maybe_unused]] const T a = get<T>(r[i.a]);                      \
    [[maybe_unused]] const T b = i.b >= 0 ? get<T>(r[i.b]) : T{};     \
    [[maybe_unused]] const T c = i.c >= 0 ? get<T>(r[i.c]) : T{};     \
    r[i.to] = bits_of(static_cast<T>(expression));                    \
  }
/// One whose types differ: sees registers r of the instruction i.
#define QUERN_ENTRY_OF_BITS(name, expression) \
  table[name] = [](std::uint64_t* r, const Instruction& i, Thread&) { r[i.to] = (expression); }

/// Largest or least as IEEE 754-2019 has them: a number before NaN, +0 above -0.
template <class T>
T largest(T a, T b) {
  if (a != a || b != b) return a != a ? b : a;
  if (a == b) return std::signbit(a) ? b : a;
  return a > b ? a : b;
}
template <class T>
T least(T a, T b) {
  return -largest(-a, -b);
}
template <class T>
T nan_if(bool is, T otherwise) {
  return is ? std::numeric_limits<T>::quiet_NaN() : otherwise;
}

__extension__ typedef __int128 Int128;
__extension__ typedef unsigned __int128 Uint128;
template <class T>
auto whole_product(T a, T b) {
  using Whole = std::conditional_t<std::is_signed_v<T>, Int128, Uint128>;
  return static_cast<Whole>(a) * static_cast<Whole>(b);
}

template <class T>
void add_integers(Table& table, const std::string& type) {
  using U = std::make_unsigned_t<T>;
  constexpr int kBits = 8 * sizeof(T);
  QUERN_ENTRY("add." + type, T, static_cast<U>(a) + static_cast<U>(b));
  QUERN_ENTRY("sub." + type, T, static_cast<U>(a) - static_cast<U>(b));
  QUERN_ENTRY("mul.lo." + type, T, whole_product(a, b));
  QUERN_ENTRY("mul.hi." + type, T, whole_product(a, b) >> kBits);
  QUERN_ENTRY("mad.lo." + type, T, whole_product(a, b) + c);
  QUERN_ENTRY("mad.hi." + type, T, (whole_product(a, b) >> kBits) + c);
  QUERN_ENTRY("div." + type, T, b == 0 ? static_cast<T>(-1) : a / b);
  QUERN_ENTRY("rem." + type, T, b == 0 ? a : a % b);
  QUERN_ENTRY("min." + type, T, std::min(a, b));
  QUERN_ENTRY("max." + type, T, std::max(a, b));
  QUERN_ENTRY("neg." + type, T, U{0} - static_cast<U>(a));
  QUERN_ENTRY("abs." + type, T, std::is_signed_v<T> && a < T{0} ? U{0} - static_cast<U>(a) : static_cast<U>(a));
  table["shr." + type] = [](std::uint64_t* r, const Instruction& i, Thread&) {
    const T a = get<T>(r[i.a]);
    const std::uint32_t by = std::min<std::uint32_t>(low(r[i.b]), kBits);
    r[i.to] = bits_of(static_cast<T>(by == kBits ? (std::is_signed_v<T> && a < T{0} ? T(-1) : T(0)) : a >> by));
  };
}

template <class U>
void add_bits(Table& table, const std::string& type) {
  constexpr std::uint32_t kBits = 8 * sizeof(U);
  QUERN_ENTRY("and." + type, U, a & b);
  QUERN_ENTRY("or." + type, U, a | b);
  QUERN_ENTRY("xor." + type, U, a ^ b);
  QUERN_ENTRY("not." + type, U, ~a);
  table["shl." + type] = [](std::uint64_t* r, const Instruction& i, Thread&) {
    r[i.to] = low(r[i.b]) >= kBits ? 0 : bits_of(static_cast<U>(get<U>(r[i.a]) << low(r[i.b])));
  };
  table["shr." + type] = [](std::uint64_t* r, const Instruction& i, Thread&) {
    r[i.to] = low(r[i.b]) >= kBits ? 0 : bits_of(static_cast<U>(get<U>(r[i.a]) >> low(r[i.b])));
  };
}

template <class Narrow, class Wide>
void add_wide(Table& table, const std::string& type) {
  QUERN_ENTRY_OF_BITS("mul.wide." + type, bits_of(static_cast<Wide>(Wide{get<Narrow>(r[i.a])} * get<Narrow>(r[i.b]))));
  QUERN_ENTRY_OF_BITS("mad.wide." + type,
                      bits_of(static_cast<Wide>(Wide{get<Narrow>(r[i.a])} * get<Narrow>(r[i.b]) + get<Wide>(r[i.c]))));
}

template <class T>
void add_floats(Table& table, const std::string& type) {
  for (const std::string flush : {"", ".ftz"}) {
    for (const std::string rounding : {"", ".rn", ".rz"}) {  // the last serves exponents in exp: exact there
      QUERN_ENTRY("add" + rounding + flush + type, T, a + b);
      QUERN_ENTRY("sub" + rounding + flush + type, T, a - b);
      QUERN_ENTRY("mul" + rounding + flush + type, T, a * b);
      QUERN_ENTRY("fma" + rounding + flush + type, T, std::fma(a, b, c));
    }
    for (const std::string how : {".rn", ".full", ".approx"}) {
      QUERN_ENTRY("div" + how + flush + type, T, a / b);
      QUERN_ENTRY("rcp" + how + flush + type, T, 1 / a);
      QUERN_ENTRY("sqrt" + how + flush + type, T, std::sqrt(a));
      QUERN_ENTRY("rsqrt" + how + flush + type, T, 1 / std::sqrt(static_cast<double>(a)));
    }
    QUERN_ENTRY("neg" + flush + type, T, -a);
    QUERN_ENTRY("abs" + flush + type, T, std::fabs(a));
    QUERN_ENTRY("min" + flush + type, T, least(a, b));
    QUERN_ENTRY("max" + flush + type, T, largest(a, b));
    QUERN_ENTRY("min" + flush + ".NaN" + type, T, nan_if(a != a || b != b, least(a, b)));
    QUERN_ENTRY("max" + flush + ".NaN" + type, T, nan_if(a != a || b != b, largest(a, b)));
  }
  QUERN_ENTRY("copysign" + type, T, std::copysign(b, a));
}

float flushed(float value) {
  return std::fabs(value) < std::numeric_limits<float>::min() ? std::copysign(0.0f, value) : value;
}

/// The fp32 number at or below sum + error, of which the second is the rounding of the first.
float rounded_down(double sum, double error) {
  const auto near = static_cast<float>(sum);
  const bool above = static_cast<double>(near) > sum || (static_cast<double>(near) == sum && error < 0);
  return above ? std::nextafter(near, -std::numeric_limits<float>::infinity()) : near;
}

/// a * b + c rounded down.
float fma_down(float a, float b, float c) {
  const double exact = double{a} * b, sum = exact + c, of_first = sum - c;
  return rounded_down(sum, (exact - of_first) + (c - (sum - of_first)));
}

void add_round_down(Table& table) {
  QUERN_ENTRY("add.rm.f32", float, fma_down(a, 1, b));
  QUERN_ENTRY("sub.rm.f32", float, fma_down(a, 1, -b));
  QUERN_ENTRY("mul.rm.f32", float, fma_down(a, b, 0));
  QUERN_ENTRY("fma.rm.f32", float, fma_down(a, b, c));
}

void add_approximations(Table& table) {
  for (const std::string flush : {"", ".ftz"}) {
    QUERN_ENTRY("ex2.approx" + flush + ".f32", float, flushed(std::exp2(flushed(a))));
    QUERN_ENTRY("lg2.approx" + flush + ".f32", float, std::log2(a));
    QUERN_ENTRY("sin.approx" + flush + ".f32", float, std::sin(a));
    QUERN_ENTRY("cos.approx" + flush + ".f32", float, std::cos(a));
  }
  QUERN_ENTRY("tanh.approx.f32", float, std::tanh(a));
}

/// Of each bf16 of a word.
template <class F>
std::uint64_t by_halves(std::uint64_t a, std::uint64_t b, std::uint64_t c, F f) {
  std::uint64_t result = 0;
  for (int half = 0; half < 2; ++half) {
    auto part = [half](std::uint64_t bits) { return bf16_to_float(static_cast<std::uint16_t>(bits >> 16 * half)); };
    result |= std::uint64_t{float_to_bf16(f(part(a), part(b), part(c)))} << 16 * half;
  }
  return result;
}

#define QUERN_BF16(name, expression)                                                                                \
  table[std::string(name) + ".bf16x2"] = [](std::uint64_t* r, const Instruction& i, Thread&) {                      \
    r[i.to] = by_halves(                                                                                            \
        r[i.a], i.b >= 0 ? r[i.b] : 0, i.c >= 0 ? r[i.c] : 0,                                                       \
        []([[maybe_unused]] float a, [[maybe_unused]] float b, [[maybe_unused]] float c) { return (expression); }); \
  };                                                                                                                \
  table[std::string(name) + ".bf16"] = [](std::uint64_t* r, const Instruction& i, Thread&) {                        \
    r[i.to] = 0xffff & by_halves(r[i.a], i.b >= 0 ? r[i.b] : 0, i.c >= 0 ? r[i.c] : 0,                              \
                                 []([[maybe_unused]] float a, [[maybe_unused]] float b, [[maybe_unused]] float c) { \
                                   return (expression);                                                             \
                                 });                                                                                \
  }

template <class F>
std::uint64_t pair_of(const std::uint64_t* r, const Instruction& i, int bits, F code) {
  return std::uint64_t{code(get<float>(r[i.a]))} << bits | code(get<float>(r[i.b]));
}

void add_pairs(Table& table) {
  for (const std::string rounding : {"", ".rn"}) {
    QUERN_BF16("add" + rounding, a + b);
    QUERN_BF16("sub" + rounding, a - b);
    QUERN_BF16("mul" + rounding, a * b);
    QUERN_BF16("fma" + rounding, std::fma(a, b, c));
  }
  QUERN_BF16("max", largest(a, b));
  QUERN_BF16("min", least(a, b));
  QUERN_BF16("max.NaN", nan_if(a != a || b != b, largest(a, b)));
  QUERN_BF16("min.NaN", nan_if(a != a || b != b, least(a, b)));
  QUERN_BF16("abs", std::fabs(a));
  QUERN_BF16("neg", -a);
  QUERN_ENTRY_OF_BITS("cvt.rn.bf16x2.f32", pair_of(r, i, 16, float_to_bf16));
  QUERN_ENTRY_OF_BITS("cvt.rn.f16x2.f32", pair_of(r, i, 16, to_half));
  QUERN_ENTRY_OF_BITS("cvt.rn.satfinite.e4m3x2.f32", pair_of(r, i, 8, float_to_e4m3));
  QUERN_ENTRY_OF_BITS("cvt.rn.satfinite.e5m2x2.f32", pair_of(r, i, 8, float_to_e5m2));
  QUERN_ENTRY_OF_BITS("cvt.rn.f16x2.e4m3x2",
                      std::uint64_t{to_half(e4m3_to_float(static_cast<std::uint8_t>(r[i.a] >> 8)))} << 16 |
                          to_half(e4m3_to_float(static_cast<std::uint8_t>(r[i.a]))));
  QUERN_ENTRY_OF_BITS("cvt.rn.f16x2.e5m2x2",
                      std::uint64_t{to_half(e5m2_to_float(static_cast<std::uint8_t>(r[i.a] >> 8)))} << 16 |
                          to_half(e5m2_to_float(static_cast<std::uint8_t>(r[i.a]))));
  table["cvt.pack.sat.s8.s32.b32"] = [](std::uint64_t* r, const Instruction& i, Thread&) {
    auto code = [](std::uint64_t bits) {
      return static_cast<std::uint8_t>(std::clamp(static_cast<std::int32_t>(bits), -128, 127));
    };
    r[i.to] = low(r[i.c]) << 16 | std::uint32_t{code(r[i.a])} << 8 | code(r[i.b]);
  };
}

std::uint32_t permuted(std::uint64_t a, std::uint64_t b, std::uint32_t selector) {
  const std::uint64_t bytes = std::uint64_t{low(b)} << 32 | low(a);
  std::uint32_t result = 0;
  for (int k = 0; k < 4; ++k) {
    const std::uint32_t which = selector >> 4 * k & 15;
    const auto byte = static_cast<std::uint8_t>(bytes >> 8 * (which & 7));
    result |= std::uint32_t{(which & 8) == 0 ? byte : byte >= 128 ? std::uint8_t{255} : std::uint8_t{0}} << 8 * k;
  }
  return result;
}

std::uint32_t looked_up(std::uint32_t a, std::uint32_t b, std::uint32_t c, std::uint32_t truth) {
  std::uint32_t result = 0;
  for (std::uint32_t k = 0; k < 8; ++k)
    if ((truth >> k & 1) != 0) result |= ((k & 4) != 0 ? a : ~a) & ((k & 2) != 0 ? b : ~b) & ((k & 1) != 0 ? c : ~c);
  return result;
}

std::uint32_t ones(std::uint64_t count) { return count > 31 ? ~0u : (1u << count) - 1; }

void add_moves(Table& table) {
  for (const std::string type : {"b16", "u16", "s16"}) {
    QUERN_ENTRY("mov." + type, std::uint16_t, a);
    QUERN_ENTRY_OF_BITS("selp." + type, 0xffff & (r[i.c] != 0 ? r[i.a] : r[i.b]));
  }
  for (const std::string type : {"b32", "u32", "s32", "f32"}) {
    QUERN_ENTRY("mov." + type, std::uint32_t, a);
    QUERN_ENTRY_OF_BITS("selp." + type, low(r[i.c] != 0 ? r[i.a] : r[i.b]));
  }
  for (const std::string type : {"b64", "u64", "s64", "f64", "pred"}) {
    QUERN_ENTRY("mov." + type, std::uint64_t, a);
    QUERN_ENTRY_OF_BITS("selp." + type, r[i.c] != 0 ? r[i.a] : r[i.b]);
  }
  QUERN_ENTRY("and.pred", std::uint64_t, a & b);
  QUERN_ENTRY("or.pred", std::uint64_t, a | b);
  QUERN_ENTRY("xor.pred", std::uint64_t, a ^ b);
  QUERN_ENTRY("not.pred", std::uint64_t, a == 0);
  for (const std::string space : {"global", "local", "param", "const"}) {
    QUERN_ENTRY("cvta." + space + ".u64", std::uint64_t, a);
    QUERN_ENTRY("cvta.to." + space + ".u64", std::uint64_t, a);
  }
  QUERN_ENTRY("cvta.shared.u64", std::uint64_t, a | kSharedWindow);
  QUERN_ENTRY("cvta.to.shared.u64", std::uint64_t, a & ~0u);
  table["mov.apart"] = [](std::uint64_t* r, const Instruction& i, Thread&) {
    const std::uint64_t whole = r[i.a];
    for (std::size_t k = 0; k < i.values.size(); ++k)
      r[i.values[k]] = whole >> (static_cast<std::size_t>(i.count) * k) & ((std::uint64_t{1} << i.count) - 1);
  };
  table["mov.together"] = [](std::uint64_t* r, const Instruction& i, Thread&) {
    std::uint64_t whole = 0;
    for (std::size_t k = 0; k < i.values.size(); ++k)
      whole |= (r[i.values[k]] & ((std::uint64_t{1} << i.count) - 1)) << (static_cast<std::size_t>(i.count) * k);
    r[i.to] = whole;
  };
  QUERN_ENTRY_OF_BITS("prmt.b32", permuted(r[i.a], r[i.b], low(r[i.c])));
  QUERN_ENTRY_OF_BITS("lop3.b32", looked_up(low(r[i.a]), low(r[i.b]), low(r[i.c]), low(r[i.extra])));
  QUERN_ENTRY_OF_BITS("shf.l.wrap.b32", low(((r[i.b] << 32 | low(r[i.a])) << (r[i.c] & 31)) >> 32));
  QUERN_ENTRY_OF_BITS("shf.r.wrap.b32", low((r[i.b] << 32 | low(r[i.a])) >> (r[i.c] & 31)));
  QUERN_ENTRY_OF_BITS("bfe.u32", low(r[i.b] > 31 ? 0 : low(r[i.a]) >> r[i.b] & ones(r[i.c])));
  QUERN_ENTRY_OF_BITS(
      "bfi.b32", low((r[i.b] & ~(std::uint64_t{ones(r[i.extra])} << r[i.c])) | (r[i.a] & ones(r[i.extra])) << r[i.c]));
  QUERN_ENTRY_OF_BITS("clz.b32", static_cast<std::uint64_t>(std::countl_zero(low(r[i.a]))));
  QUERN_ENTRY_OF_BITS("popc.b32", static_cast<std::uint64_t>(std::popcount(low(r[i.a]))));
  // The turns that threads take keep what one wrote in order for all others.
  for (const char* fence : {"membar.gl", "membar.cta", "membar.sys", "fence.acq_rel.gpu", "fence.acq_rel.sys",
                            "fence.acq_rel.cta", "fence.sc.gpu", "fence.sc.sys", "nanosleep.u32"})
    table[fence] = [](std::uint64_t*, const Instruction&, Thread&) {};
}

#undef QUERN_ENTRY
#undef QUERN_ENTRY_OF_BITS
#undef QUERN_BF16

Table make_table() {
  Table table;
  add_integers<std::int16_t>(table, "s16");
  add_integers<std::uint16_t>(table, "u16");
  add_integers<std::int32_t>(table, "s32");
  add_integers<std::uint32_t>(table, "u32");
  add_integers<std::int64_t>(table, "s64");
  add_integers<std::uint64_t>(table, "u64");
  add_bits<std::uint16_t>(table, "b16");
  add_bits<std::uint32_t>(table, "b32");
  add_bits<std::uint64_t>(table, "b64");
  add_wide<std::int16_t, std::int32_t>(table, "s16");
  add_wide<std::uint16_t, std::uint32_t>(table, "u16");
  add_wide<std::int32_t, std::int64_t>(table, "s32");
  add_wide<std::uint32_t, std::uint64_t>(table, "u32");
  add_floats<float>(table, ".f32");
  add_floats<double>(table, ".f64");
  add_approximations(table);
  add_round_down(table);
  add_pairs(table);
  add_moves(table);
  return table;
}

}  // namespace

Run arithmetic(const std::string& name) {
  static const Table kTable = make_table();
  const auto found = kTable.find(name);
  return found == kTable.end() ? nullptr : found->second;
}

}  // namespace quern::emulator
