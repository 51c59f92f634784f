#pragma once
// Hopper's warpgroup matmuls, with fp32 accumulators of bf16 and 8-bit floats and int32 accumulators of i8: thin
// wrappers of the PTX (ISA 8.0, "wgmma.mma_async"), for tiles in shared memory as TMA writes them with the 128-byte
// swizzle: boxes of rows of 128 bytes, at addresses that are multiples of 1024. They run asynchronously: nothing may
// touch their registers and tiles until wait() says so. Accumulators of 8-bit floats keep about 14 bits.

#include <cstdint>

#include "primitives/element.cuh"
#include "quern/dtype.h"

namespace quern::cuda::wgmma {

inline constexpr int kRowBytes = 128;  ///< of a swizzled row
inline constexpr int kColumns = 64;    ///< bf16 elements of it
inline constexpr int kDepth = 16;      ///< bf16 elements of K in one wgmma; of 8 bits, twice that
inline constexpr int kDepthBytes = 32;
inline constexpr int kMnMajorDepthBytes = kDepth * kRowBytes;
inline constexpr std::uint32_t kEightRows = 8 * 128;  ///< bytes

/// Describes a tile, by halves: the upper is constant, and steps add to the lower.
struct Tile {
  std::uint32_t low;
  __device__ __forceinline__ std::uint64_t descriptor() const {
    constexpr std::uint32_t kSwizzle128 = 1u << 30;
    return std::uint64_t{kSwizzle128 | kEightRows >> 4} << 32 | low;
  }
  /// The same tile, a multiple of 16 bytes on.
  __device__ __forceinline__ Tile operator+(std::uint32_t bytes) const { return {low + (bytes >> 4)}; }
};
/// Where a block's tile begins, as descriptors say it: in a cluster the upper bits of addresses name the block.
__device__ __forceinline__ std::uint32_t start(std::uint32_t address) { return (address & 0x3ffffu) >> 4; }
/// A tile from `address` on whose rows are the operand's rows (A) or columns (B), K-major. A step of
/// kDepth along k: kDepthBytes.
__device__ __forceinline__ Tile k_major_tile(std::uint32_t address) { return {start(address) | 1u << 16}; }
/// A tile that is not K-major: its rows are summed over; boxes of 64 rows of A or columns of B `kBox` bytes apart. A
/// step of kDepth: kMnMajorDepthBytes.
template <std::uint32_t kBox>
__device__ __forceinline__ Tile mn_major_tile(std::uint32_t address) {
  return {start(address) | kBox >> 4 << 16};
}

/// Orders earlier writes of registers before the wgmmas that follow.
__device__ __forceinline__ void fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
/// Closes a group of wgmmas.
__device__ __forceinline__ void commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
/// Waits until at most `kPending` of the last groups are still running.
template <int kPending>
__device__ __forceinline__ void wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}
/// Keeps the compiler from moving uses of accumulators across the place.
template <int kCount>
__device__ __forceinline__ void pin(float (&sums)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(sums[i])::"memory");
}
template <int kCount>
__device__ __forceinline__ void pin(std::int32_t (&sums)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+r"(sums[i])::"memory");
}

/// All warps of a warpgroup give up registers beyond `kCount` each, a multiple of 8, or wait until others did and have
/// as many.
template <int kCount>
__device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kCount));
}
template <int kCount>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kCount));
}

// Accumulators of m64: of a thread, sums[4 j .. 4 j + 3] are rows r, r, r + 8, r + 8 and columns 8 j + c, + 1, + 0, +
// 1, where r = 16 warp + lane / 4 and c = lane % 4 * 2. A in registers, m64k16: pairs (r, c), (r + 8, c), (r, c + 8),
// (r + 8, c
// + 8).

#define QUERN_ACC_8(c, s, i) \
  c(s[i]), c(s[i + 1]), c(s[i + 2]), c(s[i + 3]), c(s[i + 4]), c(s[i + 5]), c(s[i + 6]), c(s[i + 7])
