#include "nccl_communicator.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <string_view>
#include <utility>

#include "quern/error.h"

namespace quern::nccl {

using namespace collectives;

namespace {

constexpr const char* kWhere = "communicator nccl";
constexpr std::uintptr_t kPage = NCCL_WIN_REQUIRED_ALIGNMENT;

Error communication_error(const std::string& what) {
  return Error(ErrorCode::communication, {.where = kWhere, .what = what});
}

/// What NCCL says.
std::string reason(ncclResult_t result) {
  return std::string("NCCL: ") + ncclGetErrorString(result) + ": " + ncclGetLastError(nullptr);
}

/// Of what NCCL sums.
ncclDataType_t type_of(DType dtype) {
  return dtype == DType::f64 ? ncclFloat64 : dtype == DType::bf16 ? ncclBfloat16 : ncclFloat32;
}

cudaStream_t as_stream(Stream stream) { return static_cast<cudaStream_t>(stream.handle); }

char* at(const View& view, std::int64_t element) {
  return view.as<char>() + static_cast<std::size_t>(element) * size_of(view.dtype);
}

std::size_t bytes_of(const Slab& slab, DType dtype) { return static_cast<std::size_t>(slab.count) * size_of(dtype); }

bool equal(const std::vector<Slab>& slabs) {
  return std::all_of(slabs.begin(), slabs.end(), [&](const Slab& slab) { return slab.count == slabs[0].count; });
}

/// Calls that NCCL takes together; the first error of any. Its own broadcast is used nowhere: of memory that sends have
/// used before, one of 2 MiB did not end (NCCL 2.28.9).
template <class Work>
ncclResult_t together(const Work& work) {
  if (const ncclResult_t result = ncclGroupStart(); result != ncclSuccess) return result;
  work();
  return ncclGroupEnd();
}

/// NCCL reads these once a process.
void set_environment(const NcclOptions& options) {
  ::setenv("NCCL_NVLS_ENABLE", "0", 0);
  if (!options.algorithm.empty()) ::setenv("NCCL_ALGO", options.algorithm.c_str(), 1);
  if (!options.protocol.empty()) ::setenv("NCCL_PROTO", options.protocol.c_str(), 1);
}

ncclConfig_t config_of(const NcclOptions& options) {
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  if (options.channels > 0) config.minCTAs = config.maxCTAs = static_cast<int>(options.channels);
  config.CTAPolicy = options.blocks == "none"        ? NCCL_CTA_POLICY_ZERO
                     : options.blocks == "efficient" ? NCCL_CTA_POLICY_EFFICIENCY
                                                     : NCCL_CTA_POLICY_DEFAULT;
  return config;
}

/// What else decides how NCCL sums, of the environment and of the files that NCCL reads variables from.
constexpr const char* kVariables[] = {
    "NCCL_MIN_CTAS",    "NCCL_MIN_NCHANNELS",  "NCCL_MAX_NCHANNELS", "NCCL_NCHANNELS_PER_NET_PEER",
    "NCCL_NVLS_ENABLE", "NCCL_COLLNET_ENABLE", "NCCL_TUNER_PLUGIN",  "NCCL_TUNER_CONFIG_FILE",
    "NCCL_NET",         "NCCL_NET_PLUGIN",     "NCCL_P2P_DISABLE",   "NCCL_SHM_DISABLE",
    "NCCL_GRAPH_FILE",  "NCCL_TOPO_FILE"};

/// FNV-1a of a file's bytes, in hexadecimal; "": there is none.
std::string hash_of(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) return "";
  std::uint64_t hash = 0xcbf29ce484222325u;
  for (char byte; file.get(byte);) hash = (hash ^ static_cast<unsigned char>(byte)) * 0x100000001b3u;
  char text[17];
  std::snprintf(text, sizeof text, "%016llx", static_cast<unsigned long long>(hash));
  return text;
}

std::string also_set() {
  std::string text;
  for (const char* variable : kVariables)
    if (const char* const value = std::getenv(variable)) text += std::string(", ") + variable + "=" + value;
  const char *const home = std::getenv("HOME"), *const own = std::getenv("NCCL_CONF_FILE");
  const std::string files[] = {"/etc/nccl.conf", own ? own : home ? std::string(home) + "/.nccl.conf" : ""};
  for (const std::string& file : files)
    if (const std::string hash = hash_of(file); !hash.empty()) text += ", " + file + " " + hash;
  return text;
}

/// NCCL chooses what nobody has chosen by its version, the machine and sizes alone.
std::string sums_by(const NcclOptions& options) {
  int version = 0;
  ncclGetVersion(&version);
  auto chosen = [](const std::string& option, const char* variable) {
    const char* const set = std::getenv(variable);
    return !option.empty() ? option : set ? std::string(set) : std::string("NCCL's choice");
  };
  const std::string channels = options.channels > 0 ? std::to_string(options.channels) : std::string();
  return "NCCL " + std::to_string(version / 10000) + "." + std::to_string(version / 100 % 100) + "." +
         std::to_string(version % 100) + ", algorithm " + chosen(options.algorithm, "NCCL_ALGO") + ", protocol " +
         chosen(options.protocol, "NCCL_PROTO") + ", channels " + chosen(channels, "NCCL_MAX_CTAS") + also_set();
}

}  // namespace

