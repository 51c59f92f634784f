// The functions of CUDA's runtime and driver that the cuda device calls, for one GPU that machine.h emulates. Work is
// done when it is asked for, or recorded where a stream is captured. Linked before the libraries, these are taken
// instead of theirs. cuBLASLt and cuDNN have handles here, and no algorithms.
//
// Device memory is poisoned with 0xff, which is NaN, and ends where a page does, behind which nothing can be accessed.
#include <cublasLt.h>
#include <cuda.h>
#include <cuda_runtime.h>
#include <malloc.h>
#include <sys/mman.h>
#include <zstd.h>

#include <cstdlib>
#include <cstring>

#include "emulator/copies.h"
#include "emulator/machine.h"

namespace quern::emulator {

namespace {

using Work = std::vector<std::function<void()>>;

constexpr int kMultiprocessors = 4, kSharedBytes = 232448;
constexpr std::size_t kMemory = std::size_t{8} << 30;

struct Function {
  Module* module;
  std::string name;
};

struct Runtime {
  // Blocks' memory is the same again and again: kept, not given back to the system between them.
  Runtime() {
    mallopt(M_MMAP_THRESHOLD, 1 << 25);  // the most that it takes
    mallopt(M_TRIM_THRESHOLD, 1 << 30);
  }

  Machine machine{std::getenv("QUERN_EMULATOR_SEED") == nullptr
                      ? 1
                      : std::strtoull(std::getenv("QUERN_EMULATOR_SEED"), nullptr, 10)};
  std::vector<std::unique_ptr<Module>> modules;
  std::map<const Module*, const std::uint8_t*> binaries;  ///< not read yet
  std::unordered_map<const void*, Function> functions;
  std::map<void*, std::pair<void*, std::size_t>> allocations;
  std::multimap<std::size_t, void*> released;  ///< by size, protected: faults of new pages take longer than kernels
  std::unique_ptr<Work> captured;
  struct {
    dim3 grid, block;
    std::size_t shared = 0;
  } pushed;  ///< of a launch <<<...>>>, for the function that nvcc has it call
  cudaError_t last = cudaSuccess;

