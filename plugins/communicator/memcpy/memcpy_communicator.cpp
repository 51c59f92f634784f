#include "memcpy_communicator.h"

#include <algorithm>
#include <cstdint>

#include "quern/error.h"

namespace quern::memcpy {

using namespace collectives;

namespace {

constexpr const char* kWhere = "communicator memcpy";

/// Up to this size an exchange takes longer than the bytes: an all_reduce has one then, not two.
constexpr std::size_t kSmall = 32 << 10;
/// Pieces of a sum, and their least bytes: shorter copies take longer to start than to run.
constexpr std::size_t kPieces = 16, kLeast = std::size_t{1} << 20;

}  // namespace

MemcpyCommunicator::~MemcpyCommunicator() {
  for (const Stream stream : streams_) {
    try {
      device_->synchronize(stream);
    } catch (...) {  // told to who synchronizes next
    }
  }
  for (const Buffer& buffer : buffers_)
    for (char* peer : buffer.peers)
      if (peer) device_->release_imported(peer);
  if (staging_) device_->release(MemoryKind::device, staging_);
}

// ---- places ----

MemcpyCommunicator::Place MemcpyCommunicator::place_of(const View& view) const {
  return collectives::place_of(kWhere, buffers_, view);
}

char* MemcpyCommunicator::at(Place place, int rank, std::int64_t at, DType dtype) const {
  const Buffer& buffer = buffers_[place.buffer];
  char* begin = rank == rank_ ? buffer.begin : buffer.peers[static_cast<std::size_t>(rank)];
  if (!begin) fail_internal(kWhere, "rank " + std::to_string(rank) + " has nothing of this buffer");
  return begin + place.offset + static_cast<std::size_t>(at) * size_of(dtype);
}

// ---- enqueueing ----

bool MemcpyCommunicator::begins(Stream stream) {
  if (!device_) fail_internal(kWhere, "used before connect");
  auto same = [&](Stream other) { return other.handle == stream.handle; };
  if (std::none_of(streams_.begin(), streams_.end(), same)) streams_.push_back(stream);
  return !(board_ ? board_->failed() : ended_.load());
}

std::vector<int> MemcpyCommunicator::peers() const {
  std::vector<int> peers;
  for (int step = 1; step < size_; ++step) peers.push_back((rank_ + step) % size_);
  return peers;
}

void MemcpyCommunicator::copy(void* to, const void* from, std::int64_t count, DType dtype, Stream stream) {
  if (to != from && count > 0) device_->copy(to, from, static_cast<std::size_t>(count) * size_of(dtype), stream);
}

void MemcpyCommunicator::copy(void* to, Place place, int from, Slab slab, DType dtype, Stream stream) {
  if (slab.count > 0) copy(to, at(place, from, slab.begin, dtype), slab.count, dtype, stream);
}

// ---- parts of a call ----

bool MemcpyCommunicator::enter(const Call& call, Stream stream) {
  board_->compare(call);
  if (board_->failed()) return false;
  board_->begin(call.kind, -1, stream);
  return true;
}

void MemcpyCommunicator::give_all(Signal kind, Stream stream) {
  for (const int peer : peers()) board_->give(peer, kind, stream);
}

void MemcpyCommunicator::pull_all(Signal kind, Stream stream, const std::function<void(int from)>& pull) {
  for (const int from : peers()) {
    board_->await(from, kind, stream);
    pull(from);
    board_->take(from, kind, stream);
  }
}

/// In pieces: short enough that the last sum, which hides behind no copy, is a small part of the whole.
std::int64_t MemcpyCommunicator::piece_of(const Slab& slab, DType dtype) const {
  const std::size_t wanted = static_cast<std::size_t>(slab.count) * size_of(dtype) / kPieces;
  const std::size_t bytes = std::min(piece_, std::max(wanted / kSmall * kSmall, kLeast));
  return static_cast<std::int64_t>(bytes / size_of(dtype));
}

/// Two streams take pieces alternately, each with its half of the staging: while one sums, the other copies.
void MemcpyCommunicator::reduce(Place place, Slab slab, const View& out, Reduction reduction, Stream stream) {
  const std::int64_t most = piece_of(slab, out.dtype);
  const Stream lines[] = {stream, device_->stream(StreamKind::copy_out)};
  const std::size_t used = slab.count > most ? 2 : 1;
  if (used > 1) {
    device_->record(begun_, stream);
    device_->wait(lines[1], begun_);
  }
  for (std::size_t line = 0; line < used; ++line)
    for (const int from : peers()) board_->await(from, Signal::first, lines[line]);
  for (std::int64_t done = 0, piece = 0; done < slab.count; done += most, ++piece) {
    const std::int64_t count = std::min(most, slab.count - done);
    const std::size_t line = static_cast<std::size_t>(piece % 2),
                      bytes = static_cast<std::size_t>(count) * size_of(out.dtype);
    char* const staged = staging_ + line * piece_ * static_cast<std::size_t>(size_);
    for (const int from : peers())
      copy(staged + static_cast<std::size_t>(from) * bytes, place, from, {slab.begin + done, count}, out.dtype,
           lines[line]);
    const View result{out.as<char>() + static_cast<std::size_t>(done) * size_of(out.dtype), out.dtype, {count}};
    reduction_->launch(staged, at(place, rank_, slab.begin + done, out.dtype), result, reduction, lines[line]);
  }
  if (used > 1) {
    device_->record(summed_, lines[1]);
    device_->wait(stream, summed_);
  }
  for (const int from : peers()) board_->take(from, Signal::first, stream);
}

/// Every rank brings together all that the others have, and sums it in place once they have it too.
void MemcpyCommunicator::reduce_small(Place place, const View& in_out, Reduction reduction, Stream stream) {
  auto pull = [&](int from) {
    copy(staging_ + static_cast<std::size_t>(from) * in_out.bytes(), place, from, {0, in_out.count()}, in_out.dtype,
         stream);
  };
  pull_all(Signal::first, stream, pull);
  leave(Signal::first, stream);
  if (in_out.count() > 0) reduction_->launch(staging_, in_out.data, in_out, reduction, stream);
}

/// Chunks of all ranks come to the staging memory, and are summed as `reduce` does.
void MemcpyCommunicator::relay_sum(Place place, const std::vector<Slab>& slabs, const View& out, Reduction reduction,
                                   Stream stream) {
  const std::size_t each = size_of(out.dtype);
  const auto slab = [&](int of) { return slabs[static_cast<std::size_t>(of)]; };
  const auto bytes = [&](int of) { return static_cast<std::size_t>(slab(of).count) * each; };
  relay_->run({.bytes = [&](int, int to) { return bytes(to); },
               .given = [&](int to) { return at(place, rank_, slab(to).begin, out.dtype); },
               .arrive =
                   [&](int from, const char* piece, std::size_t, std::size_t count) {
                     device_->copy(staging_ + static_cast<std::size_t>(from) * count, piece, count, stream);
                   },
               .arrived =
                   [&](std::size_t begin, std::size_t end) {
                     end = std::min(end, bytes(rank_));
                     if (begin >= end) return;
                     const auto first = static_cast<std::int64_t>(begin / each),
                                count = static_cast<std::int64_t>((end - begin) / each);
                     reduction_->launch(staging_, at(place, rank_, slab(rank_).begin + first, out.dtype),
                                        {out.as<char>() + begin, out.dtype, {count}}, reduction, stream);
                   }},
              stream);
}

/// Every rank's slab, which it has at `place`, to all.
void MemcpyCommunicator::relay_gather(Place place, const std::vector<Slab>& slabs, DType dtype, Stream stream) {
  const auto slab = [&](int of) { return slabs[static_cast<std::size_t>(of)]; };
  relay_->run({.same = true,
               .bytes = [&](int from, int) { return static_cast<std::size_t>(slab(from).count) * size_of(dtype); },
               .given = [&](int) { return at(place, rank_, slab(rank_).begin, dtype); },
               .arrive =
                   [&](int from, const char* piece, std::size_t begin, std::size_t count) {
                     device_->copy(at(place, rank_, slab(from).begin, dtype) + begin, piece, count, stream);
                   }},
              stream);
}

void MemcpyCommunicator::leave(Signal last, Stream stream) {
  for (const Signal kind : {Signal::first, Signal::second})
    if (kind <= last)
      for (const int peer : peers()) board_->await_taken(peer, kind, stream);
  board_->end(stream);
}

// ---- collectives ----

void MemcpyCommunicator::all_reduce(const View& in_out, Reduction reduction, Stream stream) {
  need_reducible(kWhere, in_out.dtype, reduction);
  if (!begins(stream)) return;
  const Place place = place_of(in_out);
  if (size_ == 1) return;
  const std::vector<Slab> slabs = summed_slabs(in_out.count(), size_);
  const Slab& own = slabs[static_cast<std::size_t>(rank_)];
  if (!enter(call_of(Call::Kind::all_reduce, in_out, static_cast<std::uint32_t>(reduction), {}, place), stream)) return;
  const View sum{at(place, rank_, own.begin, in_out.dtype), in_out.dtype, {own.count}};
  if (relay_) {
    relay_sum(place, slabs, sum, reduction, stream);
    relay_gather(place, slabs, in_out.dtype, stream);
    return leave(Signal::second, stream);
  }
  give_all(Signal::first, stream);
  if (in_out.bytes() <= std::min(kSmall, piece_)) return reduce_small(place, in_out, reduction, stream);
  reduce(place, own, sum, reduction, stream);
  give_all(Signal::second, stream);
  pull_all(Signal::second, stream, [&](int from) {
    const Slab& slab = slabs[static_cast<std::size_t>(from)];
    copy(at(place, rank_, slab.begin, in_out.dtype), place, from, slab, in_out.dtype, stream);
  });
  leave(Signal::second, stream);
}

void MemcpyCommunicator::reduce_scatter(const View& in, const View& out, Counts counts, Reduction reduction,
                                        Stream stream) {
  need_reducible(kWhere, in.dtype, reduction);
  const std::vector<Slab> slabs = cut(kWhere, "reduce_scatter", counts, in.count(), size_);
  const Slab& own = slabs[static_cast<std::size_t>(rank_)];
  need_same(kWhere, "reduce_scatter", out, own.count, in.dtype);
  if (!begins(stream)) return;
  const Place place = place_of(in);
  if (size_ == 1) return copy(out.data, in.data, own.count, in.dtype, stream);
  if (!enter(call_of(Call::Kind::reduce_scatter, in, static_cast<std::uint32_t>(reduction), counts, place), stream))
    return;
  if (relay_) {
    relay_sum(place, slabs, out, reduction, stream);
    return leave(Signal::second, stream);
  }
  give_all(Signal::first, stream);
  reduce(place, own, out, reduction, stream);
  leave(Signal::first, stream);
}

/// Peers read from `out`, where each rank puts its own slab first.
void MemcpyCommunicator::all_gather(const View& in, const View& out, Counts counts, Stream stream) {
  const std::vector<Slab> slabs = cut(kWhere, "all_gather", counts, out.count(), size_);
  const Slab& own = slabs[static_cast<std::size_t>(rank_)];
  need_same(kWhere, "all_gather", in, own.count, out.dtype);
  if (!begins(stream)) return;
  const Place place = place_of(out);
  if (size_ == 1) return copy(out.data, in.data, own.count, out.dtype, stream);
  if (!enter(call_of(Call::Kind::all_gather, out, 0, counts, place), stream)) return;
  copy(at(place, rank_, own.begin, out.dtype), in.data, own.count, out.dtype, stream);
  if (relay_) {
    relay_gather(place, slabs, out.dtype, stream);
    return leave(Signal::second, stream);
  }
  give_all(Signal::first, stream);
  pull_all(Signal::first, stream, [&](int from) {
    const Slab& slab = slabs[static_cast<std::size_t>(from)];
    copy(at(place, rank_, slab.begin, out.dtype), place, from, slab, out.dtype, stream);
  });
  leave(Signal::first, stream);
}

void MemcpyCommunicator::all_to_all(const View& in, const View& out, Counts counts, Stream stream) {
  const AllToAll slabs(kWhere, in, out, counts, rank_, size_);
  if (!begins(stream)) return;
  const Place place = place_of(in);
  if (size_ == 1) return copy(out.data, in.data, in.count(), in.dtype, stream);
  // Every rank sends as much as its row says, so `in` has another size on each.
  const View whole{in.data, in.dtype, {counts.empty() ? in.count() : 0}};
  if (!enter(call_of(Call::Kind::all_to_all, whole, 0, counts, place), stream)) return;
  const auto received = [&](int from) {
    return out.as<char>() + static_cast<std::size_t>(slabs.received(from).begin) * size_of(out.dtype);
  };
  const auto pull = [&](int from) { copy(received(from), place, from, slabs.sent(from, rank_), in.dtype, stream); };
  if (relay_) {
    pull(rank_);
    relay_->run(
        {.bytes = [&](int from,
                      int to) { return static_cast<std::size_t>(slabs.sent(from, to).count) * size_of(in.dtype); },
         .given = [&](int to) { return at(place, rank_, slabs.sent(rank_, to).begin, in.dtype); },
         .arrive = [&](int from, const char* piece, std::size_t begin,
                       std::size_t count) { device_->copy(received(from) + begin, piece, count, stream); }},
        stream);
    return leave(Signal::second, stream);
  }
  give_all(Signal::first, stream);
  pull(rank_);
  pull_all(Signal::first, stream, pull);
  leave(Signal::first, stream);
}

void MemcpyCommunicator::broadcast(const View& in_out, int root, Stream stream) {
  need_root(kWhere, root, size_);
  if (!begins(stream)) return;
  const Place place = place_of(in_out);
  if (size_ == 1) return;
  const Call all = call_of(Call::Kind::broadcast, in_out, static_cast<std::uint32_t>(root), {}, place);
  if (relay_) {
    if (!enter(all, stream)) return;
    std::vector<Slab> slabs(static_cast<std::size_t>(size_));
    slabs[static_cast<std::size_t>(root)].count = in_out.count();
    relay_gather(place, slabs, in_out.dtype, stream);
    return leave(Signal::second, stream);
  }
  if (root == rank_) {
    if (!enter(all, stream)) return;
    give_all(Signal::first, stream);
    return leave(Signal::first, stream);
  }
  board_->compare(all);
  if (board_->failed()) return;
  board_->begin(all.kind, root, stream);
  board_->await(root, Signal::first, stream);
  copy(in_out.data, place, root, {0, in_out.count()}, in_out.dtype, stream);
  board_->end(stream);
  board_->take(root, Signal::first, stream);
}

// ---- between two ranks ----

/// Peers receive from the window; at least one piece is given.
void MemcpyCommunicator::send(const View& in, int to, Stream stream) {
  need_peer(kWhere, "send", to, rank_, size_);
  if (!begins(stream)) return;
  const std::size_t bytes = in.bytes();
  board_->compare_message(rank_, to, bytes);
  if (board_->failed()) return;
  std::size_t done = 0;
  do {
    const std::size_t now = std::min(piece_, bytes - done);
    if (now > 0) device_->copy(window_, in.as<char>() + done, now, stream);
    board_->begin(Call::Kind::message, -1, stream);
    board_->give(to, Signal::message, stream);
    board_->await_taken(to, Signal::message, stream);
    board_->end(stream);
    done += now;
  } while (done < bytes);
}

void MemcpyCommunicator::receive(const View& out, int from, Stream stream) {
  need_peer(kWhere, "receive", from, rank_, size_);
  if (!begins(stream)) return;
  const char* window =
      relay_ ? relay_->message(from) : at({0, static_cast<std::size_t>(window_ - staging_)}, from, 0, DType::u8);
  const std::size_t bytes = out.bytes();
  board_->compare_message(from, rank_, bytes);
  if (board_->failed()) return;
  std::size_t done = 0;
  do {
    const std::size_t now = std::min(piece_, bytes - done);
    board_->begin(Call::Kind::message, from, stream);
    board_->await(from, Signal::message, stream);
    if (now > 0) device_->copy(out.as<char>() + done, window, now, stream);
    board_->end(stream);
    board_->take(from, Signal::message, stream);
    done += now;
  } while (done < bytes);
}

// ---- faults ----

std::optional<std::string> MemcpyCommunicator::error() {
  if (board_) return board_->fault();
  return ended_ ? std::optional<std::string>("rank 0 ended it") : std::nullopt;
}

void MemcpyCommunicator::abort() noexcept {
  ended_ = true;
  if (!board_) return;
  board_->fail("rank " + std::to_string(rank_) + " ended it");
  meeting_->end();
}

}  // namespace quern::memcpy
