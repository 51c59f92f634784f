#pragma once
// What communicators ask of a call before anything is done, and the slabs that it is about. A call that is wrong by
// itself throws an internal error; `where` names the communicator in it, `what` the call.

#include <cstdint>
#include <string>
#include <vector>

#include "quern/communicator.h"
#include "quern/error.h"

namespace quern::collectives {

/// Elements of a whole.
struct Slab {
  std::int64_t begin = 0, count = 0;
};

/// The dtype can be summed, or its maximum taken.
void need_reducible(const char* where, DType dtype, Reduction reduction);
void need_same(const char* where, const char* what, const View& view, std::int64_t count, DType dtype);
/// `peer` is a rank of the group, and another one.
void need_peer(const char* where, const char* what, int peer, int rank, int size);
void need_root(const char* where, int root, int size);
/// The slabs of all ranks, which make up the whole.
std::vector<Slab> cut(const char* where, const char* what, Counts counts, std::int64_t whole, int size);

/// The slabs in which the ranks of an all_reduce sum, each aligned like the whole.
std::vector<Slab> summed_slabs(std::int64_t whole, int size);

/// Memory that is registered; null: no more, and the buffer keeps its number.
struct Buffer {
  char* begin = nullptr;
  std::size_t bytes = 0;
};
/// In the buffer of that number.
struct Place {
  std::size_t buffer, offset;
};
/// Where a view is. `buffers` are a vector of Buffer, or of a type made from it.
template <class Buffers>
Place place_of(const char* where, const Buffers& buffers, const View& view) {
  const char* begin = view.as<char>();
  for (std::size_t i = 0; i < buffers.size(); ++i)
    if (const Buffer& buffer = buffers[i];
        buffer.begin && begin >= buffer.begin && begin + view.bytes() <= buffer.begin + buffer.bytes)
      return {i, static_cast<std::size_t>(begin - buffer.begin)};
  fail_internal(where, "a view of " + std::to_string(view.bytes()) + " bytes that no registered buffer has");
}

/// What a rank is about to do, for its peers to compare with theirs.
struct Call {
  enum class Kind : std::uint32_t { all_reduce, reduce_scatter, all_gather, all_to_all, broadcast, message } kind;
  std::uint32_t dtype, detail;     // of what, which reduction or root
  std::uint64_t elements, counts;  // of the whole, and a digest of how it is cut
  std::uint64_t buffer, offset;    // the place that peers read
  bool operator==(const Call&) const = default;
  std::string text() const;
};
const char* name_of(Call::Kind kind);
/// With `counts` of a whole whose registered part is at `place`.
Call call_of(Call::Kind kind, const View& whole, std::uint32_t detail, Counts counts, Place place);
/// Of a call and of what `before` is the digest of.
std::uint64_t digest(std::uint64_t before, const Call& call);
/// Why rank `rank`, which does `own`, cannot go on with `peer`, which does `other`.
std::string difference(int peer, const Call& other, int rank, const Call& own);

/// The slabs of an all_to_all, as rank `rank` sees them.
class AllToAll {
 public:
  /// `in` and `out` are of the sizes that the counts say.
  AllToAll(const char* where, const View& in, const View& out, Counts counts, int rank, int size);

  /// Of what rank `from` has for rank `to`, in its `in`.
  Slab sent(int from, int to) const;
  /// Of what comes from that rank, in `out`.
  Slab received(int from) const;

 private:
  std::int64_t count(int from, int to) const {
    return counts_.empty() ? equal_ : counts_[static_cast<std::size_t>(std::int64_t{from} * size_ + to)];
  }

  Counts counts_;
  std::int64_t equal_;
  int rank_, size_;
};

}  // namespace quern::collectives