NcclCommunicator::NcclCommunicator(const NcclOptions& options) : options_(options) {
  traits_.sums_by = sums_by(options);
}

NcclCommunicator::~NcclCommunicator() {
  if (comm_) {
    call("the end", [&] { return ncclCommFinalize(comm_); });
    const ncclComm_t comm = comm_;
    fault() ? ncclCommAbort(comm) : ncclCommDestroy(comm);
  }
  if (staging_) device_->release(MemoryKind::device, staging_);
}

// ---- set-up ----

void NcclCommunicator::connect(const Rendezvous& rendezvous, Device& device) {
  if (device_) fail_internal(kWhere, "connected twice");
  if (device.traits().id != "cuda")
    throw Error(ErrorCode::config, {.where = kWhere,
                                    .what = "nccl needs the cuda device",
                                    .found = device.traits().id,
                                    .expected = "cuda",
                                    .next = "choose another communicator, or [device] id = \"cuda\""});
  if (rendezvous.size > 1 && !rendezvous.exchange)
    throw Error(ErrorCode::config, {.where = kWhere,
                                    .what = "the ranks have no way to exchange NCCL's id",
                                    .found = "a rendezvous without `exchange`",
                                    .expected = "one that quern makes for ranks that it starts",
                                    .next = "start the run by quern, or choose another communicator"});
  device_ = &device;
  rank_ = rendezvous.rank;
  size_ = rendezvous.size;
  exchange_ = rendezvous.exchange;
  if (size_ == 1) return;
  reduction_ = std::make_unique<RankReduction>(kWhere, device, rank_, size_);
  staging_ =
      static_cast<char*>(device.allocate(MemoryKind::device, (static_cast<std::size_t>(size_) + 1) * kPieceBytes));
  set_environment(options_);
  if (constexpr std::string_view kFile = "file:"; rendezvous.address.starts_with(kFile))
    page_ = std::make_unique<FaultPage>(rendezvous.address.substr(kFile.size()) + ".faults", rank_, size_);
  const ncclUniqueId id = agree_on_id();
  ncclConfig_t config = config_of(options_);
  call("connect", [&] {
    ncclComm_t comm = nullptr;
    const ncclResult_t result = ncclCommInitRankConfig(&comm, size_, id, rank_, &config);
    comm_ = comm;
    return result;
  });
  if (auto text = fault()) throw communication_error(*text);
}

