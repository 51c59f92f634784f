// How the host reads and writes an engine's tensors, wherever they are: on the device, in a store, or split over ranks.

#include <algorithm>
#include <optional>
#include <string>
#include <vector>

#include "engine/engine.h"
#include "engine/host_tensor.h"
#include "engine/progress.h"
#include "quern/error.h"

namespace quern {

namespace {

/// `count` elements from `first` on, at `place`.
Place part_of(Place place, DType dtype, std::int64_t first, std::int64_t count) {
  const auto size = static_cast<std::int64_t>(size_of(dtype));
  place.offset += first * size;
  place.bytes = count * size;
  return place;
}

}  // namespace

void Engine::put(const Place& stored, const std::byte* from, Stream stream) {
  const auto store = static_cast<std::size_t>(stored.index);
  stores_[store]->put(store_slots_[store], static_cast<std::size_t>(stored.offset), from,
                      static_cast<std::size_t>(stored.bytes), stream);
}

void Engine::get(const Place& stored, std::byte* to, Stream stream) {
  const auto store = static_cast<std::size_t>(stored.index);
  stores_[store]->get(store_slots_[store], static_cast<std::size_t>(stored.offset), to,
                      static_cast<std::size_t>(stored.bytes), stream);
}

// What has no address passes through the arena's slots, which nothing uses between runs.
void Engine::move(const Place& place, std::byte* to, const std::byte* from) {
  if (!plan_.schedules.has_slot(place))
    return device_.copy(to ? to : address(place), to ? address(place) : from, static_cast<std::size_t>(place.bytes),
                        compute_);
  if (place.space == Space::ranks) fail_internal("engine", "ranks have only parts of the tensor");
  std::byte* passage = arena_ + plan_.ring.offset;
  const std::int64_t most = plan_.ring.bytes;
  if (most == 0) fail_internal("engine", "no slot to move what a store has");
  synchronize();
  for (std::int64_t done = 0; done < place.bytes; done += most) {
    const Place piece{place.space, place.index, place.offset + done, std::min(most, place.bytes - done)};
    if (to) get(piece, passage, compute_);
    device_.copy(to ? to + done : passage, to ? passage : from + done, static_cast<std::size_t>(piece.bytes), compute_);
    if (!to) put(piece, passage, compute_);
  }
  device_.synchronize(compute_);
}

void Engine::check_stores() const {
  for (OffloadStore* store : stores_)
    if (const std::optional<std::string> fault = store->error())
      throw Error(ErrorCode::resources,
                  {.where = "offload " + store->traits().id,
                   .what = *fault,
                   .next = "the same command continues from the newest checkpoint, or begins again without one"});
}

// What an update changes is as it is only behind it.
void Engine::need_applied(const PlannedTensor& tensor) {
  const bool updated = tensor.owner == TensorOwner::master || tensor.owner == TensorOwner::optimizer;
  if (tensor.owner == TensorOwner::working || (updated && plan_.defers_update())) need_applied();
}

void Engine::write(const PlannedTensor& tensor, std::int64_t first, std::int64_t count, const void* host) {
  need_applied(tensor);
  const std::int64_t begin = std::max(first, tensor.first);
  const std::int64_t end = std::min(first + count, tensor.first + element_count(tensor.extents));
  if (begin >= end) return;
  move(part_of(tensor.place(), tensor.dtype, begin - tensor.first, end - begin), nullptr,
       static_cast<const std::byte*>(host) + static_cast<std::size_t>(begin - first) * size_of(tensor.dtype));
  device_.synchronize(compute_);
  check_stores();
}

void Engine::enqueue_read(const PlannedTensor& tensor, std::int64_t first, std::int64_t count, std::byte* host) {
  need_applied(tensor);
  if (!tensor.whole.empty()) return read_shards(tensor, first, count, host);
  if (host) move(part_of(tensor.place(), tensor.dtype, first, count), host, nullptr);
}

void Engine::read(const PlannedTensor& tensor, std::int64_t first, std::int64_t count, void* host) {
  enqueue_read(tensor, first, count, static_cast<std::byte*>(host));
  device_.synchronize(compute_);
  check_stores();
}

void Engine::read_part(const StatePart& part, void* host) {
  need_applied(part.tensor);
  const std::int64_t count = element_count(part.extents);
  if (count > 0)
    move(part_of(part.tensor.place(), part.tensor.dtype, part.first, count), static_cast<std::byte*>(host), nullptr);
  device_.synchronize(compute_);
  check_stores();
}

void* Engine::device_address(const PlannedTensor& tensor) {
  need_applied(tensor);
  synchronize();
  const Place place = tensor.place();
  return place.space == Space::device ? address(place) : nullptr;
}

// Piece by piece into the memory of transient values, of which there are none between runs.
void Engine::read_shards(const PlannedTensor& tensor, std::int64_t first, std::int64_t count, std::byte* host) {
  const std::shared_ptr<void> announced = notice_ ? notice_(tensor, first, count) : nullptr;
  const ParameterPlan& parameter = plan_.parameter(tensor.parameter);
  const auto size = static_cast<std::int64_t>(size_of(tensor.dtype));
  const std::int64_t most = plan_.passage_bytes / size;
  if (most == 0) fail_internal("engine", "no memory through which ranks could read");
  const int ranks = plan_.options.state.ranks;
  std::vector<std::int64_t> counts(static_cast<std::size_t>(ranks));
  const Stream stream = this->stream(Lane::communication);
  synchronize();
  for (std::int64_t begin = first; begin < first + count; begin += most) {
    const std::int64_t end = std::min(begin + most, first + count);
    Place place;  // of this rank's part
    std::int64_t before = 0;
    for (int rank = 0; rank < ranks; ++rank) {
      const Shard shard = shard_of_rows(tensor.whole, parameter.bounds, rank);
      const std::int64_t from = std::clamp(shard.first, begin, end);
      const std::int64_t to = std::clamp(shard.first + element_count(shard.extents), begin, end);
      counts[static_cast<std::size_t>(rank)] = to - from;
      if (rank < plan_.options.state.rank) before += to - from;
      if (rank == plan_.options.state.rank)
        place = part_of(tensor.place(), tensor.dtype, from - shard.first, to - from);
    }
    const View whole{arena_ + plan_.transient_offset, tensor.dtype, {end - begin}};
    View own{whole.as<std::byte>() + before * size, tensor.dtype, {place.bytes / size}};
    if (place.bytes > 0 && plan_.schedules.has_slot(place))
      get(place, own.as<std::byte>(), stream);
    else if (place.bytes > 0)
      device_.copy(own.data, address(place), static_cast<std::size_t>(place.bytes), stream);
    if (progress_) progress_->begin_read(stream), progress_->enter(0, stream);
    communicator_->all_gather(own, whole, counts, stream);
    if (progress_) progress_->leave(0, stream);
    if (host) device_.copy(host + (begin - first) * size, whole.data, whole.bytes(), stream);
    device_.synchronize(stream);
  }
}

void Engine::read(const std::vector<PlannedTensor>& tensors, std::byte* host) {
  for (const PlannedTensor& tensor : tensors) {
    enqueue_read(tensor, 0, element_count(tensor.whole_extents()), host);
    host += byte_count(tensor.whole_extents(), tensor.dtype);
  }
  device_.synchronize(compute_);
  check_stores();
}

std::vector<float> Engine::read_floats(const PlannedTensor& tensor) {
  std::vector<float> values(static_cast<std::size_t>(element_count(tensor.extents)));
  if (tensor.dtype == DType::f32) {
    read(tensor, values.data());
    return values;
  }
  std::vector<std::byte> stored(static_cast<std::size_t>(tensor.bytes()));
  read(tensor, stored.data());
  decode(stored.data(), tensor.dtype, values);
  return values;
}

}  // namespace quern
