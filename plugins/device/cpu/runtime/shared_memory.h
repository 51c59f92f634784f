#pragma once
// The CPU device's own memory: whole pages, so that an allocation can become memory that other processes map, in place.
// Only exported memory is shared; the rest stays as it is for one process, huge pages included. It has no name
// anywhere, so nothing of it outlives the processes that map it.

#include <cstddef>
#include <map>
#include <mutex>

#include "quern/device.h"

namespace quern::cpu {

/// All members may be called by several threads. Every error is a resources error.
class SharedMemory {
 public:
  SharedMemory() = default;
  ~SharedMemory();
  SharedMemory(const SharedMemory&) = delete;
  SharedMemory& operator=(const SharedMemory&) = delete;

  /// Null where the system gives none. `bytes` is not 0.
  void* allocate(std::size_t bytes);
  /// Null is ignored.
  void release(void* memory) noexcept;
  /// Nobody may use the allocation meanwhile.
  SharedHandle share(void* memory);
  void* import(const SharedHandle& handle);
  void release_imported(void* memory) noexcept;

 private:
  struct Block {
    std::size_t bytes = 0;
    int descriptor = -1;  // -1: not shared
  };
  using Blocks = std::map<char*, Block>;  // by first byte

  static Blocks::iterator around(Blocks& blocks, void* memory);
  void remove(Blocks& blocks, void* memory) noexcept;

  std::mutex mutex_;
  Blocks own_, imported_;
};

}  // namespace quern::cpu