  cudaError_t fail(cudaError_t error) { return last = error; }
  void run(std::function<void()> work) {
    if (captured != nullptr)
      captured->push_back(std::move(work));
    else
      work();
  }
  Kernel& kernel(const void* function);
};

/// The PTX in what nvcc embeds: behind a header, pieces that each begin with their kind and sizes.
std::string ptx_in(const std::uint8_t* fat) {
  auto number = [fat](std::size_t at, std::size_t bytes) {
    std::uint64_t value = 0;
    std::memcpy(&value, fat + at, bytes);
    return value;
  };
  constexpr std::uint64_t kMagic = 0xba55ed50, kPtx = 1;
  if (number(0, 4) != kMagic) stop("unknown fat binary");
  const std::size_t header = number(6, 2), end = header + number(8, 8);
  for (std::size_t at = header; at < end;) {
    const std::size_t begin = at + number(at + 4, 4), bytes = number(at + 8, 8), compressed = number(at + 16, 4);
    if (number(at, 2) == kPtx) {
      std::string text(compressed == 0 ? bytes : number(at + 56, 8), '\0');
      if (compressed == 0)
        std::memcpy(text.data(), fat + begin, bytes);
      else if (ZSTD_isError(ZSTD_decompress(text.data(), text.size(), fat + begin, compressed)) != 0)
        stop("PTX that is not compressed by zstd");
      return text.substr(0, text.find('\0'));
    }
    at = begin + bytes;
  }
  return {};
}

Runtime& runtime() {
  static Runtime& instance = *new Runtime;  // registered code is used until the process ends
  return instance;
}

Kernel& Runtime::kernel(const void* function) {
  const auto found = functions.find(function);
  if (found == functions.end()) stop("a function that was not registered is launched");
  Module& module = *found->second.module;
  if (const auto binary = binaries.find(&module); binary != binaries.end()) {
    read(module, ptx_in(binary->second));
    binaries.erase(binary);
  }
  const auto kernel = module.kernels.find(found->second.name);
  if (kernel == module.kernels.end()) stop("no PTX was built for " + found->second.name);
  decode(module, kernel->second);
  return kernel->second;
}

cudaError_t launch(const void* function, const LaunchShape& shape, void** arguments) {
  Kernel& kernel = runtime().kernel(function);
  if (shape.grid.count() == 0 || shape.block.count() == 0 || shape.block.count() > 1024)
    return runtime().fail(cudaErrorInvalidConfiguration);
  if (shape.dynamic_bytes > static_cast<std::size_t>(kernel.most_dynamic_bytes))
    return runtime().fail(cudaErrorInvalidValue);
  std::vector<std::uint8_t> parameters(static_cast<std::size_t>(kernel.parameter_bytes));
  for (std::size_t i = 0; i < kernel.parameters.size(); ++i)
    std::memcpy(parameters.data() + kernel.parameters[i].offset, arguments[i],
                static_cast<std::size_t>(kernel.parameters[i].bytes));
  runtime().run([&kernel, shape, parameters] { runtime().machine.launch(kernel, shape, parameters); });
  return cudaSuccess;
}

Extent extent(dim3 of) { return {of.x, of.y, of.z}; }

constexpr std::size_t kPage = 4096;

cudaError_t allocate(void** memory, std::size_t bytes) {
  if (bytes > kMemory) return runtime().fail(cudaErrorMemoryAllocation);
  const std::size_t body = (std::max<std::size_t>(bytes, 1) + 255) / 256 * 256;  // as CUDA aligns what it allocates
  const std::size_t whole = (body + kPage - 1) / kPage * kPage + kPage;
  auto released = runtime().released.extract(whole);
  void* base = released ? released.mapped() : mmap(nullptr, whole, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (base == MAP_FAILED) return runtime().fail(cudaErrorMemoryAllocation);
  auto* const end = static_cast<std::uint8_t*>(base) + whole - kPage;
  mprotect(base, whole - kPage, PROT_READ | PROT_WRITE);
  std::memset(end - body, 0xff, body);
  runtime().allocations[end - body] = {base, whole};
  *memory = end - body;
  return cudaSuccess;
}

cudaError_t release(void* memory) {
  if (memory == nullptr) return cudaSuccess;
  const auto found = runtime().allocations.find(memory);
  if (found == runtime().allocations.end()) return runtime().fail(cudaErrorInvalidValue);
  const auto [base, whole] = found->second;
  mprotect(base, whole, PROT_NONE);
  runtime().released.emplace(whole, base);
  runtime().allocations.erase(found);
  return cudaSuccess;
}

/// Streams, events and handles have an address, and nothing else.
template <class Handle>
cudaError_t make(Handle* handle) {
  *handle = reinterpret_cast<Handle>(new char);
  return cudaSuccess;
}
template <class Handle>
cudaError_t unmake(Handle handle) {
  delete reinterpret_cast<char*>(handle);
  return cudaSuccess;
}

CUresult encode_tensor_map(CUtensorMap* out, CUtensorMapDataType type, cuuint32_t rank, void* base,
                           const cuuint64_t* sizes, const cuuint64_t* strides, const cuuint32_t* box,
                           const cuuint32_t* steps, CUtensorMapInterleave, CUtensorMapSwizzle swizzle,
                           CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
  TensorMap map{};
  map.base = reinterpret_cast<std::uint64_t>(base);
  map.rank = static_cast<std::uint8_t>(rank);
  map.kind = type == CU_TENSOR_MAP_DATA_TYPE_BFLOAT16  ? TensorMap::Kind::bf16
             : type == CU_TENSOR_MAP_DATA_TYPE_FLOAT32 ? TensorMap::Kind::f32
                                                       : TensorMap::Kind::bytes;
  map.element_bytes = map.kind == TensorMap::Kind::bf16 ? 2 : map.kind == TensorMap::Kind::f32 ? 4 : 1;
  map.swizzle = static_cast<std::uint8_t>(swizzle);
  bool right = map.base % 16 == 0 && (map.kind != TensorMap::Kind::bytes || type == CU_TENSOR_MAP_DATA_TYPE_UINT8);
  for (cuuint32_t d = 0; d < rank; ++d) {
    right =
        right && sizes[d] > 0 && sizes[d] <= (std::uint64_t{1} << 32) && box[d] > 0 && box[d] <= 256 && steps[d] == 1;
    map.sizes[d] = static_cast<std::int64_t>(sizes[d]);
    map.box[d] = static_cast<std::uint16_t>(box[d]);
    if (d == 0) continue;
    right = right && strides[d - 1] % 16 == 0 && strides[d - 1] < (std::uint64_t{1} << 40);
    map.strides[d - 1] = strides[d - 1];
  }
  const std::uint32_t row_bytes = box[0] * map.element_bytes;
  right = right && row_bytes % 16 == 0 && (map.swizzle == 0 || row_bytes <= 16u << map.swizzle);
  std::memcpy(out, &map, sizeof map);
  return right ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult write_value(CUstream, CUdeviceptr at, cuuint32_t value, unsigned) {
  std::memcpy(reinterpret_cast<void*>(at), &value, sizeof value);
  return CUDA_SUCCESS;
}

CUresult not_supported() { return CUDA_ERROR_NOT_SUPPORTED; }

}  // namespace

}  // namespace quern::emulator

using namespace quern::emulator;

extern "C" {

// What nvcc has a program call.

void** __cudaRegisterFatBinary(void* binary) {
  struct Wrapper {
    int magic, version;
    const std::uint8_t* data;
  };
  runtime().modules.push_back(std::make_unique<Module>());
  Module* const module = runtime().modules.back().get();
  runtime().binaries[module] = static_cast<const Wrapper*>(binary)->data;
  return reinterpret_cast<void**>(module);
}
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
char __cudaInitModule(void**) { return 1; }
void __cudaRegisterFunction(void** module, const char* function, char*, const char* name, int, uint3*, uint3*, dim3*,
                            dim3*, int*) {
  runtime().functions[function] = {reinterpret_cast<Module*>(module), name};
}
void __cudaRegisterVar(void**, char*, char*, const char*, int, std::size_t, int, int) {}
unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, std::size_t shared, cudaStream_t) {
  runtime().pushed = {grid, block, shared};
  return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, std::size_t* shared, void* stream) {
  *grid = runtime().pushed.grid;
  *block = runtime().pushed.block;
  *shared = runtime().pushed.shared;
  std::memset(stream, 0, sizeof(cudaStream_t));
  return cudaSuccess;
}
cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* function) {
  *kernel = reinterpret_cast<cudaKernel_t>(const_cast<void*>(function));
  return cudaSuccess;
}
cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void** arguments, std::size_t shared,
                               cudaStream_t) {
  return launch(reinterpret_cast<const void*>(kernel), {extent(grid), extent(block), 1, shared}, arguments);
}