#define QUERN_ACC_32(c, s, i) \
  QUERN_ACC_8(c, s, i), QUERN_ACC_8(c, s, i + 8), QUERN_ACC_8(c, s, i + 16), QUERN_ACC_8(c, s, i + 24)
#define QUERN_ACC_24(c, s) QUERN_ACC_8(c, s, 0), QUERN_ACC_8(c, s, 8), QUERN_ACC_8(c, s, 16)
#define QUERN_ACC_28(c, s) QUERN_ACC_24(c, s), c(s[24]), c(s[25]), c(s[26]), c(s[27])
#define QUERN_ACC_64(c, s) QUERN_ACC_32(c, s, 0), QUERN_ACC_32(c, s, 32)
#define QUERN_ACC_96(c, s) QUERN_ACC_32(c, s, 0), QUERN_ACC_32(c, s, 32), QUERN_ACC_32(c, s, 64)
#define QUERN_ACC_112(c, s) QUERN_ACC_96(c, s), QUERN_ACC_8(c, s, 96), QUERN_ACC_8(c, s, 104)
#define QUERN_ACC_128(c, s) QUERN_ACC_96(c, s), QUERN_ACC_32(c, s, 96)
#define QUERN_LIST(...) __VA_ARGS__  // one argument of a macro
#define QUERN_NAMES_24 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23"
#define QUERN_NAMES_28 QUERN_NAMES_24 ",%24,%25,%26,%27"
#define QUERN_NAMES_32                                                                                                 \
  "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30," \
  "%31"
#define QUERN_NAMES_64                                                                                            \
  QUERN_NAMES_32                                                                                                  \
  ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58," \
  "%59,%60,%61,%62,%63"
#define QUERN_NAMES_96                                                                                            \
  QUERN_NAMES_64                                                                                                  \
  ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90," \
  "%91,%92,%93,%94,%95"
#define QUERN_NAMES_112 QUERN_NAMES_96 ",%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111"
#define QUERN_NAMES_128 \
  QUERN_NAMES_112 ",%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"

/// sums (64, 64) = [sums +] A B, both K-major.
template <bool kAdd>
__device__ __forceinline__ void multiply(float (&sums)[32], Tile a, Tile b) {
  asm volatile(
      "{.reg .pred p; setp.ne.b32 p, %34, 0;"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" QUERN_NAMES_32 "}, %32, %33, p, 1, 1, 0, 0;}"
      : QUERN_ACC_32("+f", sums, 0)
      : "l"(a.descriptor()), "l"(b.descriptor()), "n"(kAdd));
}

/// sums (64, 64) = [sums +] A B, A in registers; B K-major or not.
template <bool kAdd, bool kMnMajor>
__device__ __forceinline__ void multiply(float (&sums)[32], const std::uint32_t (&a)[4], Tile b) {
  asm volatile(
      "{.reg .pred p; setp.ne.b32 p, %37, 0;"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" QUERN_NAMES_32
      "}, {%32,%33,%34,%35}, %36, p, 1, 1, %38;}"
      : QUERN_ACC_32("+f", sums, 0)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b.descriptor()), "n"(kAdd), "n"(kMnMajor));
}

/// The same for sums (64, 128).
template <bool kAdd, bool kMnMajor>
__device__ __forceinline__ void multiply(float (&sums)[64], const std::uint32_t (&a)[4], Tile b) {
  asm volatile(
      "{.reg .pred p; setp.ne.b32 p, %69, 0;"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" QUERN_NAMES_64
      "}, {%64,%65,%66,%67}, %68, p, 1, 1, %70;}"
      : QUERN_ACC_64("+f", sums)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b.descriptor()), "n"(kAdd), "n"(kMnMajor));
}

