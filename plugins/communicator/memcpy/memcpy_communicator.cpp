#include "memcpy_communicator.h"

#include <algorithm>

#include "quern/error.h"

namespace quern::memcpy {

using namespace collectives;

namespace {

constexpr const char* kWhere = "communicator memcpy";

[[noreturn]] void fault(const std::string& text) {
  throw Error(ErrorCode::communication, {.where = kWhere, .what = text});
}

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

// ---- set-up ----

void MemcpyCommunicator::connect(const Rendezvous& rendezvous, Device& device) {
  if (device_) fail_internal(kWhere, "connected twice");
  if (rendezvous.size > kMostRanks)
    throw Error(ErrorCode::config, {.where = kWhere,
                                    .what = "too many ranks",
                                    .found = std::to_string(rendezvous.size),
                                    .expected = std::to_string(kMostRanks) + " at most",
                                    .next = "choose another communicator"});
  reduction_ = std::make_unique<RankReduction>(kWhere, device, rendezvous.size);
  device_ = &device;
  rank_ = rendezvous.rank;
  size_ = rendezvous.size;
  piece_ = static_cast<std::size_t>(options_.piece_kib) << 10;
  meeting_ = std::make_unique<Meeting>(rendezvous);
  if (size_ == 1) return;
  board_ = std::make_unique<Board>(*meeting_, rendezvous);
  const std::size_t bytes = piece_ * static_cast<std::size_t>(size_ + 1);
  staging_ = static_cast<char*>(device.allocate(MemoryKind::device, bytes));
  buffers_.push_back(share(staging_, bytes));
}

void MemcpyCommunicator::register_buffer(void* memory, std::size_t bytes) { buffers_.push_back(share(memory, bytes)); }

void MemcpyCommunicator::unregister_buffer(void* memory) {
  const auto found = std::find_if(buffers_.begin(), buffers_.end(), [&](const Buffer& b) { return b.begin == memory; });
  if (memory == nullptr || found == buffers_.end())
    fail_internal(kWhere, "unregister_buffer of what is not registered");
  barrier();
  for (char* peer : found->peers)
    if (peer) device_->release_imported(peer);
  *found = {};
  barrier();  // CUDA's IPC handles: memory is released by those who mapped it before its owner does
}

void MemcpyCommunicator::barrier() { exchange({}); }

/// All faults of set-up are faults of the group.
std::vector<Message> MemcpyCommunicator::exchange(Message own) {
  if (!meeting_) fail_internal(kWhere, "used before connect");
  if (!board_) return meeting_->exchange(std::move(own));
  if (auto text = error()) fault(*text);
  try {
    return meeting_->exchange(std::move(own));
  } catch (const Error& error) {
    if (error.code() != ErrorCode::communication) throw;
    board_->fail(board_->fault_of_peers().value_or(error.detail().what));
    meeting_->end();
    fault(*board_->fault());
  }
}

MemcpyCommunicator::Buffer MemcpyCommunicator::share(void* memory, std::size_t bytes) {
  Buffer buffer{.begin = static_cast<char*>(memory), .bytes = bytes};
  if (size_ == 1) return buffer;
  // A rank that has nothing of it, or cannot share it, says so to those who wait.
  SharedHandle own;
  if (bytes > 0) own = device_->export_memory(memory);
  std::vector<Message> all = exchange({.bytes = own.bytes, .descriptor = Descriptor(own.descriptor)});
  buffer.peers.resize(static_cast<std::size_t>(size_));
  for (std::size_t peer = 0; peer < all.size(); ++peer)
    if (static_cast<int>(peer) != rank_ && !all[peer].bytes.empty())
      buffer.peers[peer] = static_cast<char*>(
          device_->import_memory({.bytes = all[peer].bytes, .descriptor = all[peer].descriptor.get()}));
  return buffer;
}

// ---- places ----

MemcpyCommunicator::Place MemcpyCommunicator::place_of(const View& view) const {
  const char* begin = view.as<char>();
  for (std::size_t i = 0; i < buffers_.size(); ++i) {
    const Buffer& buffer = buffers_[i];
    if (buffer.begin && begin >= buffer.begin && begin + view.bytes() <= buffer.begin + buffer.bytes)
      return {i, static_cast<std::size_t>(begin - buffer.begin)};
  }
  fail_internal(kWhere, "a view of " + std::to_string(view.bytes()) + " bytes that no registered buffer has");
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
  return !board_ || !board_->failed();
}

Call MemcpyCommunicator::call(Call::Kind kind, const View& whole, std::uint32_t detail, Counts counts,
                              Place place) const {
  return {.kind = kind,
          .dtype = static_cast<std::uint32_t>(whole.dtype),
          .detail = detail,
          .elements = static_cast<std::uint64_t>(whole.count()),
          .counts = digest(counts),
          .buffer = place.buffer,
          .offset = place.offset};
}

void MemcpyCommunicator::meet(Stream stream, std::optional<Call> call) {
  if (board_) device_->call([board = board_.get(), call] { board->meet(call); }, stream);
}

void MemcpyCommunicator::copy(void* to, const void* from, std::int64_t count, DType dtype, Stream stream) {
  if (to != from && count > 0) device_->copy(to, from, static_cast<std::size_t>(count) * size_of(dtype), stream);
}

void MemcpyCommunicator::reduce(Place place, Slab slab, const View& out, Reduction reduction, Stream stream) {
  const auto most = static_cast<std::int64_t>(piece_ / size_of(out.dtype));
  for (std::int64_t done = 0; done < slab.count; done += most) {
    const std::int64_t count = std::min(most, slab.count - done);
    const std::size_t bytes = static_cast<std::size_t>(count) * size_of(out.dtype);
    for (int step = 0; step < size_; ++step) {
      const int from = (rank_ + step) % size_;
      copy(staging_ + static_cast<std::size_t>(from) * bytes, at(place, from, slab.begin + done, out.dtype), count,
           out.dtype, stream);
    }
    const View result{out.as<char>() + static_cast<std::size_t>(done) * size_of(out.dtype), out.dtype, {count}};
    reduction_->launch(staging_, result, reduction, stream);
  }
}

/// Brings the slabs of all others to the same place here.
void MemcpyCommunicator::gather(Place place, const std::vector<Slab>& slabs, DType dtype, Stream stream) {
  for (int step = 1; step < size_; ++step) {
    const int from = (rank_ + step) % size_;
    const Slab& slab = slabs[static_cast<std::size_t>(from)];
    if (slab.count > 0)
      copy(at(place, rank_, slab.begin, dtype), at(place, from, slab.begin, dtype), slab.count, dtype, stream);
  }
}

// ---- collectives ----

void MemcpyCommunicator::all_reduce(const View& in_out, Reduction reduction, Stream stream) {
  need_reducible(kWhere, in_out.dtype, reduction);
  if (!begins(stream) || size_ == 1) return;
  const Place place = place_of(in_out);
  const std::vector<Slab> slabs = summed_slabs(in_out.count(), size_);
  const Slab& own = slabs[static_cast<std::size_t>(rank_)];
  meet(stream, call(Call::Kind::all_reduce, in_out, static_cast<std::uint32_t>(reduction), {}, place));
  reduce(place, own, {at(place, rank_, own.begin, in_out.dtype), in_out.dtype, {own.count}}, reduction, stream);
  meet(stream);
  gather(place, slabs, in_out.dtype, stream);
  meet(stream);
}

void MemcpyCommunicator::reduce_scatter(const View& in, const View& out, Counts counts, Reduction reduction,
                                        Stream stream) {
  need_reducible(kWhere, in.dtype, reduction);
  const Slab own = cut(kWhere, "reduce_scatter", counts, in.count(), size_)[static_cast<std::size_t>(rank_)];
  need_same(kWhere, "reduce_scatter", out, own.count, in.dtype);
  if (!begins(stream)) return;
  if (size_ == 1) return copy(out.data, in.data, own.count, in.dtype, stream);
  const Place place = place_of(in);
  meet(stream, call(Call::Kind::reduce_scatter, in, static_cast<std::uint32_t>(reduction), counts, place));
  reduce(place, own, out, reduction, stream);
  meet(stream);
}

/// Peers read from `out`, where each rank puts its own slab first.
void MemcpyCommunicator::all_gather(const View& in, const View& out, Counts counts, Stream stream) {
  const std::vector<Slab> slabs = cut(kWhere, "all_gather", counts, out.count(), size_);
  const Slab& own = slabs[static_cast<std::size_t>(rank_)];
  need_same(kWhere, "all_gather", in, own.count, out.dtype);
  if (!begins(stream)) return;
  if (size_ == 1) return copy(out.data, in.data, own.count, out.dtype, stream);
  const Place place = place_of(out);
  copy(at(place, rank_, own.begin, out.dtype), in.data, own.count, out.dtype, stream);
  meet(stream, call(Call::Kind::all_gather, out, 0, counts, place));
  gather(place, slabs, out.dtype, stream);
  meet(stream);
}

void MemcpyCommunicator::all_to_all(const View& in, const View& out, Counts counts, Stream stream) {
  const AllToAll slabs(kWhere, in, out, counts, rank_, size_);
  if (!begins(stream)) return;
  if (size_ == 1) return copy(out.data, in.data, in.count(), in.dtype, stream);
  const Place place = place_of(in);
  // Every rank sends as much as its row says, so `in` has another size on each.
  const View whole{in.data, in.dtype, {counts.empty() ? in.count() : 0}};
  meet(stream, call(Call::Kind::all_to_all, whole, 0, counts, place));
  for (int step = 0; step < size_; ++step) {
    const int from = (rank_ + step) % size_;
    const Slab there = slabs.sent(from, rank_), here = slabs.received(from);
    if (there.count > 0)
      copy(out.as<char>() + static_cast<std::size_t>(here.begin) * size_of(out.dtype),
           at(place, from, there.begin, in.dtype), there.count, in.dtype, stream);
  }
  meet(stream);
}

void MemcpyCommunicator::broadcast(const View& in_out, int root, Stream stream) {
  need_root(kWhere, root, size_);
  if (!begins(stream) || size_ == 1) return;
  const Place place = place_of(in_out);
  meet(stream, call(Call::Kind::broadcast, in_out, static_cast<std::uint32_t>(root), {}, place));
  if (root != rank_ && in_out.count() > 0)
    copy(in_out.data, at(place, root, 0, in_out.dtype), in_out.count(), in_out.dtype, stream);
  meet(stream);
}

// ---- between two ranks ----

/// The last piece of the staging is what peers receive from; at least one is given, so that sizes are compared.
void MemcpyCommunicator::send(const View& in, int to, Stream stream) {
  need_peer(kWhere, "send", to, rank_, size_);
  if (!begins(stream)) return;
  char* window = staging_ + piece_ * static_cast<std::size_t>(size_);
  const std::size_t bytes = in.bytes();
  std::size_t done = 0;
  do {
    const std::size_t now = std::min(piece_, bytes - done);
    if (now > 0) device_->copy(window, in.as<char>() + done, now, stream);
    device_->call([board = board_.get(), to, bytes] { board->give(to, bytes); }, stream);
    done += now;
  } while (done < bytes);
}

void MemcpyCommunicator::receive(const View& out, int from, Stream stream) {
  need_peer(kWhere, "receive", from, rank_, size_);
  if (!begins(stream)) return;
  const char* window = at({0, piece_ * static_cast<std::size_t>(size_)}, from, 0, DType::u8);
  const std::size_t bytes = out.bytes();
  std::size_t done = 0;
  do {
    const std::size_t now = std::min(piece_, bytes - done);
    device_->call([board = board_.get(), from, bytes] { board->expect(from, bytes); }, stream);
    if (now > 0) device_->copy(out.as<char>() + done, window, now, stream);
    device_->call([board = board_.get(), from] { board->took(from); }, stream);
    done += now;
  } while (done < bytes);
}

// ---- faults ----

std::optional<std::string> MemcpyCommunicator::error() { return board_ ? board_->fault() : std::nullopt; }

void MemcpyCommunicator::abort() noexcept {
  if (!board_) return;
  board_->fail("rank " + std::to_string(rank_) + " ended it");
  meeting_->end();
}

}  // namespace quern::memcpy
