#pragma once
// A map over the bytes of one memory: ranges that do not overlap, each with knowledge of its bytes.

#include <cstdint>
#include <iterator>
#include <map>

namespace quern {

template <class T>
class ByteRanges {
 public:
  struct Range {
    std::int64_t end = 0;
    T known = {};
  };
  using Iterator = typename std::map<std::int64_t, Range>::iterator;

  /// Cuts ranges at both ends and returns the first one in between, or behind that.
  Iterator cut(std::int64_t begin, std::int64_t end) {
    for (std::int64_t at : {begin, end}) {
      auto after = ranges_.upper_bound(at);
      if (after == ranges_.begin()) continue;
      auto holder = std::prev(after);
      if (holder->first == at || holder->second.end <= at) continue;
      Range tail = holder->second;
      holder->second.end = at;
      ranges_.emplace_hint(after, at, std::move(tail));
    }
    return ranges_.lower_bound(begin);
  }
  void set(std::int64_t begin, std::int64_t end, T known) {
    const Iterator first = cut(begin, end);
    Iterator last = first;
    while (last != ranges_.end() && last->first < end) ++last;
    ranges_.erase(first, last);
    ranges_[begin] = {end, std::move(known)};
  }
  /// Visits the knowledge of the bytes, range by range.
  template <class Visit>
  void visit(std::int64_t begin, std::int64_t end, Visit visit) {
    for (Iterator it = cut(begin, end); it != ranges_.end() && it->first < end; ++it) visit(it->second.known);
  }
  Iterator begin() { return ranges_.begin(); }
  Iterator end() { return ranges_.end(); }

 private:
  std::map<std::int64_t, Range> ranges_;  // by where they begin
};

}  // namespace quern
