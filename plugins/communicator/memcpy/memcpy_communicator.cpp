#include "memcpy_communicator.h"

#include <algorithm>

#include "quern/error.h"

namespace quern::memcpy {

namespace {

constexpr const char* kWhere = "communicator memcpy";
constexpr std::int64_t kSlabUnit = 64;  // slabs of an all_reduce begin at multiples of it, so that they stay aligned

[[noreturn]] void fault(const std::string& text) {
  throw Error(ErrorCode::communication, {.where = kWhere, .what = text});
}

/// FNV-1a.
std::uint64_t digest(Counts counts) {
  std::uint64_t hash = 0xcbf29ce484222325;
  for (const std::int64_t count : counts) hash = (hash ^ static_cast<std::uint64_t>(count)) * 0x100000001b3;
  return hash;
}

void need_reducible(DType dtype, Reduction reduction) {
  const bool fits = reduction == Reduction::maximum
                        ? dtype == DType::f32
                        : dtype == DType::f32 || dtype == DType::bf16 || dtype == DType::f64;
  if (!fits)
    fail_internal(kWhere, std::string(reduction == Reduction::sum ? "a sum" : "a maximum") + " of " +
                              std::string(name_of(dtype)));
}

void need_same(const View& view, std::int64_t count, DType dtype, const char* what) {
  if (view.count() != count || view.dtype != dtype)
    fail_internal(kWhere, std::string(what) + ": found " + std::to_string(view.count()) + " elements of " +
                              std::string(name_of(view.dtype)) + ", expected " + std::to_string(count) + " of " +
                              std::string(name_of(dtype)));
}

OpInstance reduction_of(DType dtype, Reduction reduction, std::int64_t ranks, std::int64_t count) {
  OpInstance op{.kind = "reduce_ranks", .geometry = {}};
  op.inputs.push_back({dtype, {ranks, count}, true, false});
  op.outputs.push_back({dtype, {count}, true, false});
  op.attributes = {{"reduction", std::string(reduction == Reduction::sum ? "sum" : "maximum")}};
  return op;
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
  if (const OpSupport support = device.query(reduction_of(DType::f32, Reduction::sum, rendezvous.size, 1));
      !support.refusal.empty() || support.workspace_bytes > 0)
    throw Error(ErrorCode::config, {.where = kWhere,
                                    .what = "the device has no sum over ranks",
                                    .found = support.refusal,
                                    .expected = "a kernel of reduce_ranks without workspace",
                                    .next = "choose another communicator or device"});
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

std::vector<MemcpyCommunicator::Slab> MemcpyCommunicator::cut(Counts counts, std::int64_t whole,
                                                              const char* what) const {
  const auto size = static_cast<std::size_t>(size_);
  std::vector<Slab> slabs(size);
  if (!counts.empty() && counts.size() != size) fail_internal(kWhere, std::string(what) + ": as many counts as ranks");
  std::int64_t begin = 0;
  for (std::size_t i = 0; i < size; ++i) {
    slabs[i] = {begin, counts.empty() ? whole / size_ : counts[i]};
    begin += slabs[i].count;
    if (slabs[i].count < 0) fail_internal(kWhere, std::string(what) + ": a slab of less than no elements");
  }
  if (begin != whole)
    fail_internal(kWhere, std::string(what) + ": slabs of " + std::to_string(begin) + " elements of a whole of " +
                              std::to_string(whole));
  return slabs;
}

void MemcpyCommunicator::need_peer(int rank, const char* what) const {
  if (rank < 0 || rank >= size_ || rank == rank_)
    fail_internal(kWhere, std::string(what) + ": rank " + std::to_string(rank) + " is no peer of rank " +
                              std::to_string(rank_) + " of " + std::to_string(size_));
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

const Kernel& MemcpyCommunicator::kernel(DType dtype, Reduction reduction, std::int64_t count) {
  auto& kernel = kernels_[{dtype, reduction, count}];
  if (!kernel) kernel = device_->prepare(reduction_of(dtype, reduction, size_, count));
  return *kernel;
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
    const View in{staging_, out.dtype, {size_, count}};
    const View sum{out.as<char>() + static_cast<std::size_t>(done) * size_of(out.dtype), out.dtype, {count}};
    kernel(out.dtype, reduction, count).launch({&in, 1}, {&sum, 1}, {.stream = stream});
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
  need_reducible(in_out.dtype, reduction);
  if (!begins(stream) || size_ == 1) return;
  const Place place = place_of(in_out);
  const std::int64_t whole = in_out.count();
  const std::int64_t each = ((whole + size_ - 1) / size_ + kSlabUnit - 1) / kSlabUnit * kSlabUnit;
  std::vector<Slab> slabs;
  for (std::int64_t rank = 0; rank < size_; ++rank) {
    const std::int64_t begin = std::min(whole, rank * each);
    slabs.push_back({begin, std::min(whole, begin + each) - begin});
  }
  const Slab& own = slabs[static_cast<std::size_t>(rank_)];
  meet(stream, call(Call::Kind::all_reduce, in_out, static_cast<std::uint32_t>(reduction), {}, place));
  reduce(place, own, {at(place, rank_, own.begin, in_out.dtype), in_out.dtype, {own.count}}, reduction, stream);
  meet(stream);
  gather(place, slabs, in_out.dtype, stream);
  meet(stream);
}

void MemcpyCommunicator::reduce_scatter(const View& in, const View& out, Counts counts, Reduction reduction,
                                        Stream stream) {
  need_reducible(in.dtype, reduction);
  const Slab own = cut(counts, in.count(), "reduce_scatter")[static_cast<std::size_t>(rank_)];
  need_same(out, own.count, in.dtype, "reduce_scatter");
  if (!begins(stream)) return;
  if (size_ == 1) return copy(out.data, in.data, own.count, in.dtype, stream);
  const Place place = place_of(in);
  meet(stream, call(Call::Kind::reduce_scatter, in, static_cast<std::uint32_t>(reduction), counts, place));
  reduce(place, own, out, reduction, stream);
  meet(stream);
}

/// Peers read from `out`, where each rank puts its own slab first.
void MemcpyCommunicator::all_gather(const View& in, const View& out, Counts counts, Stream stream) {
  const std::vector<Slab> slabs = cut(counts, out.count(), "all_gather");
  const Slab& own = slabs[static_cast<std::size_t>(rank_)];
  need_same(in, own.count, out.dtype, "all_gather");
  if (!begins(stream)) return;
  if (size_ == 1) return copy(out.data, in.data, own.count, out.dtype, stream);
  const Place place = place_of(out);
  copy(at(place, rank_, own.begin, out.dtype), in.data, own.count, out.dtype, stream);
  meet(stream, call(Call::Kind::all_gather, out, 0, counts, place));
  gather(place, slabs, out.dtype, stream);
  meet(stream);
}

void MemcpyCommunicator::all_to_all(const View& in, const View& out, Counts counts, Stream stream) {
  const auto size = static_cast<std::size_t>(size_);
  if (!counts.empty() && counts.size() != size * size)
    fail_internal(kWhere, "all_to_all: counts are " + std::to_string(size) + " by as many");
  auto of = [&](int from, int to) {
    return counts.empty() ? in.count() / size_
                          : counts[static_cast<std::size_t>(from) * size + static_cast<std::size_t>(to)];
  };
  std::int64_t sent = 0, received = 0;
  for (int rank = 0; rank < size_; ++rank) sent += of(rank_, rank), received += of(rank, rank_);
  need_same(in, sent, out.dtype, "all_to_all");
  need_same(out, received, in.dtype, "all_to_all");
  if (!begins(stream)) return;
  if (size_ == 1) return copy(out.data, in.data, sent, in.dtype, stream);
  const Place place = place_of(in);
  // Every rank sends as much as its row says, so `in` has another size on each.
  const View whole{in.data, in.dtype, {counts.empty() ? in.count() : 0}};
  meet(stream, call(Call::Kind::all_to_all, whole, 0, counts, place));
  std::vector<std::int64_t> places(size);  // in `out`, by rank
  for (int rank = 1; rank < size_; ++rank)
    places[static_cast<std::size_t>(rank)] = places[static_cast<std::size_t>(rank - 1)] + of(rank - 1, rank_);
  for (int step = 0; step < size_; ++step) {
    const int from = (rank_ + step) % size_;
    std::int64_t begin = 0;
    for (int to = 0; to < rank_; ++to) begin += of(from, to);
    if (of(from, rank_) > 0)
      copy(out.as<char>() + static_cast<std::size_t>(places[static_cast<std::size_t>(from)]) * size_of(out.dtype),
           at(place, from, begin, in.dtype), of(from, rank_), in.dtype, stream);
  }
  meet(stream);
}

void MemcpyCommunicator::broadcast(const View& in_out, int root, Stream stream) {
  if (root < 0 || root >= size_) fail_internal(kWhere, "broadcast: no rank " + std::to_string(root));
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
  need_peer(to, "send");
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
  need_peer(from, "receive");
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
