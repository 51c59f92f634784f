// Of offload stores: stored bytes are got back, at any offset and size, from any slot, and are there after flush.
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <mutex>

#include "conformance/contracts.h"
#include "conformance/harness/late_work.h"
#include "conformance/store/opened_store.h"
#include "quern/testkit/forwarding_device.h"

namespace quern::conformance {

namespace {

using testkit::DeviceMemory;
using Bytes = OpenedStore::Bytes;

constexpr std::size_t kSizes[] = {1, 7, 4096, 100003};

std::string round_trips(const Subject& subject) {
  OpenedStore opened(subject);
  need(opened.store->traits().id == subject.factory.id, "traits().id", opened.store->traits().id, subject.factory.id);
  std::vector<OffloadSlot> slots;
  for (std::size_t size : kSizes) slots.push_back(opened.store->reserve(size));
  for (std::size_t i = 0; i < slots.size(); ++i)
    need_same("a slot of " + std::to_string(kSizes[i]) + " bytes before the first put",
              opened.get(slots[i], 0, kSizes[i]), Bytes(kSizes[i], 0));
  for (std::size_t i = 0; i < slots.size(); ++i)
    opened.put(slots[i], 0, pattern(kSizes[i], static_cast<unsigned>(i) + 1));
  for (std::size_t i = slots.size(); i-- > 0;)
    need_same("a slot of " + std::to_string(kSizes[i]) + " bytes", opened.get(slots[i], 0, kSizes[i]),
              pattern(kSizes[i], static_cast<unsigned>(i) + 1));
  opened.need_no_fault();
  return std::to_string(slots.size()) + " slots";
}

std::string parts(const Subject& subject) {
  OpenedStore opened(subject);
  const OffloadSlot slot = opened.store->reserve(100003);
  Bytes want = pattern(100003, 1);
  opened.put(slot, 0, want);
  for (auto [offset, count] : {std::pair<std::size_t, std::size_t>{1, 3}, {4095, 2}, {99990, 13}, {777, 50001}}) {
    const Bytes part = pattern(count, static_cast<unsigned>(offset));
    opened.put(slot, offset, part);
    std::memcpy(want.data() + offset, part.data(), count);
    need_same("a part at " + std::to_string(offset), opened.get(slot, offset, count), part);
  }
  need_same("the slot after puts of parts", opened.get(slot, 0, want.size()), want);
  opened.store->flush();
  need_same("the slot after flush", opened.get(slot, 0, want.size()), want);
  opened.need_no_fault();
  return "";
}

// Work that is late on one stream, and a get on another that waits for an event behind the put: as the step's lanes do.
std::string streams(const Subject& subject) {
  OpenedStore opened(subject);
  Device& device = *opened.device;
  constexpr std::size_t kBytes = (std::size_t{9} << 20) + 13, kOffset = 5;
  const OffloadSlot slot = opened.store->reserve(kOffset + kBytes + 7);
  const Stream out = device.stream(StreamKind::copy_out), in = device.stream(StreamKind::copy_in);
  const Event written = device.make_event(), taken = device.make_event();
  DeviceMemory from(device, kBytes), to(device, kBytes);
  for (unsigned round = 0; round < 3; ++round) {
    const Bytes want = pattern(kBytes, round + 1);
    DeviceMemory source(device, kBytes);
    source.write(want.data());
    LateWork late(device, out);
    device.copy(from.data(), source.data(), kBytes, out);
    opened.store->put(slot, kOffset, from.data(), kBytes, out);
    device.fill(from.data(), 0xee, kBytes, out);  // the memory is the caller's again behind the put
    device.record(written, out);
    device.wait(in, written);
    opened.store->prefetch(slot, kOffset, kBytes);
    opened.store->get(slot, kOffset, to.data(), kBytes, in);
    device.record(taken, in);
    device.wait(out, taken);
    late.end();
    device.synchronize(in);
    Bytes got(kBytes);
    to.read(got.data());
    need_same("a get behind a late put on another stream", got, want);
    device.synchronize(out);
  }
  if (std::string touched = to.touched(); !touched.empty())
    broken("gets on another stream", "bytes written " + touched + " the buffer", "none");
  need_same("bytes beside it", opened.get(slot, kOffset + kBytes, 7), Bytes(7, 0));
  opened.need_no_fault();
  return "9 MiB, 3 rounds";
}

/// A put that is enqueued, and late, is in the store when flush returns: another store's reader may look then.
std::string flushes(const Subject& subject) {
  OpenedStore opened(subject);
  Device& device = *opened.device;
  const OffloadSlot slot = opened.store->reserve(70001);
  opened.store->flush();  // before any put, and twice
  opened.store->flush();
  for (const StreamKind kind : {StreamKind::copy_out, StreamKind::compute}) {
    const Stream out = device.stream(kind);
    const Bytes want = pattern(70001, static_cast<unsigned>(kind) + 1);
    DeviceMemory from(device, want.size()), to(device, want.size());
    from.write(want.data());
    LateWork late(device, out);
    opened.store->put(slot, 0, from.data(), want.size(), out);
    late.during([&] { opened.store->flush(); });
    const Stream in = device.stream(StreamKind::copy_in);
    opened.store->get(slot, 0, to.data(), want.size(), in);
    device.synchronize(in);
    Bytes got(want.size());
    to.read(got.data());
    late.end();
    device.synchronize(out);
    need_same("a get on another stream behind flush", got, want);
  }
  opened.need_no_fault();
  return "with puts pending on two streams";
}

/// What enqueues work goes on while a stream is late: a call that waits for the stream stops all others too.
std::string does_not_wait(const Subject& subject) {
  constexpr int kCalls = 4;
  OpenedStore opened(subject);
  Device& device = *opened.device;
  const OffloadSlot slot = opened.store->reserve(kCalls * 3001 + 1);
  DeviceMemory memory(device, kCalls * 3001 + 1);
  const Stream other = device.stream(StreamKind::copy_in);
  auto calls = [&] {
    for (std::size_t i = 0; i < kCalls; ++i) {
      auto* at = static_cast<std::byte*>(memory.data()) + i * 3001;
      opened.store->put(slot, i * 3001, at, 3001, opened.stream);
      opened.store->get(slot, i * 3001, at, 3001, opened.stream);
    }
  };
  calls();  // the first ones may make what they need
  device.synchronize(opened.stream);
  opened.store->flush();
  const auto begin = std::chrono::steady_clock::now();
  calls();
  const std::chrono::duration<double> alone = std::chrono::steady_clock::now() - begin;
  device.synchronize(opened.stream);
  // A call that waits for the stream outlasts any limit. A slow call, or one on a busy machine, takes at most a few
  // times what it takes without late work.
  bool waited = true;
  for (int attempt = 0; waited && attempt < 2; ++attempt) {
    LateWork late(device, opened.stream, 1 + 5 * alone.count());
    calls();
    opened.store->put(slot, kCalls * 3001, static_cast<std::byte*>(memory.data()) + kCalls * 3001, 1, other);
    waited = late.gave_up();
    late.end();
    for (Stream stream : {opened.stream, other}) device.synchronize(stream);
  }
  need(!waited, std::to_string(2 * kCalls + 1) + " calls behind work that is late", "they returned after it",
       "calls that enqueue, and do not wait for the stream");
  opened.need_no_fault();
  return std::to_string(2 * kCalls + 1) + " calls";
}

/// Streams put into and get from neighbouring parts of a slot at once, many times.
std::string neighbours(const Subject& subject) {
  OpenedStore opened(subject);
  Device& device = *opened.device;
  constexpr std::size_t kPart = 5001;
  const OffloadSlot slot = opened.store->reserve(2 * kPart);
  const Bytes first = pattern(kPart, 1), second = pattern(kPart, 2);
  opened.put(slot, 0, first);
  const Stream out = device.stream(StreamKind::copy_out), in = device.stream(StreamKind::copy_in);
  DeviceMemory from(device, kPart), to(device, kPart);
  from.write(second.data());
  for (int i = 0; i < 200; ++i) {
    opened.store->put(slot, kPart, from.data(), kPart, out);
    opened.store->get(slot, 0, to.data(), kPart, in);
  }
  for (Stream stream : {out, in}) device.synchronize(stream);
  Bytes got(kPart);
  to.read(got.data());
  need_same("the first half, got while the second was put", got, first);
  need_same("the first half, after the second was put", opened.get(slot, 0, kPart), first);
  need_same("the second half", opened.get(slot, kPart, kPart), second);
  opened.need_no_fault();
  return "200 rounds";
}

/// A device of which two streams go in step: behind each copy on one of them it waits, for some time, until as many
/// copies are done on the other.
class InStep final : public testkit::ForwardingDevice {
 public:
  using ForwardingDevice::ForwardingDevice;
  void copy(void* to, const void* from, std::size_t bytes, Stream stream) override {
    ForwardingDevice::copy(to, from, bytes, stream);
    const std::size_t own = stream.handle == lanes_[1].handle;
    if (!in_step_ || (own == 0 && stream.handle != lanes_[0].handle)) return;
    auto meet = [shared = shared_, own] {
      std::unique_lock guard(shared->lock);
      const int count = ++shared->done[own];
      shared->copied.notify_all();
      shared->copied.wait_for(guard, std::chrono::milliseconds(250), [&] { return shared->done[1 - own] >= count; });
    };
    call(meet, stream);
  }
  /// From now on.
  void keep_in_step(Stream first, Stream second) { lanes_[0] = first, lanes_[1] = second, in_step_ = true; }

