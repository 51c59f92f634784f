// An offload store in plain host memory that finds out when its memory changes by itself: each page has a checksum,
// which puts renew and gets compare. A device's own memory has such a check where it has ECC; host memory of desktop
// machines often has none.
//
// Puts and gets are three things in stream order: a copy between device and a buffer, or the other way round, and work
// of the host on the slot (Device::call), which may run long after the call that enqueued it has returned.
#include <algorithm>
#include <atomic>
#include <cstring>
#include <mutex>

#include "quern/error.h"
#include "quern/plugin.h"

namespace {

using namespace quern;

constexpr std::size_t kPage = 4096;

struct Options {
  std::int64_t limit_mib = 1 << 20;
};

OptionTable<Options> options() {
  OptionTable<Options> t;
  t.add("limit_mib", &Options::limit_mib, "memory of all slots, in MiB").at_least(1).at_most(1 << 30);
  return t;
}

/// FNV-1a, of 64-bit words and the bytes behind them.
std::uint64_t checksum(const std::byte* bytes, std::size_t count) {
  std::uint64_t hash = 0xcbf29ce484222325u;
  auto take = [&](std::uint64_t word) { hash = (hash ^ word) * 0x100000001b3u; };
  for (; count >= 8; bytes += 8, count -= 8) {
    std::uint64_t word = 0;
    std::memcpy(&word, bytes, 8);
    take(word);
  }
  for (; count > 0; ++bytes, --count) take(static_cast<std::uint64_t>(*bytes));
  return hash;
}

struct Slot {
  std::mutex lock;  // streams may put and get parts that share a page
  std::vector<std::byte> memory;
  std::vector<std::uint64_t> sums;  // of pages

  std::size_t page_bytes(std::size_t page) const { return std::min(kPage, memory.size() - page * kPage); }
  std::uint64_t sum_of(std::size_t page) const { return checksum(memory.data() + page * kPage, page_bytes(page)); }
};

class CheckedMemory final : public OffloadStore {
 public:
  explicit CheckedMemory(const Options& options) : limit_(static_cast<std::size_t>(options.limit_mib) << 20) {}
  ~CheckedMemory() override {
    if (device_) wait();
    for (auto& [buffer, bytes] : buffers_) device_->release(MemoryKind::pinned, buffer);
  }

  const OffloadTraits& traits() const override { return traits_; }

  void open(Device& device, const StorePlace&) override {
    device_ = &device;
    traits_.put_rate = traits_.get_rate = device.traits().host_rate;
  }

  OffloadSlot reserve(std::size_t bytes) override {
    if (bytes > limit_ - used_)
      throw Error(ErrorCode::resources, {.where = "offload checked_memory",
                                         .what = "slots need more memory than its limit",
                                         .found = std::to_string(bytes) + " bytes more",
                                         .expected = std::to_string(limit_ - used_) + " at most",
                                         .next = "raise memory.checked_memory.limit_mib"});
    auto slot = std::make_unique<Slot>();
    slot->memory.resize(bytes);  // zero
    for (std::size_t page = 0; page * kPage < bytes; ++page) slot->sums.push_back(slot->sum_of(page));
    used_ += bytes;
    slots_.push_back(std::move(slot));
    return static_cast<OffloadSlot>(slots_.size() - 1);
  }

  void put(OffloadSlot slot, std::size_t offset, const void* device_memory, std::size_t bytes, Stream stream) override {
    void* buffer = buffer_of(bytes);
    device_->copy(buffer, device_memory, bytes, stream);
    device_->call([this, slot, offset, bytes, buffer] { write(slot, offset, buffer, bytes); }, stream);
    note(stream);
  }

  void get(OffloadSlot slot, std::size_t offset, void* device_memory, std::size_t bytes, Stream stream) override {
    void* buffer = buffer_of(bytes);
    device_->call([this, slot, offset, bytes, buffer] { read(slot, offset, buffer, bytes); }, stream);
    device_->copy(device_memory, buffer, bytes, stream);
    note(stream);
  }

  void prefetch(OffloadSlot, std::size_t, std::size_t) override {}
  void* map(OffloadSlot) override { fail_internal("offload checked_memory", "its slots are not mappable"); }
  void flush() override { wait(); }

  std::optional<std::string> error() override {
    const std::lock_guard lock(fault_lock_);
    return fault_;
  }

 private:
  /// One for each call that is under way: streams run beside each other. Buffers are used again once nothing is.
  void* buffer_of(std::size_t bytes) {
    if (next_ == buffers_.size() && next_ >= kMostBuffers) wait();
    if (next_ == buffers_.size()) buffers_.emplace_back(nullptr, 0);
    auto& [buffer, size] = buffers_[next_++];
    if (size < bytes) {
      if (buffer) device_->release(MemoryKind::pinned, buffer);
      buffer = nullptr, size = 0;
      buffer = device_->allocate(MemoryKind::pinned, bytes);
      size = bytes;
    }
    return buffer;
  }

  void note(Stream stream) {
    const bool known =
        std::any_of(streams_.begin(), streams_.end(), [&](Stream s) { return s.handle == stream.handle; });
    if (!known) streams_.push_back(stream);
  }

  /// All that was enqueued is done then.
  void wait() {
    for (Stream stream : streams_) device_->synchronize(stream);
    next_ = 0;
  }

  // ---- on a stream's thread ----

  void write(OffloadSlot slot, std::size_t offset, const void* from, std::size_t bytes) {
    Slot& to = *slots_[static_cast<std::size_t>(slot)];
    if (bytes == 0) return;
    const std::lock_guard lock(to.lock);
    std::memcpy(to.memory.data() + offset, from, bytes);
    for (std::size_t page = offset / kPage; page <= (offset + bytes - 1) / kPage; ++page)
      to.sums[page] = to.sum_of(page);
  }

  void read(OffloadSlot slot, std::size_t offset, void* to, std::size_t bytes) {
    Slot& from = *slots_[static_cast<std::size_t>(slot)];
    if (bytes == 0) return;
    const std::lock_guard lock(from.lock);
    std::memcpy(to, from.memory.data() + offset, bytes);
    for (std::size_t page = offset / kPage; page <= (offset + bytes - 1) / kPage; ++page) {
      if (from.sums[page] == from.sum_of(page)) continue;
      const std::lock_guard fault(fault_lock_);
      if (!fault_) fault_ = "page " + std::to_string(page) + " of slot " + std::to_string(slot) + " changed by itself";
    }
  }

  static constexpr std::size_t kMostBuffers = 64;
  std::size_t limit_, used_ = 0, next_ = 0;
  Device* device_ = nullptr;
  OffloadTraits traits_{.id = "checked_memory", .in_host_memory = true};
  std::vector<std::unique_ptr<Slot>> slots_;
  std::vector<std::pair<void*, std::size_t>> buffers_;
  std::vector<Stream> streams_;
  std::mutex fault_lock_;
  std::optional<std::string> fault_;
};

}  // namespace

QUERN_PLUGIN("offload", "checked_memory", manifest) {
  manifest.version = "0.1.0";
  manifest.licence = "Apache-2.0";
  manifest.add<OffloadStore>(
      "checked_memory", "host memory whose pages have checksums", options().specs(),
      [](const OptionValues& values) { return std::make_unique<CheckedMemory>(options().bind(values)); });
}
