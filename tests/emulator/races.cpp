#include "emulator/races.h"

#include "emulator/kernel.h"

namespace quern::emulator {

namespace {

std::size_t first_of(Range range, std::uint32_t piece) { return range.begin / piece; }
std::size_t end_of(Range range, std::uint32_t piece) { return (range.begin + range.bytes + piece - 1) / piece; }

}  // namespace

Races::Races(std::size_t bytes)
    : writers_(bytes / 4 + 1), reads_((bytes / 4 + 1) * kWarps), held_(bytes / 16 + 1), own_(bytes / 16 + 1) {}

void Races::check_order(std::size_t word, const Access& access) const {
  const Writer& writer = writers_[word];
  if (writer.unit != access.unit && writer.clock > access.before.at[static_cast<std::size_t>(writer.unit)])
    report("follows a write that nothing orders before it", static_cast<std::uint32_t>(4 * word), access.text,
           writer.unit);
}

void Races::read(Range range, const Access& access) {
  for (std::size_t word = first_of(range, 4); word < end_of(range, 4); ++word) {
    check_order(word, access);
    reads_[word * kWarps + static_cast<std::size_t>(access.unit)] = access.clock;
  }
}

void Races::write(Range range, const Access& access) {
  for (std::size_t piece = first_of(range, 16); piece < end_of(range, 16); ++piece)
    if (held_[piece] != 0)
      report("writes what an engine may still read", static_cast<std::uint32_t>(16 * piece), access.text, -1);
  for (std::size_t word = first_of(range, 4); word < end_of(range, 4); ++word) {
    check_order(word, access);
    // What the writer itself has read it knows of.
    const std::uint32_t* const reads = reads_.data() + word * kWarps;
    bool late = false;
    for (std::size_t unit = 0; unit < kWarps; ++unit) late |= reads[unit] > access.before.at[unit];
    for (std::size_t unit = 0; late && unit < kWarps; ++unit)
      if (reads[unit] > access.before.at[unit])
        report("follows a read that nothing orders before it", static_cast<std::uint32_t>(4 * word), access.text,
               static_cast<int>(unit));
    writers_[word] = {access.clock, access.unit};
  }
  if (access.unit >= kWarps)  // an engine's
    for (std::size_t piece = first_of(range, 16); piece < end_of(range, 16); ++piece) own_[piece] = {};
}

void Races::hold(Range range) {
  for (std::size_t piece = first_of(range, 16); piece < end_of(range, 16); ++piece) ++held_[piece];
}

void Races::done(Range range, int unit, std::uint32_t clock) {
  for (std::size_t piece = first_of(range, 16); piece < end_of(range, 16); ++piece) --held_[piece];
  for (std::size_t word = first_of(range, 4); word < end_of(range, 4); ++word)
    reads_[word * kWarps + static_cast<std::size_t>(unit)] = clock;
}

void Races::wrote(Range range, int thread, std::uint32_t number) {
  for (std::size_t piece = first_of(range, 16); piece < end_of(range, 16); ++piece) own_[piece] = {thread, number};
}

void Races::check_fenced(Range range, const std::vector<std::uint32_t>& fenced, const std::string& text) const {
  for (std::size_t piece = first_of(range, 16); piece < end_of(range, 16); ++piece) {
    const Own& own = own_[piece];
    if (own.number > fenced[static_cast<std::size_t>(own.thread)])
      report("has an engine read a thread's write before that thread's fence", static_cast<std::uint32_t>(16 * piece),
             text, own.thread / 32);
  }
}

void Races::report(const char* what, std::uint32_t at, const std::string& text, int other) const {
  std::string where = "race: at byte " + std::to_string(at - kSharedBegin) + " of shared memory '" + text + "' " + what;
  if (other >= kWarps)
    where += " (by a copy)";
  else if (other >= 0)
    where += " (by warp " + std::to_string(other % 32) + " of block " + std::to_string(other / 32) + ")";
  stop(where);
}

}  // namespace quern::emulator