 private:
  bool in_step_ = false;
  Stream lanes_[2] = {};
  struct Shared {  // with the streams, which may outlive the device
    std::mutex lock;
    std::condition_variable copied;
    int done[2] = {0, 0};
  };
  std::shared_ptr<Shared> shared_ = std::make_shared<Shared>();
};

/// Two streams that put and get in slots of their own, both at work all the time.
std::string at_once(const Subject& subject) {
  constexpr std::size_t kBytes = (std::size_t{2} << 20) + 5;
  constexpr unsigned kRounds = 4;
  auto in_step = std::make_unique<InStep>(open_device(subject.host, subject.options));
  InStep& device = *in_step;
  OpenedStore opened(subject, std::move(in_step));
  struct Lane {
    Stream stream;
    OffloadSlot slot;
    DeviceMemory from, to;
    Lane(Device& on, OffloadStore& store, StreamKind kind)
        : stream(on.stream(kind)), slot(store.reserve(kBytes)), from(on, kBytes), to(on, kBytes) {}
  };
  Lane first(device, *opened.store, StreamKind::copy_out), second(device, *opened.store, StreamKind::copy_in);
  for (unsigned round = 0; round < kRounds; ++round) {
    const Bytes want[] = {pattern(kBytes, 2 * round + 1), pattern(kBytes, 2 * round + 2)};
    first.from.write(want[0].data());
    second.from.write(want[1].data());
    device.keep_in_step(first.stream, second.stream);
    for (Lane* lane : {&first, &second}) {
      opened.store->put(lane->slot, 0, lane->from.data(), kBytes, lane->stream);
      opened.store->get(lane->slot, 0, lane->to.data(), kBytes, lane->stream);
    }
    for (const Lane* lane : {&first, &second}) device.synchronize(lane->stream);
    for (const Lane* lane : {&first, &second}) {
      Bytes got(kBytes);
      lane->to.read(got.data());
      need_same("a put and a get beside another stream's", got, want[lane == &second]);
    }
  }
  opened.need_no_fault();
  return "2 MiB on two streams, " + std::to_string(kRounds) + " rounds";
}

/// Stores of two ranks share the run's folder, and nothing else.
std::string ranks(const Subject& subject) {
  OpenedStore first(subject);
  OpenedStore second(subject, first, 1);
  constexpr std::size_t kBytes = 70001;
  OpenedStore* const opened[] = {&first, &second};
  OffloadSlot slots[2];
  for (const int rank : {0, 1}) slots[rank] = opened[rank]->store->reserve(kBytes);
  for (const int rank : {0, 1}) {
    need_same("a slot of rank " + std::to_string(rank) + " before its first put",
              opened[rank]->get(slots[rank], 0, kBytes), Bytes(kBytes, 0));
    opened[rank]->put(slots[rank], 0, pattern(kBytes, static_cast<unsigned>(rank) + 1));
    opened[rank]->store->flush();
  }
  for (const int rank : {0, 1})
    need_same("a slot of rank " + std::to_string(rank) + ", after both ranks put",
              opened[rank]->get(slots[rank], 0, kBytes), pattern(kBytes, static_cast<unsigned>(rank) + 1));
  for (const OpenedStore* store : opened) store->need_no_fault();
  return "two in one folder";
}

/// Memory that the store has not seen before, at any address, and at one that it has seen with fewer bytes; given back
/// behind the call, and then another's. Work that is late on a stream is another contract's.
std::string any_memory(const Subject& subject) {
  OpenedStore opened(subject);
  Device& device = *opened.device;
  constexpr std::size_t kBytes = 70001;
  const OffloadSlot slot = opened.store->reserve(kBytes);
  DeviceMemory block(device, kBytes + 8);
  auto* begin = static_cast<unsigned char*>(block.data());
  int calls = 0;
  for (const std::size_t at : {std::size_t{0}, std::size_t{1}, std::size_t{7}})
    for (const std::size_t bytes : {std::size_t{100}, std::size_t{5000}, kBytes}) {
      const Bytes want = pattern(bytes, static_cast<unsigned>(++calls));
      const std::string what = std::to_string(bytes) + " bytes at byte " + std::to_string(at) + " of a block";
      device.fill(begin, 0xee, kBytes + 8, opened.stream);
      device.copy(begin + at, want.data(), bytes, opened.stream);
      device.synchronize(opened.stream);
      opened.store->put(slot, 0, begin + at, bytes, opened.stream);
      device.fill(begin, 0xee, kBytes + 8, opened.stream);
      device.synchronize(opened.stream);
      need_same("a put of " + what, opened.get(slot, 0, bytes), want);
      opened.store->get(slot, 0, begin + at, bytes, opened.stream);
      device.synchronize(opened.stream);
      Bytes all(kBytes + 8), around(kBytes + 8, 0xee);
      block.read(all.data());
      std::copy(want.begin(), want.end(), around.begin() + static_cast<std::ptrdiff_t>(at));
      need_same("a get of " + what, all, around);
    }
  for (const MemoryKind kind : {MemoryKind::device, MemoryKind::pinned})
    for (int round = 0; round < 20; ++round) {
      const std::size_t bytes = 3000 * static_cast<std::size_t>(round + 1);
      const Bytes want = pattern(bytes, static_cast<unsigned>(++calls));
      void* memory = device.allocate(kind, bytes);
      device.copy(memory, want.data(), bytes, opened.stream);
      device.synchronize(opened.stream);
      opened.store->put(slot, 0, memory, bytes, opened.stream);
      device.synchronize(opened.stream);
      device.release(kind, memory);
      need_same("a put of memory that is given back behind it", opened.get(slot, 0, bytes), want);
    }
  opened.need_no_fault();
  return std::to_string(calls) + " calls";
}

std::string maps(const Subject& subject) {
  OpenedStore opened(subject);
  const OffloadSlot slot = opened.store->reserve(4099);
  if (!opened.store->traits().mappable) return "not mappable";
  const Bytes want = pattern(4099, 2);
  void* place = opened.store->map(slot);
  need(place != nullptr, "map() of a mappable store", "null", "device-addressable memory");
  opened.device->copy(place, want.data(), want.size(), opened.stream);
  opened.device->synchronize(opened.stream);
  need_same("a slot that was written in place", opened.get(slot, 0, want.size()), want);
  opened.need_no_fault();
  return "mapped";
}

}  // namespace

void check_offload_store(Report& report, const Subject& subject) {
  report.contract("put and get", [&] { return round_trips(subject); });
  report.contract("parts of a slot", [&] { return parts(subject); });
  report.contract("streams", [&] { return streams(subject); });
  report.contract("flush", [&] { return flushes(subject); });
  report.contract("calls that enqueue", [&] { return does_not_wait(subject); });
  report.contract("neighbouring parts", [&] { return neighbours(subject); });
  report.contract("streams at once", [&] { return at_once(subject); });
  report.contract("ranks", [&] { return ranks(subject); });
  report.contract("memory that is not registered", [&] { return any_memory(subject); });
  report.contract("map", [&] { return maps(subject); });
  check_store_faults(report, subject);
}

}  // namespace quern::conformance
