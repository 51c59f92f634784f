#include "disk_store.h"

#include <algorithm>
#include <array>
#include <filesystem>

#include "quern/error.h"

namespace quern::disk {

namespace {

constexpr std::size_t kChunk = std::size_t{4} << 20;
/// Chunks of one direction under way at a time: one is copied while others are read or written.
constexpr std::size_t kBuffers = 4;
/// A chunk that begins anywhere in a block, in whole blocks.
constexpr std::size_t kBufferBytes = kChunk + kBlock;

}  // namespace

struct DiskStore::Staging {
  explicit Staging(Device& owner)
      : device(owner),
        memory(static_cast<std::byte*>(device.allocate(MemoryKind::pinned, 2 * kBuffers * kBufferBytes + kBlock))) {
    const std::size_t shift = (kBlock - reinterpret_cast<std::uintptr_t>(memory) % kBlock) % kBlock;
    for (std::size_t i = 0; i < kBuffers; ++i) {
      reads[i].memory = memory + shift + i * kBufferBytes;
      writes[i].memory = memory + shift + (kBuffers + i) * kBufferBytes;
    }
  }
  ~Staging() { device.release(MemoryKind::pinned, memory); }
  Staging(const Staging&) = delete;
  Staging& operator=(const Staging&) = delete;

  struct Buffer {
    std::byte* memory = nullptr;
    TransferQueue::Ticket ticket = 0;  // that uses it
  };
  Device& device;
  std::byte* memory;
  std::array<Buffer, kBuffers> reads, writes;
  std::size_t next_write = 0;
};

DiskStore::DiskStore(const DiskOptions& options) : options_(options) {
  // No capacity: a plan is the same on all machines, memory.disk_budget limits it, and a disk that has less refuses it.
  traits_ = {.id = "disk", .put_rate = options.write_rate * 1e9, .get_rate = options.read_rate * 1e9};
}

DiskStore::~DiskStore() {
  for (const auto& [stream, staging] : staging_) device_->synchronize(Stream{stream});
  queue_.reset();
}

void DiskStore::open(Device& device, const StorePlace& place) {
  device_ = &device;
  std::string folder = !options_.folder.empty() ? options_.folder : place.folder;
  if (folder.empty())
    throw Error(ErrorCode::config, {.where = "memory.disk.folder",
                                    .what = "the run has no folder for the store's file",
                                    .found = "nothing",
                                    .expected = "a folder",
                                    .next = "set it, or log.directory"});
  file_ = std::make_unique<DiskFile>(std::move(folder));
  queue_ = std::make_unique<TransferQueue>(*file_, static_cast<int>(options_.threads));
  for (StreamKind kind : {StreamKind::copy_in, StreamKind::copy_out}) staging_of(device.stream(kind));
}

OffloadSlot DiskStore::reserve(std::size_t bytes) {
  slots_.push_back(file_->add(bytes / kBlock + (bytes % kBlock != 0)) * kBlock);
  return static_cast<OffloadSlot>(slots_.size() - 1);
}

DiskStore::Staging& DiskStore::staging_of(Stream stream) {
  std::unique_ptr<Staging>& staging = staging_[stream.handle];
  if (!staging) staging = std::make_unique<Staging>(*device_);
  return *staging;
}

std::vector<Transfer> DiskStore::chunks_of(OffloadSlot slot, std::size_t offset, std::size_t bytes) const {
  std::vector<Transfer> chunks;
  const std::size_t begin = slots_[static_cast<std::size_t>(slot)] + offset;
  for (std::size_t done = 0; done < bytes; done += chunks.back().bytes)
    chunks.push_back({.begin = begin + done, .bytes = std::min(kChunk, bytes - done)});
  return chunks;
}

void DiskStore::put(OffloadSlot slot, std::size_t offset, const void* device_memory, std::size_t bytes, Stream stream) {
  Staging& staging = staging_of(stream);
  const std::byte* from = static_cast<const std::byte*>(device_memory);
  for (Transfer& chunk : chunks_of(slot, offset, bytes)) {
    Staging::Buffer& buffer = staging.writes[staging.next_write++ % kBuffers];
    chunk.write = true;
    chunk.memory = buffer.memory;
    device_->call([this, &buffer] { queue_->wait(buffer.ticket); }, stream);
    device_->copy(buffer.memory + chunk.begin % kBlock, from, chunk.bytes, stream);
    device_->call([this, &buffer, chunk] { buffer.ticket = queue_->add(chunk); }, stream);
    from += chunk.bytes;
  }
}

void DiskStore::get(OffloadSlot slot, std::size_t offset, void* device_memory, std::size_t bytes, Stream stream) {
  Staging& staging = staging_of(stream);
  std::vector<Transfer> chunks = chunks_of(slot, offset, bytes);
  auto buffer_of = [&](std::size_t i) -> Staging::Buffer& { return staging.reads[i % kBuffers]; };
  for (std::size_t i = 0; i < chunks.size(); ++i) chunks[i].memory = buffer_of(i).memory;
  auto read = [&](std::size_t i) {
    return [this, &buffer = buffer_of(i), chunk = chunks[i]] { buffer.ticket = queue_->add(chunk); };
  };
  std::byte* to = static_cast<std::byte*>(device_memory);
  for (std::size_t i = 0; i < std::min(kBuffers, chunks.size()); ++i) device_->call(read(i), stream);
  for (std::size_t i = 0; i < chunks.size(); ++i) {
    Staging::Buffer& buffer = buffer_of(i);
    device_->call([this, &buffer] { queue_->wait(buffer.ticket); }, stream);
    device_->copy(to, buffer.memory + chunks[i].begin % kBlock, chunks[i].bytes, stream);
    if (i + kBuffers < chunks.size()) device_->call(read(i + kBuffers), stream);
    to += chunks[i].bytes;
  }
}

void* DiskStore::map(OffloadSlot) {
  fail_internal("offload disk", "map was asked for, but traits().mappable is false");
}

void DiskStore::flush() {
  for (const auto& [stream, staging] : staging_) device_->synchronize(Stream{stream});
  queue_->wait_for_all();
}

std::optional<std::string> DiskStore::error() { return queue_ ? queue_->error() : std::nullopt; }

}  // namespace quern::disk
