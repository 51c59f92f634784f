#include "mpi_communicator.h"

#include <algorithm>

#include "quern/error.h"

namespace quern::mpi {

using namespace collectives;

namespace {

constexpr const char* kWhere = "communicator mpi";

char* at(const View& view, std::int64_t element) {
  return view.as<char>() + static_cast<std::size_t>(element) * size_of(view.dtype);
}

Transfer part_of(const View& whole, const Slab& slab, int peer) {
  return {peer, at(whole, slab.begin), static_cast<std::size_t>(slab.count) * size_of(whole.dtype)};
}

/// What moves in a round.
Transfer in_round(const Transfer& whole, std::size_t round, std::size_t piece) {
  const std::size_t begin = std::min(whole.bytes, round * piece);
  return {whole.peer, whole.memory + begin, std::min(piece, whole.bytes - begin)};
}

}  // namespace

MpiCommunicator::~MpiCommunicator() {
  for (const Stream stream : streams_) {
    try {
      device_->synchronize(stream);
    } catch (...) {  // told to who synchronizes next
    }
  }
  if (wire_) wire_->leave();
  progress_.reset();
  const bool failed = wire_ && wire_->failed();  // then MPI may still use the memory
  if (staging_ && !(direct_ && failed)) device_->release(MemoryKind::device, staging_);
  if (pinned_ && !failed) device_->release(MemoryKind::pinned, pinned_);
}

// ---- set-up ----

void MpiCommunicator::connect(const Rendezvous& rendezvous, Device& device) {
  if (device_) fail_internal(kWhere, "connected twice");
  rank_ = rendezvous.rank;
  size_ = rendezvous.size;
  if (size_ > 1) {
    reduction_ = std::make_unique<RankReduction>(kWhere, device, rank_, size_);
    wire_ = std::make_unique<Wire>(rendezvous);
  }
  device_ = &device;
  if (size_ == 1) return;
  const std::size_t ranks = static_cast<std::size_t>(size_);
  const bool on_host = device.traits().host_addressable;
  direct_ = staging_option_ == "none" || (staging_option_ == "auto" && !on_host && is_cuda_aware());
  if (direct_ && !on_host && !is_cuda_aware())
    throw Error(ErrorCode::config, {.where = "parallel.mpi.staging",
                                    .what = "MPI does not read the memory of " + device.traits().name,
                                    .found = "\"none\" with an MPI that is not CUDA-aware",
                                    .expected = "\"pinned\" or \"auto\""});
  if (!direct_) pinned_ = static_cast<char*>(device.allocate(MemoryKind::pinned, 4 * ranks * piece_));
  staging_ = static_cast<char*>(device.allocate(MemoryKind::device, ranks * traits_.peer_bytes));
  progress_ = std::make_unique<Progress>(*wire_);
}

void MpiCommunicator::register_buffer(void* memory, std::size_t bytes) {
  barrier();
  buffers_.push_back({static_cast<char*>(memory), bytes});
}

void MpiCommunicator::unregister_buffer(void* memory) {
  const auto found = std::find_if(buffers_.begin(), buffers_.end(), [&](const Buffer& b) { return b.begin == memory; });
  if (memory == nullptr || found == buffers_.end())
    fail_internal(kWhere, "unregister_buffer of memory that is not registered");
  *found = {};
  barrier();
}

void MpiCommunicator::barrier() {
  if (!device_) fail_internal(kWhere, "used before connect");
  if (wire_ ? !wire_->barrier() : ended_.load())
    throw Error(ErrorCode::communication, {.where = kWhere, .what = *error()});
}

// ---- enqueueing ----

bool MpiCommunicator::begins(Stream stream) {
  if (!device_) fail_internal(kWhere, "used before connect");
  auto same = [&](Stream other) { return other.handle == stream.handle; };
  if (std::none_of(streams_.begin(), streams_.end(), same)) streams_.push_back(stream);
  return !(wire_ ? wire_->failed() : ended_.load());
}

Call MpiCommunicator::call(Call::Kind kind, const View& whole, std::uint32_t detail, Counts counts,
                           const View& registered) const {
  return call_of(kind, whole, detail, counts, place_of(kWhere, buffers_, registered));
}

void MpiCommunicator::copy(void* to, const void* from, std::size_t bytes, Stream stream) {
  if (to != from && bytes > 0) device_->copy(to, from, bytes, stream);
}

char* MpiCommunicator::slot(std::size_t round, int number) const {
  return pinned_ + (round % 2 * 2 * static_cast<std::size_t>(size_) + static_cast<std::size_t>(number)) * piece_;
}

char* MpiCommunicator::landing(std::size_t round) const {
  return staging_ + (direct_ ? round % 2 * static_cast<std::size_t>(size_) * piece_ : 0);
}

/// A round is on its way while the stream brings the one before to its place and fetches the next.
void MpiCommunicator::move(const Exchange& exchange, Stream stream) {
  std::size_t most = 1;
  for (const auto* transfers : {&exchange.out, &exchange.in})
    for (const Transfer& transfer : *transfers) most = std::max(most, transfer.bytes);
  const std::size_t rounds = (most + piece_ - 1) / piece_;
  for (std::size_t round = 0; round <= rounds; ++round) {
    if (round < rounds) post(exchange, round, stream);
    if (round > 0) take(exchange, round - 1, round < rounds ? posted_ - 1 : posted_, stream);
  }
}

void MpiCommunicator::post(const Exchange& exchange, std::size_t round, Stream stream) {
  std::vector<Transfer> out, in;
  const char* fetched = nullptr;  // the same for all peers, but in an all_to_all
  for (const Transfer& whole : exchange.in)
    if (const Transfer part = in_round(whole, round, piece_); part.bytes > 0) {
      char* const summed = landing(round) + static_cast<std::size_t>(part.peer) * part.bytes;
      char* const memory = !direct_ ? in_slot(round, part.peer) : exchange.use ? summed : part.memory;
      in.push_back({part.peer, memory, part.bytes});
    }
  for (const Transfer& whole : exchange.out) {
    const Transfer part = in_round(whole, round, piece_);
    if (part.bytes == 0) continue;
    if (direct_) {
      out.push_back(part);
      continue;
    }
    const bool again = part.memory == fetched;
    out.push_back({part.peer, again ? out.back().memory : out_slot(round, part.peer), part.bytes});
    if (!again) copy(out.back().memory, part.memory, part.bytes, stream);
    fetched = part.memory;
  }
  ++posted_;
  auto work = [wire = wire_.get(), out = std::move(out), in = std::move(in),
               call = round == 0 ? exchange.call : std::nullopt,
               what = exchange.call ? exchange.call->text() : std::string("a send and receive")] {
    if (!call || wire->meet(*call)) wire->move(Channel::data, out, in, what);
  };
  device_->call([progress = progress_.get(), work = std::move(work)] { progress->post(work); }, stream);
}

void MpiCommunicator::take(const Exchange& exchange, std::size_t round, std::uint64_t number, Stream stream) {
  device_->call([progress = progress_.get(), number] { progress->wait(number); }, stream);
  if (exchange.use) return exchange.use(round);
  if (direct_) return;
  for (const Transfer& whole : exchange.in) {
    const Transfer part = in_round(whole, round, piece_);
    copy(part.memory, in_slot(round, part.peer), part.bytes, stream);
  }
}

// ---- collectives ----

void MpiCommunicator::reduce(const Call& call, const View& in, const std::vector<Slab>& slabs, const View& out,
                             Reduction reduction, Stream stream) {
  const Transfer own = part_of(in, slabs[static_cast<std::size_t>(rank_)], rank_);
  Exchange exchange{.call = call};
  for (int step = 1; step < size_; ++step) {
    const int to = (rank_ + step) % size_;
    exchange.out.push_back(part_of(in, slabs[static_cast<std::size_t>(to)], to));
    exchange.in.push_back({to, own.memory, own.bytes});
  }
  exchange.use = [&](std::size_t round) {
    const Transfer part = in_round(own, round, piece_);
    if (part.bytes == 0) return;
    for (int rank = 0; rank < size_ && !direct_; ++rank)
      if (rank != rank_)
        copy(landing(round) + static_cast<std::size_t>(rank) * part.bytes, in_slot(round, rank), part.bytes, stream);
    const auto count = static_cast<std::int64_t>(part.bytes / size_of(out.dtype));
    const View result{out.as<char>() + (part.memory - own.memory), out.dtype, {count}};
    reduction_->launch(landing(round), part.memory, result, reduction, stream);
  };
  move(exchange, stream);
}

/// This rank's slab is in its place.
void MpiCommunicator::gather(const Call& call, const View& out, const std::vector<Slab>& slabs, Stream stream) {
  Exchange exchange{.call = call};
  for (int step = 1; step < size_; ++step) {
    const int peer = (rank_ + step) % size_;
    exchange.out.push_back(part_of(out, slabs[static_cast<std::size_t>(rank_)], peer));
    exchange.in.push_back(part_of(out, slabs[static_cast<std::size_t>(peer)], peer));
  }
  move(exchange, stream);
}

void MpiCommunicator::all_reduce(const View& in_out, Reduction reduction, Stream stream) {
  need_reducible(kWhere, in_out.dtype, reduction);
  if (!begins(stream)) return;
  const Call all = call(Call::Kind::all_reduce, in_out, static_cast<std::uint32_t>(reduction), {}, in_out);
  if (size_ == 1) return;
  const std::vector<Slab> slabs = summed_slabs(in_out.count(), size_);
  const Slab& own = slabs[static_cast<std::size_t>(rank_)];
  reduce(all, in_out, slabs, {at(in_out, own.begin), in_out.dtype, {own.count}}, reduction, stream);
  gather(all, in_out, slabs, stream);
}

void MpiCommunicator::reduce_scatter(const View& in, const View& out, Counts counts, Reduction reduction,
                                     Stream stream) {
  need_reducible(kWhere, in.dtype, reduction);
  const std::vector<Slab> slabs = cut(kWhere, "reduce_scatter", counts, in.count(), size_);
  need_same(kWhere, "reduce_scatter", out, slabs[static_cast<std::size_t>(rank_)].count, in.dtype);
  if (!begins(stream)) return;
  const Call all = call(Call::Kind::reduce_scatter, in, static_cast<std::uint32_t>(reduction), counts, in);
  if (size_ == 1) return copy(out.data, in.data, in.bytes(), stream);
  reduce(all, in, slabs, out, reduction, stream);
}

void MpiCommunicator::all_gather(const View& in, const View& out, Counts counts, Stream stream) {
  const std::vector<Slab> slabs = cut(kWhere, "all_gather", counts, out.count(), size_);
  const Slab& own = slabs[static_cast<std::size_t>(rank_)];
  need_same(kWhere, "all_gather", in, own.count, out.dtype);
  if (!begins(stream)) return;
  const Call all = call(Call::Kind::all_gather, out, 0, counts, out);
  copy(at(out, own.begin), in.data, in.bytes(), stream);
  if (size_ > 1) gather(all, out, slabs, stream);
}

void MpiCommunicator::all_to_all(const View& in, const View& out, Counts counts, Stream stream) {
  const AllToAll slabs(kWhere, in, out, counts, rank_, size_);
  if (!begins(stream)) return;
  // Every rank sends as much as its row says, so `in` has another size on each.
  const View whole{in.data, in.dtype, {counts.empty() ? in.count() : 0}};
  Exchange exchange{.call = call(Call::Kind::all_to_all, whole, 0, counts, in)};
  const Transfer own = part_of(in, slabs.sent(rank_, rank_), rank_);
  copy(part_of(out, slabs.received(rank_), rank_).memory, own.memory, own.bytes, stream);
  if (size_ == 1) return;
  for (int step = 1; step < size_; ++step) {
    const int peer = (rank_ + step) % size_;
    exchange.out.push_back(part_of(in, slabs.sent(rank_, peer), peer));
    exchange.in.push_back(part_of(out, slabs.received(peer), peer));
  }
  move(exchange, stream);
}

void MpiCommunicator::broadcast(const View& in_out, int root, Stream stream) {
  need_root(kWhere, root, size_);
  if (!begins(stream)) return;
  const Slab whole{0, in_out.count()};
  Exchange exchange{.call = call(Call::Kind::broadcast, in_out, static_cast<std::uint32_t>(root), {}, in_out)};
  if (size_ == 1) return;
  if (rank_ != root) exchange.in.push_back(part_of(in_out, whole, root));
  for (int step = 1; rank_ == root && step < size_; ++step)
    exchange.out.push_back(part_of(in_out, whole, (rank_ + step) % size_));
  move(exchange, stream);
}

void MpiCommunicator::send(const View& in, int to, Stream stream) {
  need_peer(kWhere, "send", to, rank_, size_);
  if (begins(stream)) move({.out = {part_of(in, {0, in.count()}, to)}}, stream);
}

void MpiCommunicator::receive(const View& out, int from, Stream stream) {
  need_peer(kWhere, "receive", from, rank_, size_);
  if (begins(stream)) move({.in = {part_of(out, {0, out.count()}, from)}}, stream);
}

// ---- faults ----

std::optional<std::string> MpiCommunicator::error() {
  if (wire_) return wire_->fault();
  return ended_ ? std::optional<std::string>("rank 0 aborted") : std::nullopt;
}

void MpiCommunicator::abort() noexcept {
  ended_ = true;
  if (wire_) wire_->fail("rank " + std::to_string(rank_) + " aborted");
}

}  // namespace quern::mpi
