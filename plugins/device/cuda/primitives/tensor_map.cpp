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

/// `strides` in bytes, of all dimensions but the first.
template <std::size_t kRank>
CUtensorMap encode(DType type, const std::array<cuuint64_t, kRank>& extents,
                   const std::array<cuuint64_t, kRank - 1>& strides, const void* data,
                   const std::array<cuuint32_t, kRank>& box, CUtensorMapSwizzle shorter = CU_TENSOR_MAP_SWIZZLE_NONE) {
  std::array<cuuint32_t, kRank> steps;
  steps.fill(1);
  const bool narrow = size_of(type) == 1;
  CUtensorMap map;
  const CUresult status =
      encoder()(&map, narrow ? CU_TENSOR_MAP_DATA_TYPE_UINT8 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, kRank,
                const_cast<void*>(data), extents.data(), strides.data(), box.data(), steps.data(),
                CU_TENSOR_MAP_INTERLEAVE_NONE, box[0] * size_of(type) == 128 ? CU_TENSOR_MAP_SWIZZLE_128B : shorter,
                CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (status == CUDA_SUCCESS) return map;
  std::string sizes;
  for (std::size_t i = kRank; i-- > 0;) sizes += std::to_string(extents[i]) + (i > 0 ? " x " : "");
  throw Error(ErrorCode::internal, {.where = "device cuda",
                                    .what = "cuTensorMapEncodeTiled refused a tensor of " + sizes + " at " +
                                            std::to_string(reinterpret_cast<std::uintptr_t>(data)),
                                    .found = "status " + std::to_string(static_cast<int>(status)),
                                    .expected = "an address and rows that are multiples of 16 bytes",
                                    .next = {}});
}

}  // namespace

void find_tensor_map_encoder() { encoder(); }

CUtensorMap tensor_map(DType type, const std::array<std::int64_t, 3>& sizes, const void* data,
                       const std::array<std::uint32_t, 3>& box, std::int64_t stride) {
  const std::array<cuuint64_t, 3> extents{static_cast<cuuint64_t>(sizes[0]), static_cast<cuuint64_t>(sizes[1]),
                                          static_cast<cuuint64_t>(sizes[2])};
  const cuuint64_t row_bytes = (stride > 0 ? static_cast<cuuint64_t>(stride) : extents[0]) * size_of(type);
  return encode<3>(type, extents, {row_bytes, row_bytes * extents[1]}, data, box);
}

CUtensorMap dealt_tensor_map(DType type, std::int64_t rows, std::int64_t columns, const void* data, int box_rows,
                             int box_columns) {
  const auto row = static_cast<cuuint64_t>(columns) * size_of(type);
  return encode<5>(type, {static_cast<cuuint64_t>(columns), 2, 4, 4, static_cast<cuuint64_t>(rows / kDealtRows)},
                   {row, 8 * row, 2 * row, kDealtRows * row}, data,
                   {static_cast<cuuint32_t>(box_columns), 2, 4, 4, static_cast<cuuint32_t>(box_rows / kDealtRows)},
                   CU_TENSOR_MAP_SWIZZLE_64B);
}

CUtensorMap paired_tensor_map(DType type, std::int64_t rows, std::int64_t columns, const void* data, int box_rows) {
  const auto row = static_cast<cuuint64_t>(columns) * size_of(type);
  return encode<4>(type, {static_cast<cuuint64_t>(columns), 8, 2, static_cast<cuuint64_t>(rows / kPairedRows)},
                   {2 * row, row, kPairedRows * row}, data,
                   {128, 8, 2, static_cast<cuuint32_t>(box_rows / kPairedRows)});
}

}  // namespace quern::cuda
