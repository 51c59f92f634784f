#include "shared/collectives/calls.h"

#include <algorithm>

#include "quern/error.h"

namespace quern::collectives {

void need_reducible(const char* where, DType dtype, Reduction reduction) {
  const bool fits = reduction == Reduction::maximum
                        ? dtype == DType::f32
                        : dtype == DType::f32 || dtype == DType::bf16 || dtype == DType::f64;
  if (!fits)
    fail_internal(
        where, std::string(reduction == Reduction::sum ? "a sum" : "a maximum") + " of " + std::string(name_of(dtype)));
}

void need_same(const char* where, const char* what, const View& view, std::int64_t count, DType dtype) {
  if (view.count() != count || view.dtype != dtype)
    fail_internal(where, std::string(what) + ": found " + std::to_string(view.count()) + " elements of " +
                             std::string(name_of(view.dtype)) + ", expected " + std::to_string(count) + " of " +
                             std::string(name_of(dtype)));
}

void need_peer(const char* where, const char* what, int peer, int rank, int size) {
  if (peer < 0 || peer >= size || peer == rank)
    fail_internal(where, std::string(what) + ": rank " + std::to_string(peer) + " is no peer of rank " +
                             std::to_string(rank) + " of " + std::to_string(size));
}

void need_root(const char* where, int root, int size) {
  if (root < 0 || root >= size) fail_internal(where, "broadcast: no rank " + std::to_string(root));
}

std::vector<Slab> cut(const char* where, const char* what, Counts counts, std::int64_t whole, int size) {
  std::vector<Slab> slabs(static_cast<std::size_t>(size));
  if (!counts.empty() && counts.size() != slabs.size())
    fail_internal(where, std::string(what) + ": as many counts as ranks");
  std::int64_t begin = 0;
  for (std::size_t i = 0; i < slabs.size(); ++i) {
    slabs[i] = {begin, counts.empty() ? whole / size : counts[i]};
    begin += slabs[i].count;
    if (slabs[i].count < 0) fail_internal(where, std::string(what) + ": a slab of less than no elements");
  }
  if (begin != whole)
    fail_internal(where, std::string(what) + ": slabs of " + std::to_string(begin) + " elements of a whole of " +
                             std::to_string(whole));
  return slabs;
}

std::vector<Slab> summed_slabs(std::int64_t whole, int size) {
  constexpr std::int64_t kUnit = 64;  // elements
  const std::int64_t each = ((whole + size - 1) / size + kUnit - 1) / kUnit * kUnit;
  std::vector<Slab> slabs;
  for (std::int64_t rank = 0; rank < size; ++rank) {
    const std::int64_t begin = std::min(whole, rank * each);
    slabs.push_back({begin, std::min(whole, begin + each) - begin});
  }
  return slabs;
}

const char* name_of(Call::Kind kind) {
  constexpr const char* kNames[] = {"all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast", "message"};
  return kNames[static_cast<std::size_t>(kind)];
}

std::string Call::text() const {
  return std::string(name_of(kind)) + " of " + std::to_string(elements) + " " +
         std::string(name_of(static_cast<DType>(dtype)));
}

/// FNV-1a.
std::uint64_t digest(Counts counts) {
  std::uint64_t hash = 0xcbf29ce484222325;
  for (const std::int64_t count : counts) hash = (hash ^ static_cast<std::uint64_t>(count)) * 0x100000001b3;
  return hash;
}

Call call_of(Call::Kind kind, const View& whole, std::uint32_t detail, Counts counts, Place place) {
  return {.kind = kind,
          .dtype = static_cast<std::uint32_t>(whole.dtype),
          .detail = detail,
          .elements = static_cast<std::uint64_t>(whole.count()),
          .counts = digest(counts),
          .buffer = place.buffer,
          .offset = place.offset};
}

std::uint64_t digest(std::uint64_t before, const Call& call) {
  std::vector<std::int64_t> words;
  for (const std::uint64_t word :
       {before, std::uint64_t{static_cast<std::uint32_t>(call.kind)}, std::uint64_t{call.dtype},
        std::uint64_t{call.detail}, call.elements, call.counts, call.buffer, call.offset})
    words.push_back(static_cast<std::int64_t>(word));
  return digest(words);
}

std::string difference(int peer, const Call& other, int rank, const Call& own) {
  return "rank " + std::to_string(peer) + " does not do the same: found " + other.text() + ", where rank " +
         std::to_string(rank) + " does " + own.text() +
         (other.text() == own.text() ? ", with other counts or places" : "");
}

AllToAll::AllToAll(const char* where, const View& in, const View& out, Counts counts, int rank, int size)
    : counts_(counts), equal_(in.count() / size), rank_(rank), size_(size) {
  const auto ranks = static_cast<std::size_t>(size);
  if (!counts.empty() && counts.size() != ranks * ranks)
    fail_internal(where, "all_to_all: counts are " + std::to_string(size) + " by as many");
  const Slab last = sent(rank, size - 1), last_received = received(size - 1);
  need_same(where, "all_to_all", in, last.begin + last.count, out.dtype);
  need_same(where, "all_to_all", out, last_received.begin + last_received.count, in.dtype);
}

Slab AllToAll::sent(int from, int to) const {
  Slab slab{0, count(from, to)};
  for (int before = 0; before < to; ++before) slab.begin += count(from, before);
  return slab;
}

Slab AllToAll::received(int from) const {
  Slab slab{0, count(from, rank_)};
  for (int before = 0; before < from; ++before) slab.begin += count(before, rank_);
  return slab;
}

}  // namespace quern::collectives
