#pragma once
// Stores for state that is offloaded from the device: pinned host memory, mapped host memory, disk.

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

#include "quern/device.h"

namespace quern {

struct OffloadTraits {
  std::string id;
  std::size_t capacity = 0;     ///< bytes that slots may take in all; 0: not known, as of the rates
  double put_rate = 0;          ///< bytes/s, device to store
  double get_rate = 0;          ///< bytes/s, store to device
  bool mappable = false;        ///< kernels can read and write a slot in place
  bool can_capture = false;     ///< put and get may be part of a captured graph
  bool in_host_memory = false;  ///< a slot takes as much host memory as it has bytes
};

/// A reserved range of the store.
using OffloadSlot = std::int64_t;

/// Where a store keeps its files.
struct StorePlace {
  std::string folder = {};  ///< of the run, for files that go with the store; empty: there is none, and
                            ///< a store that needs one throws a config error
  int rank = 0;             ///< ranks share the folder, but no file
};

/// Slots are bytes: offsets and sizes need no alignment. All methods except error() are called from one thread only. A
/// read or write that fails is a fault: error() returns it from then on, streams continue, and outputs of failed gets
/// are undefined. A call that throws because memory ran out can be repeated. The destructor waits, and leaves nothing.
class OffloadStore {
 public:
  virtual ~OffloadStore() = default;

  // ---- capabilities ----
  virtual const OffloadTraits& traits() const = 0;

  // ---- set-up ----
  /// `device` is open and outlives the store.
  virtual void open(Device& device, const StorePlace& place) = 0;
  /// Reserves a slot; all slots are reserved before training. Contents are zero. Throws a resources error.
  virtual OffloadSlot reserve(std::size_t bytes) = 0;

  // ---- hot path: enqueued, without waiting for `stream`; device memory is borrowed until it has passed the call ----
  virtual void put(OffloadSlot slot, std::size_t offset, const void* device_memory, std::size_t bytes,
                   Stream stream) = 0;
  virtual void get(OffloadSlot slot, std::size_t offset, void* device_memory, std::size_t bytes, Stream stream) = 0;
  /// Announces a get of this range (a disk store can read ahead).
  virtual void prefetch(OffloadSlot slot, std::size_t offset, std::size_t bytes) = 0;
  /// The slot as device-addressable memory, if traits().mappable; owned by the store.
  virtual void* map(OffloadSlot slot) = 0;

  // ---- state ----
  /// Blocks until all puts are in the store. Allowed before any put.
  virtual void flush() = 0;

  // ---- faults: from any thread, without blocking ----
  /// The first fault, if there is one.
  virtual std::optional<std::string> error() = 0;
};

}  // namespace quern