/// Rank 0's; all have to have the same NCCL, which does not say so itself.
ncclUniqueId NcclCommunicator::agree_on_id() {
  int version = 0;
  ncclUniqueId id{};
  ncclResult_t result = ncclGetVersion(&version);
  if (result == ncclSuccess && rank_ == 0) result = ncclGetUniqueId(&id);
  if (result != ncclSuccess) throw communication_error("cannot start: " + reason(result));
  const std::string own(reinterpret_cast<const char*>(&version), sizeof version);
  const std::vector<std::string> all = exchange(own + std::string(id.internal, sizeof id.internal));
  for (std::size_t rank = 0; rank < all.size(); ++rank)
    if (all[rank].size() != sizeof version + sizeof id.internal || !all[rank].starts_with(own))
      throw communication_error("rank " + std::to_string(rank) + " has another NCCL than rank " +
                                std::to_string(rank_) + ", " + std::to_string(version));
  std::memcpy(id.internal, all[0].data() + sizeof version, sizeof id.internal);
  return id;
}

std::vector<std::string> NcclCommunicator::exchange(std::string own) {
  if (!device_) fail_internal(kWhere, "used before connect");
  if (auto text = error()) throw communication_error(*text);
  if (size_ == 1) return {std::move(own)};
  try {
    return exchange_(std::move(own));
  } catch (const Error& error) {
    if (error.code() == ErrorCode::communication) fail(error.detail().what);
    throw;
  }
}

bool NcclCommunicator::is_symmetric(void* memory, std::size_t bytes) {
  std::string own;
  try {
    const SharedHandle block = bytes > 0 ? device_->export_memory(memory) : SharedHandle{};
    if (block.descriptor >= 0) {
      ::close(block.descriptor);
      own = block.bytes + std::to_string(bytes);
    }
  } catch (const Error& error) {
    if (error.code() != ErrorCode::resources) throw;  // else it is not shared, and NCCL copies from and to it
  }
  const std::vector<std::string> all = exchange(own);
  return !own.empty() && std::all_of(all.begin(), all.end(), [&](const std::string& other) { return other == own; });
}

void NcclCommunicator::register_buffer(void* memory, std::size_t bytes) {
  const bool symmetric = size_ > 1 && is_symmetric(memory, bytes);
  buffers_.push_back({{static_cast<char*>(memory), bytes}});
  Buffer& buffer = buffers_.back();
  if (symmetric) {
    const std::size_t in_page = reinterpret_cast<std::uintptr_t>(memory) % kPage;
    call("register_buffer", [&] {
      return ncclCommWindowRegister(comm_, buffer.begin - in_page, bytes + in_page, &buffer.window,
                                    NCCL_WIN_COLL_SYMMETRIC);
    });
  } else if (size_ > 1 && bytes > 0) {
    call("register_buffer", [&] {
      ncclCommRegister(comm_, memory, bytes, &buffer.handle);  // what NCCL does not take is used without
      return ncclSuccess;
    });
  }
  if (auto text = fault()) throw communication_error(*text);
}

void NcclCommunicator::unregister_buffer(void* memory) {
  const auto found = std::find_if(buffers_.begin(), buffers_.end(), [&](const Buffer& b) { return b.begin == memory; });
  if (found == buffers_.end()) fail_internal(kWhere, "unregister_buffer of memory that is not registered");
  const Buffer buffer = *found;
  buffers_.erase(found);
  barrier();
  if (buffer.window) call("unregister_buffer", [&] { return ncclCommWindowDeregister(comm_, buffer.window); });
  if (buffer.handle) call("unregister_buffer", [&] { return ncclCommDeregister(comm_, buffer.handle); });
}

void NcclCommunicator::need_registered(const View& view) const {
  if (!device_) fail_internal(kWhere, "used before connect");
  if (view.bytes() > 0) place_of(kWhere, buffers_, view);
}

// ---- enqueueing ----

template <class Work>
void NcclCommunicator::call(const char* what, const Work& work) {
  const std::lock_guard lock(mutex_);
  if (fault()) return;
  if (const ncclResult_t result = work(); result != ncclSuccess) fail(std::string(what) + ": " + reason(result));
}

