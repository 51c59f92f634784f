#pragma once
// What the contracts of stores share: an open store in a folder of its own, and bytes to put there.

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/files/test_directory.h"
#include "conformance/report.h"
#include "conformance/subject.h"
#include "quern/testkit/device_memory.h"

namespace quern::conformance {

/// Each put and get of it waits for its stream.
struct OpenedStore {
  using Bytes = std::vector<std::uint8_t>;

  TestDirectory folder;
  std::unique_ptr<Device> device;
  std::unique_ptr<OffloadStore> store;
  Stream stream;

  explicit OpenedStore(const Subject& subject) : OpenedStore(subject, open_device(subject.host, subject.options)) {}
  /// Of another rank, in `other`'s folder.
  OpenedStore(const Subject& subject, const OpenedStore& other, int rank)
      : device(open_device(subject.host, subject.options)),
        store(subject.make<OffloadStore>()),
        stream(device->stream(StreamKind::copy_out)) {
    store->open(*device, {.folder = other.folder.path(), .rank = rank});
  }
  OpenedStore(const Subject& subject, std::unique_ptr<Device> opened)
      : device(std::move(opened)), store(subject.make<OffloadStore>()), stream(device->stream(StreamKind::copy_out)) {
    store->open(*device, {.folder = folder.path()});
  }
  void put(OffloadSlot slot, std::size_t offset, const Bytes& bytes) {
    testkit::DeviceMemory memory(*device, bytes.size());
    memory.write(bytes.data());
    store->put(slot, offset, memory.data(), bytes.size(), stream);
    device->synchronize(stream);
  }
  Bytes get(OffloadSlot slot, std::size_t offset, std::size_t count) {
    testkit::DeviceMemory memory(*device, count);
    store->prefetch(slot, offset, count);
    store->get(slot, offset, memory.data(), count, stream);
    device->synchronize(stream);
    if (std::string touched = memory.touched(); !touched.empty())
      broken("a get of " + std::to_string(count) + " bytes", "bytes written " + touched + " the buffer", "none");
    Bytes bytes(count);
    memory.read(bytes.data());
    return bytes;
  }
  /// Where puts and gets succeed, error() says nothing.
  void need_no_fault() const {
    if (const std::optional<std::string> fault = store->error())
      broken("error() of a store whose puts and gets succeed", *fault, "nothing");
  }
};

inline OpenedStore::Bytes pattern(std::size_t count, unsigned seed) {
  OpenedStore::Bytes bytes(count);
  for (std::size_t i = 0; i < count; ++i) bytes[i] = static_cast<std::uint8_t>((i * 167 + seed * 31 + i / 251) & 0xff);
  return bytes;
}

inline void need_same(const std::string& what, const OpenedStore::Bytes& got, const OpenedStore::Bytes& want) {
  if (got == want) return;  // texts are made of the first difference alone
  for (std::size_t i = 0; i < want.size(); ++i)
    if (got[i] != want[i])
      broken(what + ", byte " + std::to_string(i), std::to_string(got[i]), std::to_string(want[i]));
}

/// Of a store whose memory, files or disk fail, and of what it leaves behind.
void check_store_faults(Report& report, const Subject& subject);

}  // namespace quern::conformance
