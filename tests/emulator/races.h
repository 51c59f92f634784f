#pragma once
// Finds accesses of a block's shared memory that nothing orders. Each warp counts its releases (arrivals at barriers);
// Clocks say up to which release of every warp, and phase of every mbarrier, somebody knows of earlier accesses. An
// access that follows one of another warp must know of it: vector clocks, as in FastTrack (Flanagan and Freund, 2009).
//
// Lanes of a warp are taken as one. A lane that overtakes others shows in results instead: each runs alone up to the
// next instruction of the whole warp.

#include <array>
#include <cstdint>
#include <vector>

namespace quern::emulator {

inline constexpr int kWarps = 64;   ///< of a cluster: 32 of each block
inline constexpr int kUnits = 128;  ///< those, and mbarriers that copies complete on

struct Clocks {
  std::array<std::uint32_t, kUnits> at{};
  void join(const Clocks& other);
};

struct Range {
  std::uint32_t begin, bytes;  ///< of shared memory
};

/// Who accesses, and what it knows of others.
struct Access {
  int unit;
  std::uint32_t clock;  ///< its own
  const Clocks& before;
  const char* text;  ///< the instruction
};

/// Every function throws a Fault where the access is a race. Ranges of 4 bytes are the smallest.
class Races {
 public:
  explicit Races(std::size_t bytes) : pieces_(bytes / kPiece + 1) {}

  void read(Range range, const Access& access);
  void write(Range range, const Access& access);

  /// An engine (tensor cores, copies out) reads the range until done() says so.
  void hold(Range range);
  void done(Range range, const Access& access);

  /// A thread's own write, which engines see once the thread has fenced. `number`: of its writes, from 1 on.
  void wrote(Range range, int thread, std::uint32_t number);
  /// An engine reads: `fenced` has for each thread the last of its writes that it has fenced.
  void check_fenced(Range range, const std::vector<std::uint32_t>& fenced, const char* text) const;

 private:
  static constexpr std::uint32_t kPiece = 16, kWord = 4;
  static constexpr std::uint8_t kMany = 255;

  /// The last write, and reads since: one that follows all others, or of each warp in readers_.
  struct Word {
    std::uint32_t written = 0, read = 0;  ///< clocks; of kMany readers, their place
    std::uint8_t writer = 0, reader = 0;
  };
  /// Words are alike until an access takes some of them.
  struct Piece {
    Word words[kPiece / kWord];
    int thread = 0;            ///< that wrote it last
    std::uint32_t number = 0;  ///< of the thread's writes; 0: none
    std::uint16_t held = 0;
    bool split = false;
  };

  template <class F>
  void for_each_piece(Range range, F f);
  /// f(word, address) for each word of the range, or once for those that are alike.
  template <class F>
  void for_each_word(Range range, F f);
  void split(Piece& piece);
  std::uint32_t add_readers();
  void forget_readers(Word& word);
  void add_read(Word& word, const Access& access);
  void check_order(const Word& word, std::uint32_t at, const Access& access) const;
  [[noreturn]] void report(const char* what, std::uint32_t at, const char* text, int other) const;

  std::vector<Piece> pieces_;
  std::vector<std::array<std::uint32_t, kWarps>> readers_;  ///< clocks
  std::vector<std::uint32_t> unused_;                       ///< of readers_
};

}  // namespace quern::emulator
