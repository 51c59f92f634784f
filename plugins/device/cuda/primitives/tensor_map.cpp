#include "primitives/tensor_map.h"

#include <string>

#include "quern/error.h"
#include "runtime/check.h"

namespace quern::cuda {

namespace {

using Encode = decltype(&cuTensorMapEncodeTiled);

Encode find_encode() {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult result = cudaDriverEntryPointSymbolNotFound;
  constexpr unsigned kSince = 12000;  // CUDA 12.0
  QUERN_CUDA(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, kSince, cudaEnableDefault, &result));
  if (result != cudaDriverEntryPointSuccess || function == nullptr)
    throw Error(ErrorCode::resources, {.where = "device cuda",
                                       .what = "the driver has no cuTensorMapEncodeTiled",
                                       .found = {},
                                       .expected = "a driver for CUDA 12.0 or later",
                                       .next = "update the driver"});
  return reinterpret_cast<Encode>(function);
}

Encode encoder() {
  static const Encode encode = find_encode();
  return encode;
}

}  // namespace

void find_tensor_map_encoder() { encoder(); }

CUtensorMap tensor_map(DType type, const std::array<std::int64_t, 3>& sizes, const void* data,
                       const std::array<std::uint32_t, 3>& box, std::int64_t stride) {
  const std::uint64_t bytes = size_of(type);
  const std::array<cuuint64_t, 3> extents{static_cast<cuuint64_t>(sizes[0]), static_cast<cuuint64_t>(sizes[1]),
                                          static_cast<cuuint64_t>(sizes[2])};
  const std::uint64_t row_bytes = (stride > 0 ? static_cast<cuuint64_t>(stride) : extents[0]) * bytes;
  const std::array<cuuint64_t, 2> strides{row_bytes, row_bytes * extents[1]};
  const std::array<cuuint32_t, 3> steps{1, 1, 1};
  CUtensorMap map;
  const CUresult status = encoder()(&map, bytes == 1 ? CU_TENSOR_MAP_DATA_TYPE_UINT8 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
                                    3, const_cast<void*>(data), extents.data(), strides.data(), box.data(),
                                    steps.data(), CU_TENSOR_MAP_INTERLEAVE_NONE,
                                    box[0] * bytes == 128 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_NONE,
                                    CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (status != CUDA_SUCCESS)
    throw Error(ErrorCode::internal, {.where = "device cuda",
                                      .what = "cuTensorMapEncodeTiled refused a tensor of " + std::to_string(sizes[2]) +
                                              " x " + std::to_string(sizes[1]) + " x " + std::to_string(sizes[0]) +
                                              " at " + std::to_string(reinterpret_cast<std::uintptr_t>(data)),
                                      .found = "status " + std::to_string(static_cast<int>(status)),
                                      .expected = "an address and rows that are multiples of 16 bytes",
                                      .next = {}});
  return map;
}

}  // namespace quern::cuda