void NcclCommunicator::copy(const View& out, const View& in, Stream stream) {
  if (out.data != in.data && !fault()) device_->copy(out.data, in.data, in.bytes(), stream);
}

void NcclCommunicator::maximum(const View& in, std::int64_t begin, const View& out, Stream stream) {
  char* result = staging_ + static_cast<std::size_t>(size_ * kPiece) * sizeof(float);
  for (std::int64_t done = 0; done < in.count() && !fault(); done += kPiece) {
    const std::int64_t count = std::min(kPiece, in.count() - done);
    call("maximum", [&] {
      return ncclAllGather(at(in, done), staging_, static_cast<std::size_t>(count), ncclFloat32, comm_,
                           as_stream(stream));
    });
    const std::int64_t first = std::max(done, begin), end = std::min(done + count, begin + out.count());
    if (first >= end) continue;
    reduction_->launch(staging_, nullptr, {result, in.dtype, {count}}, Reduction::maximum, stream);
    device_->copy(at(out, first - begin), result + static_cast<std::size_t>(first - done) * sizeof(float),
                  static_cast<std::size_t>(end - first) * sizeof(float), stream);
  }
}

// ---- collectives ----

void NcclCommunicator::all_reduce(const View& in_out, Reduction reduction, Stream stream) {
  need_reducible(kWhere, in_out.dtype, reduction);
  need_registered(in_out);
  if (size_ == 1 || in_out.count() == 0) return;
  if (reduction == Reduction::maximum) return maximum(in_out, 0, in_out, stream);
  call("all_reduce", [&] {
    return ncclAllReduce(in_out.data, in_out.data, static_cast<std::size_t>(in_out.count()), type_of(in_out.dtype),
                         ncclSum, comm_, as_stream(stream));
  });
}

void NcclCommunicator::reduce_scatter(const View& in, const View& out, Counts counts, Reduction reduction,
                                      Stream stream) {
  need_reducible(kWhere, in.dtype, reduction);
  const std::vector<Slab> slabs = cut(kWhere, "reduce_scatter", counts, in.count(), size_);
  const Slab& own = slabs[static_cast<std::size_t>(rank_)];
  need_same(kWhere, "reduce_scatter", out, own.count, in.dtype);
  need_registered(in);
  if (in.count() == 0) return;
  if (size_ == 1) return copy(out, in, stream);
  if (reduction == Reduction::maximum) return maximum(in, own.begin, out, stream);
  call("reduce_scatter", [&] {
    const ncclDataType_t type = type_of(in.dtype);
    if (equal(slabs))
      return ncclReduceScatter(in.data, out.data, static_cast<std::size_t>(own.count), type, ncclSum, comm_,
                               as_stream(stream));
    return together([&] {
      for (int root = 0; root < size_; ++root)
        if (const Slab& slab = slabs[static_cast<std::size_t>(root)]; slab.count > 0)
          ncclReduce(at(in, slab.begin), root == rank_ ? out.data : nullptr, static_cast<std::size_t>(slab.count), type,
                     ncclSum, root, comm_, as_stream(stream));
    });
  });
}

void NcclCommunicator::all_gather(const View& in, const View& out, Counts counts, Stream stream) {
  const std::vector<Slab> slabs = cut(kWhere, "all_gather", counts, out.count(), size_);
  need_same(kWhere, "all_gather", in, slabs[static_cast<std::size_t>(rank_)].count, out.dtype);
  need_registered(out);
  if (out.count() == 0) return;
  if (size_ == 1) return copy(out, in, stream);
  call("all_gather", [&] {
    if (equal(slabs)) return ncclAllGather(in.data, out.data, in.bytes(), ncclUint8, comm_, as_stream(stream));
    return together([&] {
      for (int peer = 0; peer < size_; ++peer) {
        if (peer == rank_) continue;
        if (in.count() > 0) ncclSend(in.data, in.bytes(), ncclUint8, peer, comm_, as_stream(stream));
        if (const Slab& slab = slabs[static_cast<std::size_t>(peer)]; slab.count > 0)
          ncclRecv(at(out, slab.begin), bytes_of(slab, out.dtype), ncclUint8, peer, comm_, as_stream(stream));
      }
    });
  });
  if (!equal(slabs)) copy({at(out, slabs[static_cast<std::size_t>(rank_)].begin), in.dtype, in.extents}, in, stream);
}

