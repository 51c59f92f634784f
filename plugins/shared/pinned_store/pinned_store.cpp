#include "shared/pinned_store/pinned_store.h"

#include <algorithm>
#include <utility>

#include "quern/error.h"

namespace quern {

PinnedStore::PinnedStore(OffloadTraits traits, MemoryKind memory) : traits_(std::move(traits)), memory_(memory) {}

void PinnedStore::open(Device& device, const StorePlace&) {
  device_ = &device;
  traits_.put_rate = traits_.get_rate = device.traits().host_rate;
}

OffloadSlot PinnedStore::reserve(std::size_t bytes) {
  slots_.emplace_back(*device_, traits_.id, memory_, bytes);
  return static_cast<OffloadSlot>(slots_.size() - 1);
}

void PinnedStore::put(OffloadSlot slot, std::size_t offset, const void* device_memory, std::size_t bytes,
                      Stream stream) {
  device_->copy(at(slot, offset), device_memory, bytes, stream);
  const bool known =
      std::any_of(putting_.begin(), putting_.end(), [&](Stream other) { return other.handle == stream.handle; });
  if (!known) putting_.push_back(stream);
}

void PinnedStore::get(OffloadSlot slot, std::size_t offset, void* device_memory, std::size_t bytes, Stream stream) {
  device_->copy(device_memory, at(slot, offset), bytes, stream);
}

void* PinnedStore::map(OffloadSlot slot) {
  if (!traits_.mappable) fail_internal("offload " + traits_.id, "map was asked for, but traits().mappable is false");
  return at(slot, 0);
}

void PinnedStore::flush() {
  for (Stream stream : putting_) device_->synchronize(stream);
}

}  // namespace quern