/// sums (64, 192), (64, 224) or (64, 256) = [sums +] A B, each K-major or not.
template <bool kMnMajorA, bool kMnMajorB, int kCount>
__device__ __forceinline__ void multiply(float (&sums)[kCount], Tile a, Tile b, bool add) {
  static_assert(kCount == 96 || kCount == 112 || kCount == 128);
#define QUERN_MULTIPLY(columns, names, tile_names, add_name, across_names, of_sums)                     \
  asm volatile("{.reg .pred p; setp.ne.b32 p, " add_name                                                \
               ", 0;"                                                                                   \
               "wgmma.mma_async.sync.aligned.m64n" columns "k16.f32.bf16.bf16 {" names "}, " tile_names \
               ", p, 1, 1, " across_names ";}"                                                          \
               : of_sums                                                                                \
               : "l"(a.descriptor()), "l"(b.descriptor()), "r"(static_cast<int>(add)), "n"(kMnMajorA), "n"(kMnMajorB))
  if constexpr (kCount == 96)
    QUERN_MULTIPLY("192", QUERN_NAMES_96, "%96, %97", "%98", "%99, %100", QUERN_LIST(QUERN_ACC_96("+f", sums)));
  else if constexpr (kCount == 112)
    QUERN_MULTIPLY("224", QUERN_NAMES_112, "%112, %113", "%114", "%115, %116", QUERN_LIST(QUERN_ACC_112("+f", sums)));
  else
    QUERN_MULTIPLY("256", QUERN_NAMES_128, "%128, %129", "%130", "%131, %132", QUERN_LIST(QUERN_ACC_128("+f", sums)));
#undef QUERN_MULTIPLY
}

/// sums (64, 128), (64, 192), (64, 224) or (64, 256) = [sums +] A B of 8-bit floats, 32 elements along k; both
/// along rows.
template <DType kA, DType kB, int kCount>
__device__ __forceinline__ void multiply(float (&sums)[kCount], Tile a, Tile b, bool add) {
  static_assert((kA == DType::e4m3 || kA == DType::e5m2) && kB == DType::e4m3);
  static_assert(kCount == 64 || kCount == 96 || kCount == 112 || kCount == 128);
#define QUERN_MULTIPLY(columns, types, names, a_name, b_name, add_name, of_sums)                                \
  asm volatile("{.reg .pred p; setp.ne.b32 p, " add_name                                                        \
               ", 0;"                                                                                           \
               "wgmma.mma_async.sync.aligned.m64n" columns "k32.f32." types " {" names "}, " a_name ", " b_name \
               ", p, 1, 1;}"                                                                                    \
               : of_sums                                                                                        \
               : QUERN_A, "l"(b.descriptor()), "r"(static_cast<int>(add)))
#define QUERN_MULTIPLY_TYPES(columns, names, a_name, b_name, add_name, of_sums)                 \
  if constexpr (kA == DType::e4m3)                                                              \
    QUERN_MULTIPLY(columns, "e4m3.e4m3", names, a_name, b_name, add_name, QUERN_LIST(of_sums)); \
  else                                                                                          \
    QUERN_MULTIPLY(columns, "e5m2.e4m3", names, a_name, b_name, add_name, QUERN_LIST(of_sums))
#define QUERN_A "l"(a.descriptor())
  if constexpr (kCount == 64) {
    QUERN_MULTIPLY_TYPES("128", QUERN_NAMES_64, "%64", "%65", "%66", QUERN_LIST(QUERN_ACC_64("+f", sums)));
  } else if constexpr (kCount == 96) {
    QUERN_MULTIPLY_TYPES("192", QUERN_NAMES_96, "%96", "%97", "%98", QUERN_LIST(QUERN_ACC_96("+f", sums)));
  } else if constexpr (kCount == 112) {
    QUERN_MULTIPLY_TYPES("224", QUERN_NAMES_112, "%112", "%113", "%114", QUERN_LIST(QUERN_ACC_112("+f", sums)));
  } else {
    QUERN_MULTIPLY_TYPES("256", QUERN_NAMES_128, "%128", "%129", "%130", QUERN_LIST(QUERN_ACC_128("+f", sums)));
  }
#undef QUERN_A
}

