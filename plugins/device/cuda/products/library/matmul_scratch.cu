#include "products/library/matmul_scratch.h"

#include <cuda_bf16.h>
#include <cuda_fp8.h>

#include <algorithm>
#include <utility>

#include "quern/block_scales.h"
#include "runtime/check.h"
#include "runtime/timing.h"

namespace quern::cuda {

namespace {

__device__ __forceinline__ std::uint32_t mix(std::uint32_t x) {
  x = (x ^ (x >> 16)) * 0x7feb352du;
  x = (x ^ (x >> 15)) * 0x846ca68bu;
  return x ^ (x >> 16);
}

/// Sum of four uniform numbers, scaled to deviation 1.
__device__ __forceinline__ float normal_like(std::uint32_t index, std::uint32_t seed) {
  std::uint32_t r = mix(index ^ seed * 0x9e3779b9u);
  float sum = static_cast<float>((r & 255u) + ((r >> 8) & 255u) + ((r >> 16) & 255u) + (r >> 24));
  return (sum - 510.0f) * (1.0f / 147.8f);
}

template <class T>
__global__ void fill_kernel(T* memory, std::size_t count, std::uint32_t seed) {
  for (std::size_t i = blockIdx.x * std::size_t{blockDim.x} + threadIdx.x; i < count;
       i += std::size_t{gridDim.x} * blockDim.x) {
    memory[i] = T(normal_like(static_cast<std::uint32_t>(i), seed));
  }
}

/// Powers of two from 1/8 to 8, as scales are: with zeros among them blocks' ratios would make accumulators NaN. With
/// `rows`, of tiles: the same for 128 rows, and 1 in fifteen of sixteen, since neighbouring tiles seldom differ.
__global__ void fill_scales_kernel(float* memory, std::size_t count, std::uint32_t seed, std::int64_t rows) {
  for (std::size_t i = blockIdx.x * std::size_t{blockDim.x} + threadIdx.x; i < count;
       i += std::size_t{gridDim.x} * blockDim.x) {
    const std::size_t index = rows > 0 ? i / rows * rows + i % rows / kScaleBlock : i;
    const std::uint32_t random = mix(static_cast<std::uint32_t>(index) ^ seed * 0x9e3779b9u);
    const std::uint32_t exponent = rows > 0 && random >> 28 > 0 ? 3 : random % 7;
    memory[i] = __uint_as_float((124 + exponent) << 23);
  }
}

template <class T>
void fill(void* memory, std::size_t bytes, std::uint32_t seed, cudaStream_t stream) {
  std::size_t count = bytes / sizeof(T);
  if (count == 0) return;
  unsigned blocks = static_cast<unsigned>(std::min<std::size_t>((count + 255) / 256, 4096));
  fill_kernel<<<blocks, 256, 0, stream>>>(static_cast<T*>(memory), count, seed);
  QUERN_CUDA(cudaGetLastError());
}

/// sums[row]: of the row's elements under signs that look random, added in a fixed order.
template <class T>
__global__ void signed_sums_kernel(const T* y, std::int64_t rows, std::int64_t columns, std::int64_t stride,
                                   float* sums) {
  __shared__ float parts[8];  // a warp each
  for (std::int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
    float sum = 0;
    for (std::int64_t column = threadIdx.x; column < columns; column += blockDim.x) {
      const float value = static_cast<float>(y[row * stride + column]);
      sum += mix(static_cast<std::uint32_t>(column)) & 1u ? value : -value;
    }
    for (int step = 16; step > 0; step /= 2) sum += __shfl_down_sync(~0u, sum, step);
    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = sum;
    __syncthreads();
    if (threadIdx.x == 0) {
      for (int warp = 1; warp < 8; ++warp) sum += parts[warp];
      sums[row] = sum;
    }
    __syncthreads();
  }
}

std::size_t padded(DType type, std::int64_t count) {
  return (static_cast<std::size_t>(count) * size_of(type) + 255) / 256 * 256;
}

struct OperandBytes {
  std::size_t a, b, y;
  explicit OperandBytes(const MatmulKey& key)
      : a(stored(key.a, key.m, key.matrices() * key.k, key.transpose_a, key.stride_a)),
        b(stored(key.b, key.k, key.matrices() * key.n, key.transpose_b, key.stride_b)),
        y(stored(key.y, key.m, key.matrices() * key.n, false, key.stride_y)) {}
  std::size_t all() const { return a + b + y; }