// Kernels.

cudaError_t cudaLaunchKernel(const void* function, dim3 grid, dim3 block, void** arguments, std::size_t shared,
                             cudaStream_t) {
  return launch(function, {extent(grid), extent(block), 1, shared}, arguments);
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* function, void** arguments) {
  LaunchShape shape{extent(config->gridDim), extent(config->blockDim), 1, config->dynamicSmemBytes};
  for (unsigned i = 0; i < config->numAttrs; ++i)
    if (config->attrs[i].id == cudaLaunchAttributeClusterDimension)
      shape.cluster = static_cast<int>(config->attrs[i].val.clusterDim.x);
  return launch(function, shape, arguments);
}
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void* function) {
  *attributes = {};
  attributes->maxThreadsPerBlock = 1024;
  attributes->maxDynamicSharedSizeBytes = runtime().kernel(function).most_dynamic_bytes;
  return cudaSuccess;
}
cudaError_t cudaFuncSetAttribute(const void* function, cudaFuncAttribute which, int value) {
  if (which != cudaFuncAttributeMaxDynamicSharedMemorySize) return cudaSuccess;
  if (value > kSharedBytes) return runtime().fail(cudaErrorInvalidValue);
  runtime().kernel(function).most_dynamic_bytes = value;
  return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void*, int, std::size_t) {
  *blocks = 2;
  return cudaSuccess;
}

// The GPU.

cudaError_t cudaGetDeviceCount(int* count) {
  *count = 1;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int) { return cudaSuccess; }
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int) {
  *properties = {};
  std::strcpy(properties->name, "NVIDIA H100 80GB HBM3, emulated");
  properties->major = 9;
  properties->multiProcessorCount = kMultiprocessors;
  properties->l2CacheSize = 50 << 20;
  properties->sharedMemPerBlockOptin = kSharedBytes;
  properties->totalGlobalMem = kMemory;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr which, int) {
  *value = which == cudaDevAttrMultiProcessorCount      ? kMultiprocessors
           : which == cudaDevAttrComputeCapabilityMajor ? 9
                                                        : 1;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetPCIBusId(char* text, int, int) {
  std::strcpy(text, "0000:00:00.0");
  return cudaSuccess;
}
cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = *greatest = 0;
  return cudaSuccess;
}
cudaError_t cudaDeviceSynchronize() { return cudaSuccess; }
cudaError_t cudaMemGetInfo(std::size_t* free, std::size_t* total) {
  *free = *total = kMemory;
  return cudaSuccess;
}
const char* cudaGetErrorName(cudaError_t error) {
  return error == cudaSuccess                 ? "cudaSuccess"
         : error == cudaErrorMemoryAllocation ? "cudaErrorMemoryAllocation"
                                              : "cudaErrorInvalidValue";
}
const char* cudaGetErrorString(cudaError_t) { return "on the emulated GPU"; }
cudaError_t cudaGetLastError() { return std::exchange(runtime().last, cudaSuccess); }

// Memory.