/// The same, A in registers; also for a quarter of so many columns.
template <DType kA, DType kB, int kCount>
__device__ __forceinline__ void multiply(float (&sums)[kCount], const std::uint32_t* a, Tile b, bool add) {
  static_assert((kA == DType::e4m3 || kA == DType::e5m2) && kB == DType::e4m3);
#define QUERN_A "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3])
  if constexpr (kCount == 24) {
    QUERN_MULTIPLY_TYPES("48", QUERN_NAMES_24, "{%24,%25,%26,%27}", "%28", "%29", QUERN_LIST(QUERN_ACC_24("+f", sums)));
  } else if constexpr (kCount == 28) {
    QUERN_MULTIPLY_TYPES("56", QUERN_NAMES_28, "{%28,%29,%30,%31}", "%32", "%33", QUERN_LIST(QUERN_ACC_28("+f", sums)));
  } else if constexpr (kCount == 32) {
    QUERN_MULTIPLY_TYPES("64", QUERN_NAMES_32, "{%32,%33,%34,%35}", "%36", "%37",
                         QUERN_LIST(QUERN_ACC_32("+f", sums, 0)));
  } else if constexpr (kCount == 96) {
    QUERN_MULTIPLY_TYPES("192", QUERN_NAMES_96, "{%96,%97,%98,%99}", "%100", "%101",
                         QUERN_LIST(QUERN_ACC_96("+f", sums)));
  } else if constexpr (kCount == 112) {
    QUERN_MULTIPLY_TYPES("224", QUERN_NAMES_112, "{%112,%113,%114,%115}", "%116", "%117",
                         QUERN_LIST(QUERN_ACC_112("+f", sums)));
  } else {
    static_assert(kCount == 128);
    QUERN_MULTIPLY_TYPES("256", QUERN_NAMES_128, "{%128,%129,%130,%131}", "%132", "%133",
                         QUERN_LIST(QUERN_ACC_128("+f", sums)));
  }
#undef QUERN_A
#undef QUERN_MULTIPLY_TYPES
#undef QUERN_MULTIPLY
}

/// The same of i8, exactly while accumulators fit.
template <int kCount>
__device__ __forceinline__ void multiply(std::int32_t (&sums)[kCount], Tile a, Tile b, bool add) {
  static_assert(kCount == 96 || kCount == 112 || kCount == 128);
#define QUERN_MULTIPLY(columns, names, a_name, b_name, add_name, of_sums)                                           \
  asm volatile("{.reg .pred p; setp.ne.b32 p, " add_name                                                            \
               ", 0;"                                                                                               \
               "wgmma.mma_async.sync.aligned.m64n" columns "k32.s32.s8.s8 {" names "}, " a_name ", " b_name ", p;}" \
               : of_sums                                                                                            \
               : "l"(a.descriptor()), "l"(b.descriptor()), "r"(static_cast<int>(add)))
  if constexpr (kCount == 96)
    QUERN_MULTIPLY("192", QUERN_NAMES_96, "%96", "%97", "%98", QUERN_LIST(QUERN_ACC_96("+r", sums)));
  else if constexpr (kCount == 112)
    QUERN_MULTIPLY("224", QUERN_NAMES_112, "%112", "%113", "%114", QUERN_LIST(QUERN_ACC_112("+r", sums)));
  else
    QUERN_MULTIPLY("256", QUERN_NAMES_128, "%128", "%129", "%130", QUERN_LIST(QUERN_ACC_128("+r", sums)));
#undef QUERN_MULTIPLY
}

#undef QUERN_ACC_8
#undef QUERN_ACC_32
#undef QUERN_ACC_24
#undef QUERN_ACC_28
#undef QUERN_ACC_64
#undef QUERN_ACC_96
#undef QUERN_ACC_112
#undef QUERN_ACC_128
#undef QUERN_LIST
#undef QUERN_NAMES_24
#undef QUERN_NAMES_28
#undef QUERN_NAMES_32
#undef QUERN_NAMES_64
#undef QUERN_NAMES_96
#undef QUERN_NAMES_112
#undef QUERN_NAMES_128

