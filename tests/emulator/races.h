#pragma once
// Finds accesses of a block's shared memory that nothing orders. Each warp counts its releases (arrivals at barriers);
// Clocks say up to which release of every warp, and phase of every mbarrier, somebody knows of earlier accesses. An
// access that follows one of another warp must know of it: vector clocks, as in FastTrack (Flanagan and Freund, 2009).
//
// Lanes of a warp are taken as one. A lane that overtakes others shows in results instead: each runs alone up to the
// next instruction of the whole warp.

#include <algorithm>
#include <array>
#include <cstdint>
#include <string>
#include <vector>

namespace quern::emulator {

inline constexpr int kWarps = 64;   ///< of a cluster: 32 of each block
inline constexpr int kUnits = 128;  ///< those, and mbarriers that copies complete on

struct Clocks {
  std::array<std::uint32_t, kUnits> at{};
  void join(const Clocks& other) {
    for (std::size_t i = 0; i < at.size(); ++i) at[i] = std::max(at[i], other.at[i]);
  }
};

struct Range {
  std::uint32_t begin, bytes;  ///< of shared memory
};

/// Who accesses, and what it knows of others.
struct Access {
  int unit;
  std::uint32_t clock;  ///< its own
  const Clocks& before;
  const std::string& text;  ///< the instruction
};

/// Every function throws a Fault where the access is a race. Ranges of 4 bytes are the smallest.
class Races {
 public:
  explicit Races(std::size_t bytes);

  void read(Range range, const Access& access);
  void write(Range range, const Access& access);

  /// An engine (tensor cores, copies out) reads the range until done() says so.
  void hold(Range range);
  void done(Range range, int unit, std::uint32_t clock);

  /// A thread's own write, which engines see once the thread has fenced. `number`: of its writes, from 1 on.
  void wrote(Range range, int thread, std::uint32_t number);
  /// An engine reads: `fenced` has for each thread the last of its writes that it has fenced.
  void check_fenced(Range range, const std::vector<std::uint32_t>& fenced, const std::string& text) const;

 private:
  [[noreturn]] void report(const char* what, std::uint32_t at, const std::string& text, int other) const;
  void check_order(std::size_t word, const Access& access) const;

  struct Writer {
    std::uint32_t clock = 0;
    int unit = 0;
  };
  struct Own {
    int thread = 0;
    std::uint32_t number = 0;  ///< 0: none
  };
  std::vector<Writer> writers_;       ///< of each 4 bytes
  std::vector<std::uint32_t> reads_;  ///< of each 4 bytes, clocks of kWarps
  std::vector<std::uint16_t> held_;   ///< of each 16 bytes
  std::vector<Own> own_;              ///< of each 16 bytes
};

}  // namespace quern::emulator