cudaError_t cudaMalloc(void** memory, std::size_t bytes) { return allocate(memory, bytes); }
cudaError_t cudaFree(void* memory) { return release(memory); }
cudaError_t cudaHostAlloc(void** memory, std::size_t bytes, unsigned) { return allocate(memory, bytes); }
cudaError_t cudaFreeHost(void* memory) { return release(memory); }
cudaError_t cudaHostRegister(void*, std::size_t, unsigned) { return cudaSuccess; }
cudaError_t cudaHostUnregister(void*) { return cudaSuccess; }
cudaError_t cudaMemcpy(void* to, const void* from, std::size_t bytes, cudaMemcpyKind) {
  std::memmove(to, from, bytes);
  return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, std::size_t bytes, cudaMemcpyKind, cudaStream_t) {
  runtime().run([=] { std::memmove(to, from, bytes); });
  return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void* to, int byte, std::size_t bytes, cudaStream_t) {
  runtime().run([=] { std::memset(to, byte, bytes); });
  return cudaSuccess;
}
cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t*, void*) { return runtime().fail(cudaErrorNotSupported); }
cudaError_t cudaIpcOpenMemHandle(void**, cudaIpcMemHandle_t, unsigned) { return runtime().fail(cudaErrorNotSupported); }
cudaError_t cudaIpcCloseMemHandle(void*) { return cudaSuccess; }

// Streams, events and graphs.

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) { return make(stream); }
cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int) { return make(stream); }
cudaError_t cudaStreamDestroy(cudaStream_t stream) { return unmake(stream); }
cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaStreamWaitEvent(cudaStream_t, cudaEvent_t, unsigned) { return cudaSuccess; }
cudaError_t cudaLaunchHostFunc(cudaStream_t, cudaHostFn_t function, void* data) {
  runtime().run([=] { function(data); });
  return cudaSuccess;
}
cudaError_t cudaEventCreate(cudaEvent_t* event) { return make(event); }
cudaError_t cudaEventDestroy(cudaEvent_t event) { return unmake(event); }
cudaError_t cudaEventRecord(cudaEvent_t, cudaStream_t) { return cudaSuccess; }
cudaError_t cudaEventSynchronize(cudaEvent_t) { return cudaSuccess; }
cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t, cudaEvent_t) {
  *milliseconds = 1;
  return cudaSuccess;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
  *status = runtime().captured != nullptr ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
cudaError_t cudaStreamBeginCapture(cudaStream_t, cudaStreamCaptureMode) {
  runtime().captured = std::make_unique<Work>();
  return cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t, cudaGraph_t* graph) {
  *graph = reinterpret_cast<cudaGraph_t>(runtime().captured.release());
  return cudaSuccess;
}
cudaError_t cudaGraphInstantiate(cudaGraphExec_t* instance, cudaGraph_t graph, unsigned long long) {
  *instance = reinterpret_cast<cudaGraphExec_t>(new Work(*reinterpret_cast<Work*>(graph)));
  return cudaSuccess;
}
cudaError_t cudaGraphUpload(cudaGraphExec_t, cudaStream_t) { return cudaSuccess; }
cudaError_t cudaGraphLaunch(cudaGraphExec_t instance, cudaStream_t) {
  for (const auto& work : *reinterpret_cast<Work*>(instance)) work();
  return cudaSuccess;
}
cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  delete reinterpret_cast<Work*>(graph);
  return cudaSuccess;
}
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t instance) {
  delete reinterpret_cast<Work*>(instance);
  return cudaSuccess;
}

// The driver, and libraries.

cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult* found) {
  *function = std::strcmp(name, "cuTensorMapEncodeTiled") == 0 ? reinterpret_cast<void*>(encode_tensor_map)
              : std::strcmp(name, "cuStreamWriteValue32") == 0 ? reinterpret_cast<void*>(write_value)
                                                               : reinterpret_cast<void*>(not_supported);
  *found = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}
int cudnnCreate(void** handle) { return static_cast<int>(make(handle)); }
int cudnnDestroy(void* handle) { return static_cast<int>(unmake(handle)); }
cublasStatus_t cublasLtCreate(cublasLtHandle_t* handle) {
  make(handle);
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtDestroy(cublasLtHandle_t handle) {
  unmake(handle);
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t, cublasLtMatmulDesc_t, cublasLtMatrixLayout_t,
                                              cublasLtMatrixLayout_t, cublasLtMatrixLayout_t, cublasLtMatrixLayout_t,
                                              cublasLtMatmulPreference_t, int, cublasLtMatmulHeuristicResult_t*,
                                              int* found) {
  *found = 0;
  return CUBLAS_STATUS_NOT_SUPPORTED;
}

}  // extern "C"