void NcclCommunicator::all_to_all(const View& in, const View& out, Counts counts, Stream stream) {
  const AllToAll slabs(kWhere, in, out, counts, rank_, size_);
  need_registered(in);
  if (size_ == 1) return copy(out, in, stream);
  call("all_to_all", [&] {
    return together([&] {
      for (int peer = 0; peer < size_; ++peer) {
        if (const Slab slab = slabs.sent(rank_, peer); slab.count > 0)
          ncclSend(at(in, slab.begin), bytes_of(slab, in.dtype), ncclUint8, peer, comm_, as_stream(stream));
        if (const Slab slab = slabs.received(peer); slab.count > 0)
          ncclRecv(at(out, slab.begin), bytes_of(slab, out.dtype), ncclUint8, peer, comm_, as_stream(stream));
      }
    });
  });
}

void NcclCommunicator::broadcast(const View& in_out, int root, Stream stream) {
  need_root(kWhere, root, size_);
  need_registered(in_out);
  if (size_ == 1 || in_out.count() == 0) return;
  call("broadcast", [&] {
    return together([&] {
      auto send = [&](int to) { ncclSend(in_out.data, in_out.bytes(), ncclUint8, to, comm_, as_stream(stream)); };
      for (int peer = 0; rank_ == root && peer < size_; ++peer)
        if (peer != root) send(peer);
      if (rank_ != root) ncclRecv(in_out.data, in_out.bytes(), ncclUint8, root, comm_, as_stream(stream));
    });
  });
}

void NcclCommunicator::send(const View& in, int to, Stream stream) {
  need_peer(kWhere, "send", to, rank_, size_);
  if (in.count() == 0) return;
  call("send", [&] { return ncclSend(in.data, in.bytes(), ncclUint8, to, comm_, as_stream(stream)); });
}

void NcclCommunicator::receive(const View& out, int from, Stream stream) {
  need_peer(kWhere, "receive", from, rank_, size_);
  if (out.count() == 0) return;
  call("receive", [&] { return ncclRecv(out.data, out.bytes(), ncclUint8, from, comm_, as_stream(stream)); });
}

// ---- faults ----

std::optional<std::string> NcclCommunicator::fault() {
  const std::lock_guard lock(fault_mutex_);
  if (!fault_ && page_) fault_ = page_->told();
  return fault_;
}

void NcclCommunicator::fail(const std::string& text) noexcept {
  const std::lock_guard lock(fault_mutex_);
  if (fault_) return;
  fault_ = text;
  if (page_) page_->tell(text);
}

std::optional<std::string> NcclCommunicator::error() {
  if (std::unique_lock lock(mutex_, std::try_to_lock); lock && comm_ && !fault()) {
    ncclResult_t result = ncclSuccess;
    if (ncclCommGetAsyncError(comm_, &result) == ncclSuccess && result != ncclSuccess) fail(reason(result));
  }
  return fault();
}

void NcclCommunicator::abort() noexcept {
  fail("rank " + std::to_string(rank_) + " ended it");
  // A call that is stuck behind the stream holds it, and goes on once NCCL's kernels have ended.
  const std::unique_lock lock(mutex_, std::chrono::seconds(1));
  if (const ncclComm_t comm = comm_.exchange(nullptr)) ncclCommAbort(comm);
}

}  // namespace quern::nccl