/// Of rows [0, 64) of a swizzled box, this thread's A for columns [16 step, 16 step + 16).
__device__ __forceinline__ void load_a(std::uint32_t (&a)[4], std::uint32_t box, int step) {
  const std::uint32_t lane = threadIdx.x % 32, row = threadIdx.x % 128 / 32 * 16 + lane % 16,
                      part = 2 * step + lane / 16;
  const std::uint32_t address = box + row * 128 + (part ^ row % 8) * 16;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3])
               : "r"(address)
               : "memory");
}

/// A in registers from tiles whose rows are summed over: boxes of rows of 128 elements of 8 bits, of which a warpgroup
/// takes 64 columns. Registers hold four elements along k each; shared memory gives pairs of columns, which two
/// permutes take apart. So of a thread, the operand's rows r and r + 8, r = lane / 4, are the box's columns 2 r and
/// 2 r + 1.
class TransposedA {
 public:
  /// The warpgroup's columns begin at 64 * `half`.
  __device__ explicit TransposedA(int half) {
    const std::uint32_t lane = threadIdx.x % 32, matrix = lane / 8, pair = lane % 8 / 2;
    // Of 16 rows the first matrix gets 0 1 4 5 10 11 14 15, the second the others, so that the eight rows of each are
    // in different banks. Lanes whose pairs came in the other order exchange them.
    const std::uint32_t row = 16 * (matrix / 2) + 4 * pair + 2 * ((matrix ^ pair / 2) % 2) + lane % 2;
    const std::uint32_t part = 4 * half + threadIdx.x % 128 / 32;
    offset_ = row * kRowBytes + (part ^ row % 8) * 16;
    const bool exchanged = lane % 4 >= 2;
    even_ = exchanged ? 0x2064 : 0x6420;
    odd_ = exchanged ? 0x3175 : 0x7531;
  }

  /// For the rows [32 step, 32 step + 32) of the box.
  __device__ __forceinline__ void load(std::uint32_t* a, std::uint32_t box, int step) const {
    std::uint32_t pairs[4];
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(pairs[0]), "=r"(pairs[1]), "=r"(pairs[2]), "=r"(pairs[3])
                 : "r"(box + offset_ + step * 32 * kRowBytes)
                 : "memory");
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      a[2 * i] = __byte_perm(pairs[2 * i], pairs[2 * i + 1], even_);
      a[2 * i + 1] = __byte_perm(pairs[2 * i], pairs[2 * i + 1], odd_);
    }
  }

 private:
  std::uint32_t offset_, even_, odd_;
};

__device__ __forceinline__ std::uint32_t round_pair(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const std::uint32_t*>(&pair);
}
/// Two values, rounded to bf16, side by side into shared memory.
__device__ __forceinline__ void store_pair(std::uint32_t address, float low, float high) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(address), "r"(round_pair(low, high)) : "memory");
}

/// Of a warp's accumulators, 16 rows of 8 columns and of the 8 beside them, rounded to bf16, to where `address` says:
/// in lane l the address of row l % 16 of the first 8 columns (l < 16) or of the next.
__device__ __forceinline__ void store_rounded(std::uint32_t address, const float (&sums)[2][4]) {
  std::uint32_t words[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) words[i] = round_pair(sums[i / 2][i % 2 * 2], sums[i / 2][i % 2 * 2 + 1]);
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(address), "r"(words[0]),
               "r"(words[1]), "r"(words[2]), "r"(words[3])
               : "memory");
}

/// Accumulators of columns [16 step, 16 step + 16), rounded to bf16, as A.
__device__ __forceinline__ void round_to_a(std::uint32_t (&a)[4], const float (&sums)[32], int step) {
#pragma unroll
  for (int i = 0; i < 4; ++i) a[i] = round_pair(sums[8 * step + 2 * i], sums[8 * step + 2 * i + 1]);
}

}  // namespace quern::cuda::wgmma