 private:
  static std::size_t stored(DType type, std::int64_t rows, std::int64_t columns, bool transposed, std::int64_t stride) {
    if (transposed) std::swap(rows, columns);
    return padded(type, rows * std::max(columns, stride));
  }
};

}  // namespace

void fill_random(void* memory, std::size_t bytes, DType type, std::uint32_t seed, cudaStream_t stream) {
  switch (type) {
    case DType::f32: return fill<float>(memory, bytes, seed, stream);
    case DType::bf16: return fill<__nv_bfloat16>(memory, bytes, seed, stream);
    case DType::e4m3: return fill<__nv_fp8_e4m3>(memory, bytes, seed, stream);
    case DType::e5m2: return fill<__nv_fp8_e5m2>(memory, bytes, seed, stream);
    default: QUERN_CUDA(cudaMemsetAsync(memory, 1, bytes, stream));
  }
}

MatmulScratch::MatmulScratch(const MatmulKey& key, cudaStream_t stream, std::size_t sets)
    : stream_(stream),
      type_(key.y),
      rows_(key.matrices() * key.m),
      columns_(key.n),
      stride_(key.stride_y > 0 ? key.stride_y : key.n),
      sets_(sets) {
  const OperandBytes bytes(key);
  a_bytes_ = bytes.a, b_bytes_ = bytes.b, y_bytes_ = bytes.y;
  const std::int64_t lines = of_blocks(key.scales) ? scale_blocks(key.k) : 1;  // square ones are no more
  const std::size_t vectors = padded(DType::f32, lines * std::max<std::int64_t>({key.m, key.n, 4}));
  if (cudaMalloc(&memory_, sets * bytes.all() + (key.beta != 0 ? y_bytes_ : 0) + 3 * vectors + kMatmulWorkspace) !=
      cudaSuccess) {
    cudaGetLastError();
    memory_ = nullptr;
    return;
  }
  char* next = static_cast<char*>(memory_);
  auto take = [&](std::size_t size, DType type, std::uint32_t seed) {
    char* at = std::exchange(next, next + size);
    fill_random(at, size, type, seed, stream);
    return at;
  };
  operands_.a = take(sets * a_bytes_, key.a, 1);
  operands_.b = take(sets * b_bytes_, key.b, 2);
  operands_.y = take(sets * y_bytes_, key.y, 3);
  if (key.beta != 0) operands_.c = take(y_bytes_, key.y, 7);
  operands_.bias = take(vectors, DType::bf16, 4);  // as f32: the same numbers, every other one
  auto take_scales = [&](std::uint32_t seed, std::int64_t rows) {
    auto* at = reinterpret_cast<float*>(std::exchange(next, next + vectors));
    fill_scales_kernel<<<64, 256, 0, stream>>>(at, vectors / sizeof(float), seed, key.squares ? rows : 0);
    QUERN_CUDA(cudaGetLastError());
    return at;
  };
  operands_.scale_a = take_scales(5, key.m);
  operands_.scale_b = take_scales(6, key.n);
  operands_.workspace = next;
}

MatmulOperands MatmulScratch::operands(std::size_t set) const {
  MatmulOperands operands = operands_;
  operands.a = static_cast<const char*>(operands_.a) + set * a_bytes_;
  operands.b = static_cast<const char*>(operands_.b) + set * b_bytes_;
  operands.y = static_cast<char*>(operands_.y) + set * y_bytes_;
  return operands;
}

std::size_t sets_beyond(std::size_t l2_bytes, const MatmulKey& key) {
  return sets_beyond(l2_bytes, OperandBytes(key).all());
}

MatmulScratch::~MatmulScratch() { cudaFree(memory_); }

void MatmulScratch::reset_result(std::uint8_t byte) const {
  QUERN_CUDA(cudaMemsetAsync(operands_.y, byte, y_bytes_, stream_));
}

std::vector<float> MatmulScratch::signed_row_sums() const {
  auto* sums = static_cast<float*>(operands_.workspace);
  const std::int64_t rows = std::min<std::int64_t>(rows_, kMatmulWorkspace / sizeof(float));
  const auto blocks = static_cast<unsigned>(std::min<std::int64_t>(rows, 4096));
  auto launch = [&](auto element) {
    using T = decltype(element);
    signed_sums_kernel<<<blocks, 256, 0, stream_>>>(static_cast<const T*>(operands_.y), rows, columns_, stride_, sums);
  };
  type_ == DType::f32 ? launch(float{}) : launch(__nv_bfloat16{});
  QUERN_CUDA(cudaGetLastError());
  std::vector<float> found(static_cast<std::size_t>(rows));
  QUERN_CUDA(cudaMemcpyAsync(found.data(), sums, found.size() * sizeof(float), cudaMemcpyDeviceToHost, stream_));
  QUERN_CUDA(cudaStreamSynchronize(stream_));
  return found;
}

}  // namespace quern::cuda
