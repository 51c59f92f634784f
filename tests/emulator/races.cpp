#include "emulator/races.h"

#include <algorithm>

#include "device/cpu/primitives/simd.h"
#include "emulator/kernel.h"

namespace quern::emulator {

QUERN_CPU_CLONES void Clocks::join(const Clocks& other) {
  for (std::size_t i = 0; i < kUnits; ++i) at[i] = std::max(at[i], other.at[i]);
}

template <class F>
void Races::for_each_piece(Range range, F f) {
  const std::uint32_t end = range.begin + range.bytes;
  for (std::uint32_t at = range.begin / kPiece * kPiece; at < end; at += kPiece) f(pieces_[at / kPiece], at);
}

template <class F>
void Races::for_each_word(Range range, F f) {
  const std::uint32_t end = range.begin + range.bytes;
  for_each_piece(range, [&](Piece& piece, std::uint32_t at) {
    const std::uint32_t first = std::max(range.begin, at), last = std::min(end, at + kPiece);
    const bool whole = last - first == kPiece;
    if (whole && !piece.split) {
      f(piece.words[0], at);
      return;
    }
    if (!piece.split) split(piece);
    for (std::uint32_t word = (first - at) / kWord; word * kWord < last - at; ++word)
      f(piece.words[word], at + word * kWord);
  });
}

void Races::split(Piece& piece) {
  piece.split = true;
  for (std::size_t word = 1; word < std::size(piece.words); ++word) {
    piece.words[word] = piece.words[0];
    if (piece.words[0].reader != kMany) continue;
    piece.words[word].read = add_readers();
    readers_[piece.words[word].read] = readers_[piece.words[0].read];
  }
}

std::uint32_t Races::add_readers() {
  if (unused_.empty()) {
    unused_.push_back(static_cast<std::uint32_t>(readers_.size()));
    readers_.emplace_back();
  }
  const std::uint32_t place = unused_.back();
  unused_.pop_back();
  readers_[place].fill(0);
  return place;
}

void Races::forget_readers(Word& word) {
  if (word.reader == kMany) unused_.push_back(word.read);
  word.reader = 0;
  word.read = 0;
}

[[gnu::always_inline]] inline void Races::add_read(Word& word, const Access& access) {
  const auto unit = static_cast<std::uint8_t>(access.unit);
  if (word.reader != kMany) {
    if (word.reader == unit || word.read <= access.before.at[word.reader]) {
      word.reader = unit;
      word.read = access.clock;
      return;
    }
    const std::uint32_t place = add_readers();
    readers_[place][word.reader] = word.read;
    word.reader = kMany;
    word.read = place;
  }
  readers_[word.read][unit] = access.clock;
}

[[gnu::always_inline]] inline void Races::check_order(const Word& word, std::uint32_t at, const Access& access) const {
  if (word.writer != access.unit && word.written > access.before.at[word.writer])
    report("follows a write that nothing orders before it", at, access.text, word.writer);
}

void Races::read(Range range, const Access& access) {
  for_each_word(range, [&](Word& word, std::uint32_t at) {
    check_order(word, at, access);
    add_read(word, access);
  });
}

void Races::write(Range range, const Access& access) {
  for_each_piece(range, [&](const Piece& piece, std::uint32_t at) {
    if (piece.held != 0) report("writes what an engine may still read", at, access.text, -1);
  });
  for_each_word(range, [&](Word& word, std::uint32_t at) {
    check_order(word, at, access);
    // What the writer itself has read it knows of.
    auto check_read = [&](std::size_t unit, std::uint32_t clock) {
      if (clock > access.before.at[unit])
        report("follows a read that nothing orders before it", at, access.text, static_cast<int>(unit));
    };
    if (word.reader != kMany) {
      check_read(word.reader, word.read);
    } else {
      for (std::size_t unit = 0; unit < kWarps; ++unit) check_read(unit, readers_[word.read][unit]);
    }
    forget_readers(word);  // who knows of this write knows of them
    word.written = access.clock;
    word.writer = static_cast<std::uint8_t>(access.unit);
  });
  const std::uint32_t end = range.begin + range.bytes;
  for_each_piece(range, [&](Piece& piece, std::uint32_t at) {
    if (range.begin <= at && at + kPiece <= end) piece.split = false;
    if (access.unit >= kWarps) piece.number = 0;  // an engine's
  });
}

void Races::hold(Range range) {
  for_each_piece(range, [](Piece& piece, std::uint32_t) { ++piece.held; });
}

void Races::done(Range range, const Access& access) {
  for_each_piece(range, [](Piece& piece, std::uint32_t) { --piece.held; });
  for_each_word(range, [&](Word& word, std::uint32_t) { add_read(word, access); });
}

void Races::wrote(Range range, int thread, std::uint32_t number) {
  for_each_piece(range, [&](Piece& piece, std::uint32_t) {
    piece.thread = thread;
    piece.number = number;
  });
}

void Races::check_fenced(Range range, const std::vector<std::uint32_t>& fenced, const char* text) const {
  const std::uint32_t end = range.begin + range.bytes;
  for (std::uint32_t at = range.begin / kPiece * kPiece; at < end; at += kPiece) {
    const Piece& piece = pieces_[at / kPiece];
    if (piece.number > fenced[static_cast<std::size_t>(piece.thread)])
      report("has an engine read a thread's write before that thread's fence", at, text, piece.thread / 32);
  }
}

void Races::report(const char* what, std::uint32_t at, const char* text, int other) const {
  std::string where = "race: at byte " + std::to_string(at - kSharedBegin) + " of shared memory '" + text + "' " + what;
  if (other >= kWarps)
    where += " (by a copy)";
  else if (other >= 0)
    where += " (by warp " + std::to_string(other % 32) + " of block " + std::to_string(other / 32) + ")";
  stop(where);
}

}  // namespace quern::emulator
