#include "runtime/shareable_memory.h"

#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <string>

#include "quern/error.h"
#include "runtime/check.h"
#include "runtime/driver.h"

namespace quern::cuda {

namespace {

/// What SharedHandle::bytes holds.
struct Place {
  std::uint64_t bytes = 0;  // of the block, which comes as a descriptor; 0: `handle` is one
  std::uint64_t offset = 0;
  cudaIpcMemHandle_t handle = {};
};

Error refusal(const char* what, cudaError_t status, const char* next) {
  return Error(ErrorCode::resources,
               {.where = "device cuda",
                .what = what,
                .found = std::string(cudaGetErrorName(status)) + " (" + cudaGetErrorString(status) + ")",
                .expected = {},
                .next = next});
}

/// The two kinds of error codes agree where both have one.
cudaError_t as_runtime(CUresult result) { return static_cast<cudaError_t>(result); }

/// The driver has numbers for addresses.
void* pointer(CUdeviceptr at) { return reinterpret_cast<void*>(at); }  // NOLINT(performance-no-int-to-ptr)

/// An answer, not an error to be found later.
cudaError_t taken(cudaError_t status) {
  if (status != cudaSuccess) cudaGetLastError();
  return status;
}

constexpr auto kDescriptor = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;

}  // namespace

struct ShareableMemory::Driver {
  decltype(&::cuDeviceGetAttribute) attribute = driver_function<decltype(attribute)>("cuDeviceGetAttribute");
  decltype(&::cuMemGetAddressRange) range = driver_function<decltype(range)>("cuMemGetAddressRange");
  decltype(&::cuMemGetAllocationGranularity) granularity =
      driver_function<decltype(granularity)>("cuMemGetAllocationGranularity");
  decltype(&::cuMemCreate) create = driver_function<decltype(create)>("cuMemCreate");
  decltype(&::cuMemRelease) release = driver_function<decltype(release)>("cuMemRelease");
  decltype(&::cuMemRetainAllocationHandle) retain = driver_function<decltype(retain)>("cuMemRetainAllocationHandle");
  decltype(&::cuMemAddressReserve) reserve = driver_function<decltype(reserve)>("cuMemAddressReserve");
  decltype(&::cuMemAddressFree) free = driver_function<decltype(free)>("cuMemAddressFree");
  decltype(&::cuMemMap) map = driver_function<decltype(map)>("cuMemMap");
  decltype(&::cuMemUnmap) unmap = driver_function<decltype(unmap)>("cuMemUnmap");
  decltype(&::cuMemSetAccess) set_access = driver_function<decltype(set_access)>("cuMemSetAccess");
  decltype(&::cuMemExportToShareableHandle) write = driver_function<decltype(write)>("cuMemExportToShareableHandle");
  decltype(&::cuMemImportFromShareableHandle) read = driver_function<decltype(read)>("cuMemImportFromShareableHandle");
};

ShareableMemory::ShareableMemory(int ordinal) : ordinal_(ordinal), driver_(std::make_unique<const Driver>()) {
  CUmemAllocationProp properties{};
  properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  properties.location = {CU_MEM_LOCATION_TYPE_DEVICE, ordinal_};
  if (driver_->granularity(&granularity_, &properties, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED) != CUDA_SUCCESS ||
      !exports_descriptors())
    granularity_ = 0;
}

ShareableMemory::~ShareableMemory() {
  while (!imports_.empty()) unmap(imports_.back().memory);
}

bool ShareableMemory::exports_descriptors() const {
  for (const CUdevice_attribute which : {CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED,
                                         CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED}) {
    int has = 0;
    if (driver_->attribute(&has, which, ordinal_) != CUDA_SUCCESS || has == 0) return false;
  }
  CUmemGenericAllocationHandle handle = 0;
  if (create(&handle, granularity_) != CUDA_SUCCESS) return false;
  int descriptor = -1;
  const bool exported = driver_->write(&descriptor, handle, kDescriptor, 0) == CUDA_SUCCESS;
  if (exported) ::close(descriptor);
  driver_->release(handle);
  return exported;
}

CUresult ShareableMemory::create(CUmemGenericAllocationHandle* handle, std::size_t bytes) const {
  CUmemAllocationProp properties{};
  properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  properties.requestedHandleTypes = kDescriptor;
  properties.location = {CU_MEM_LOCATION_TYPE_DEVICE, ordinal_};
  int reaches_network = 0;
  if (driver_->attribute(&reaches_network, CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED, ordinal_) ==
      CUDA_SUCCESS)
    properties.allocFlags.gpuDirectRDMACapable = reaches_network != 0 ? 1 : 0;
  return driver_->create(handle, bytes, &properties, 0);
}

CUresult ShareableMemory::place(CUdeviceptr* begin, std::size_t bytes, CUmemGenericAllocationHandle handle) const {
  CUresult result = driver_->reserve(begin, bytes, granularity_, 0, 0);
  if (result != CUDA_SUCCESS) return result;
  result = driver_->map(*begin, bytes, 0, handle, 0);
  if (result == CUDA_SUCCESS) {
    const CUmemAccessDesc access{{CU_MEM_LOCATION_TYPE_DEVICE, ordinal_}, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    result = driver_->set_access(*begin, bytes, &access, 1);
    if (result != CUDA_SUCCESS) driver_->unmap(*begin, bytes);
  }
  if (result != CUDA_SUCCESS) driver_->free(*begin, bytes);
  return result;
}

void ShareableMemory::displace(CUdeviceptr begin, std::size_t bytes) const noexcept {
  cudaDeviceSynchronize();  // unmapping does not wait, as cudaFree does
  driver_->unmap(begin, bytes);
  driver_->free(begin, bytes);
}

cudaError_t ShareableMemory::allocate(void** memory, std::size_t bytes) {
  if (granularity_ == 0 || bytes < granularity_) return taken(cudaMalloc(memory, bytes));
  const std::size_t whole = (bytes + granularity_ - 1) / granularity_ * granularity_;
  CUmemGenericAllocationHandle handle = 0;
  CUresult result = create(&handle, whole);
  if (result != CUDA_SUCCESS) return as_runtime(result);
  CUdeviceptr begin = 0;
  result = place(&begin, whole, handle);
  driver_->release(handle);  // the mapping keeps the memory
  if (result != CUDA_SUCCESS) return as_runtime(result);
  blocks_.emplace(begin, whole);
  *memory = pointer(begin);
  return cudaSuccess;
}

void ShareableMemory::release(void* memory) noexcept {
  const auto block = blocks_.find(reinterpret_cast<CUdeviceptr>(memory));
  if (block == blocks_.end()) {
    cudaFree(memory);
    return;
  }
  displace(block->first, block->second);
  blocks_.erase(block);
}

SharedHandle ShareableMemory::share(void* memory) const {
  constexpr const char* kWhat = "device memory cannot be shared with other processes";
  constexpr const char* kNext = "choose another communicator";
  QUERN_CUDA(cudaDeviceSynchronize());
  const auto at = reinterpret_cast<CUdeviceptr>(memory);
  CUdeviceptr begin = 0;
  std::size_t bytes = 0;
  CUresult result = driver_->range(&begin, &bytes, at);
  if (result != CUDA_SUCCESS) throw refusal(kWhat, as_runtime(result), kNext);
  Place place{.offset = at - begin};
  SharedHandle shared;
  if (blocks_.contains(begin)) {
    place.bytes = bytes;
    CUmemGenericAllocationHandle handle = 0;
    result = driver_->retain(&handle, memory);
    if (result == CUDA_SUCCESS) {
      result = driver_->write(&shared.descriptor, handle, kDescriptor, 0);
      driver_->release(handle);
    }
    if (result != CUDA_SUCCESS) throw refusal(kWhat, as_runtime(result), kNext);
  } else if (cudaError_t status = taken(cudaIpcGetMemHandle(&place.handle, pointer(begin))); status != cudaSuccess) {
    throw refusal(kWhat, status, kNext);
  }
  shared.bytes.assign(reinterpret_cast<const char*>(&place), sizeof place);
  return shared;
}

void* ShareableMemory::map(const SharedHandle& shared) {
  constexpr const char* kWhat = "the memory of another process's GPU cannot be mapped";
  constexpr const char* kNext =
      "let every rank see all GPUs of the machine (CUDA_VISIBLE_DEVICES, containers, one GPU a task), or choose "
      "another "
      "communicator";
  Place place;
  if (shared.bytes.size() != sizeof place) fail_internal("device cuda", "a handle that is no exported memory");
  std::memcpy(&place, shared.bytes.data(), sizeof place);
  Import import{};
  if (place.bytes == 0) {
    void* begin = nullptr;
    const cudaError_t status = taken(cudaIpcOpenMemHandle(&begin, place.handle, cudaIpcMemLazyEnablePeerAccess));
    if (status != cudaSuccess) throw refusal(kWhat, status, kNext);
    import.begin = reinterpret_cast<CUdeviceptr>(begin);
  } else {
    CUmemGenericAllocationHandle handle = 0;
    import.bytes = place.bytes;
    CUresult result = driver_->read(&handle, pointer(static_cast<CUdeviceptr>(shared.descriptor)), kDescriptor);
    if (result == CUDA_SUCCESS) {
      result = this->place(&import.begin, import.bytes, handle);
      driver_->release(handle);
    }
    if (result != CUDA_SUCCESS) throw refusal(kWhat, as_runtime(result), kNext);
  }
  import.memory = static_cast<char*>(pointer(import.begin)) + place.offset;
  imports_.push_back(import);
  return import.memory;
}

void ShareableMemory::unmap(void* memory) noexcept {
  const auto import =
      std::find_if(imports_.begin(), imports_.end(), [&](const Import& known) { return known.memory == memory; });
  if (import == imports_.end()) return;
  if (import->bytes > 0) {
    displace(import->begin, import->bytes);
  } else {
    cudaIpcCloseMemHandle(pointer(import->begin));
  }
  imports_.erase(import);
}

}  // namespace quern::cuda
