#pragma once
// Device memory that other processes can map. A block can only be exported as a descriptor if it was made for that, by
// the driver's virtual memory, and NCCL's windows take no other. So all large blocks are made so where the driver
// allows it, which is tried when the device is opened. Small blocks, and all others, are cudaMalloc's, with IPC
// handles.

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstddef>
#include <map>
#include <memory>
#include <vector>

#include "quern/device.h"

namespace quern::cuda {

/// Of the GPU `ordinal`, which is current in every call.
class ShareableMemory {
 public:
  explicit ShareableMemory(int ordinal);
  ~ShareableMemory();

  /// As cudaMalloc and cudaFree.
  cudaError_t allocate(void** memory, std::size_t bytes);
  void release(void* memory) noexcept;

  /// As the device's export_memory, import_memory and release_imported.
  SharedHandle share(void* memory) const;
  void* map(const SharedHandle& handle);
  void unmap(void* memory) noexcept;

 private:
  struct Driver;
  struct Import {
    char* memory;  // what the caller got
    CUdeviceptr begin;
    std::size_t bytes;  // that are mapped; 0: by an IPC handle
  };

  /// Whether a block can be made and exported.
  bool exports_descriptors() const;
  CUresult create(CUmemGenericAllocationHandle* handle, std::size_t bytes) const;
  /// Maps all of the handle, readable and writable by this GPU.
  CUresult place(CUdeviceptr* begin, std::size_t bytes, CUmemGenericAllocationHandle handle) const;
  void displace(CUdeviceptr begin, std::size_t bytes) const noexcept;

  const int ordinal_;
  const std::unique_ptr<const Driver> driver_;
  std::size_t granularity_ = 0;                // of virtual memory, and the least that is worth it; 0: there is none
  std::map<CUdeviceptr, std::size_t> blocks_;  // that are virtual memory: bytes
  std::vector<Import> imports_;
};

}  // namespace quern::cuda
