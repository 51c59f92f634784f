// adamw_8bit for tensors whose rows and addresses are multiples of eight elements, both moments in the same format: a
// lane has eight neighbours, so a warp has two blocks of 128 elements or one of 256. What it computes is the kernel's
// of adamw_8bit_op.cu, to the bit, without a branch between reading and writing: then elements overlap, and what three
// draws have in common is made once. It is bound by its instructions, 85 an element with int8.

#include "optimizer/adamw_8bit.cuh"
#include "primitives/vector.cuh"

namespace quern::cuda::adamw_8bit {

namespace {

constexpr int kRun = 8;  // elements of a lane

template <class T>
struct Run {
  Pack<T> pack[kRun / kPack<T>];
};

template <class T>
__device__ __forceinline__ Run<T> load_run(const void* tensor, std::int64_t at, bool some) {
  Run<T> run{};
#pragma unroll
  for (int p = 0; p < kRun / kPack<T>; ++p)
    if (some) {
      const uint4 bits = *reinterpret_cast<const uint4*>(static_cast<const T*>(tensor) + at + p * kPack<T>);
      run.pack[p] = {{bits.x, bits.y, bits.z, bits.w}};
    }
  return run;
}

template <class T>
__device__ __forceinline__ float element(const Run<T>& run, int i) {
  return unpack(run.pack[i / kPack<T>]).at[i % kPack<T>];
}

__device__ __forceinline__ uint2 load_codes(const void* tensor, std::int64_t at, bool some) {
  return some ? *reinterpret_cast<const uint2*>(static_cast<const std::uint8_t*>(tensor) + at) : uint2{0, 0};
}

template <DType kFormat>
__device__ __forceinline__ void decode(uint2 codes, float (&values)[kRun]) {
#pragma unroll
  for (int w = 0; w < 2; ++w) {
    const std::uint32_t word = w == 0 ? codes.x : codes.y;
    if constexpr (kFormat == DType::i8) {
      const std::uint32_t above = word ^ 0x80808080u;  // by 128
#pragma unroll
      for (int i = 0; i < 4; ++i)
        values[4 * w + i] = __uint_as_float(__byte_perm(above, 0x4b000000u, 0x7440 | i)) - (0x1p23f + 128.0f);
    } else {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const auto pair = static_cast<__nv_fp8x2_storage_t>(word >> (16 * i));
        const float2 two = __half22float2(__half2(__nv_cvt_fp8x2_to_halfraw2(pair, __NV_E4M3)));
        values[4 * w + 2 * i] = two.x;
        values[4 * w + 2 * i + 1] = two.y;
      }
    }
  }
}

/// The same byte of four words, in order.
template <int kByte>
__device__ __forceinline__ std::uint32_t gather_bytes(const std::uint32_t* words) {
  constexpr unsigned kTwo = static_cast<unsigned>(kByte | (4 + kByte) << 4);
  return __byte_perm(__byte_perm(words[0], words[1], kTwo), __byte_perm(words[2], words[3], kTwo), 0x5410);
}

template <DType kFormat, int kMoment>
__device__ __forceinline__ uint2 encode(const float (&values)[kRun], float inverse, const RandomWords (&random)[2]) {
  std::uint32_t words[kRun];
#pragma unroll
  for (int i = 0; i < kRun; ++i) words[i] = draw_code<kFormat, kMoment>(values[i], inverse, random[i / 4].word[i % 4]);
  constexpr int kByte = kCodeByte<kFormat, kMoment>;
  return {gather_bytes<kByte>(words), gather_bytes<kByte>(words + 4)};
}

template <class T>
__device__ __forceinline__ Run<T> round_run(const float (&values)[kRun], const RandomWords (&random)[2]) {
  Run<T> run;
#pragma unroll
  for (int i = 0; i < kRun; i += 2)
    if constexpr (std::is_same_v<T, bf16>)
      run.pack[0].word[i / 2] = upper_halves(stochastic_bits(values[i], random[i / 4].word[i % 4]),
                                             stochastic_bits(values[i + 1], random[i / 4].word[i % 4 + 1]));
    else
      run.pack[i / 4].word[i % 4] = __float_as_uint(values[i]),
                               run.pack[i / 4].word[i % 4 + 1] = __float_as_uint(values[i + 1]);
  return run;
}

template <class T>
__device__ __forceinline__ void store_run(void* tensor, std::int64_t at, const Run<T>& run) {
#pragma unroll
  for (int p = 0; p < kRun / kPack<T>; ++p)
    *reinterpret_cast<uint4*>(static_cast<T*>(tensor) + at + p * kPack<T>) =
        make_uint4(run.pack[p].word[0], run.pack[p].word[1], run.pack[p].word[2], run.pack[p].word[3]);
}

/// The largest of kLanes neighbours.
template <int kLanes>
__device__ __forceinline__ float largest(float value) {
#pragma unroll
  for (int lanes = kLanes / 2; lanes > 0; lanes /= 2) value = fmaxf(value, __shfl_xor_sync(0xffffffffu, value, lanes));
  return value;
}

/// A lane's eight elements of block `index`; `in_list`: there is such a block.
template <class Gradient, class Master, DType kFormat, int kLanes>
__device__ __forceinline__ void update_run(const BlockTensor& t, const AdamwRule::Step& rule, const DrawStep& draw,
                                           std::int64_t index, bool in_list) {
  std::uint32_t block;
  const std::int64_t row = t.row_blocks.divide(static_cast<std::uint32_t>(index), block);
  const int lane = static_cast<int>(threadIdx.x % kLanes);
  const int column = static_cast<int>(block) * kLanes * kRun + lane * kRun;
  const bool some = in_list && column < t.columns;
  const std::int64_t at = row * t.columns + column;
  auto* scales1 = static_cast<float*>(t.updated[kScales1]);
  auto* scales2 = static_cast<float*>(t.updated[kScales2]);
  const Run<Gradient> gradients = load_run<Gradient>(t.gradient, at, some);
  const Run<Master> masters = load_run<Master>(t.updated[kMaster], at, some);
  const uint2 codes1 = load_codes(t.updated[kMoment1], at, some), codes2 = load_codes(t.updated[kMoment2], at, some);
  const float scale1 = some ? scales1[index] : 0.0f, scale2 = some ? scales2[index] : 0.0f;

  float values[3][kRun];
  decode<kFormat>(codes1, values[kMoment1]);
  decode<kFormat>(codes2, values[kMoment2]);
  float amax1 = 0, amax2 = 0;
#pragma unroll
  for (int i = 0; i < kRun; ++i) {
    const float root = values[kMoment2][i] * scale2;
    float x[3] = {element(masters, i), values[kMoment1][i] * scale1, root * root};
    values[kMoment2][i] = AdamwRule::swift_update(rule, element(gradients, i), x);
    values[kMaster][i] = x[kMaster];
    values[kMoment1][i] = x[kMoment1];
    amax1 = fmaxf(amax1, fabsf(values[kMoment1][i]));
    amax2 = fmaxf(amax2, values[kMoment2][i]);
  }
  const BlockScale new1 = block_scale(largest<kLanes>(amax1), kFormat);
  const BlockScale new2 = block_scale(largest<kLanes>(amax2), kFormat);
  __syncwarp();  // all have read the scales

  const std::uint64_t first = static_cast<std::uint64_t>(t.offset + at) / 4;
  auto random_of = [&](int tensor, int four) {
    return random_words(draw.seed_low, draw.seed_high, rounding(tensor), t.object, draw.step,
                        first + static_cast<std::uint64_t>(four));
  };
  const RandomWords random[2] = {random_of(kMoment1, 0), random_of(kMoment1, 1)};
  RandomWords of_master[2] = {};
  if constexpr (std::is_same_v<Master, bf16>)
    of_master[0] = random_of(kMaster, 0), of_master[1] = random_of(kMaster, 1);
  const Run<Master> new_masters = round_run<Master>(values[kMaster], of_master);
  const uint2 new_codes1 = encode<kFormat, kMoment1>(values[kMoment1], new1.inverse, random);
  const uint2 new_codes2 = encode<kFormat, kMoment2>(values[kMoment2], new2.inverse, random);
  if (!some) return;
  store_run(t.updated[kMaster], at, new_masters);
  *reinterpret_cast<uint2*>(static_cast<std::uint8_t*>(t.updated[kMoment1]) + at) = new_codes1;
  *reinterpret_cast<uint2*>(static_cast<std::uint8_t*>(t.updated[kMoment2]) + at) = new_codes2;
  if (lane == 0) scales1[index] = new1.scale, scales2[index] = new2.scale;
}

template <class Gradient, class Master, DType kFormat, int kLanes>
__global__ void __launch_bounds__(kThreads, 4) neighbours_kernel(const __grid_constant__ BlockArguments args) {
  __shared__ AdamwRule::Step shared;
  if (threadIdx.x == 0) shared = AdamwRule::step(args.constants, *args.update, *args.step);
  __syncthreads();
  const AdamwRule::Step rule = shared;
  const DrawStep draw = draw_step(*args.update, *args.step);
  if (draw.apply == 0) return;
  constexpr int kBlocks = kThreads / kLanes;  // of the threads at once
  for (int i = static_cast<int>(blockIdx.x); i < args.list.chunks; i += static_cast<int>(gridDim.x)) {
    const Chunk chunk = chunk_at<kChunk>(args.list, i);
    const BlockTensor tensor = args.list.tensor[chunk.tensor];
    for (std::int64_t begin = chunk.begin; begin < chunk.end; begin += kBlocks) {
      const std::int64_t index = begin + threadIdx.x / kLanes;
      update_run<Gradient, Master, kFormat, kLanes>(tensor, rule, draw, index, index < chunk.end);
    }
  }
}

template <class Gradient, class Master, DType kFormat>
KernelFunction<BlockArguments> kernel_of(std::int64_t block) {
  return block == 128 ? neighbours_kernel<Gradient, Master, kFormat, 16>
                      : neighbours_kernel<Gradient, Master, kFormat, 32>;
}

}  // namespace

KernelFunction<BlockArguments> choose_neighbours(DType gradient, DType master, DType moment1, DType moment2,
                                                 std::int64_t block) {
  if (moment1 != moment2 || size_of(moment1) > 1) return nullptr;
  return with_element(gradient, [&](auto g) {
    return with_element(master, [&](auto m) -> KernelFunction<BlockArguments> {
      using G = decltype(g);
      using M = decltype(m);
      return moment1 == DType::i8 ? kernel_of<G, M, DType::i8>(block) : kernel_of<G, M, DType::e4m3>(block);
    });
  });
}

}  // namespace quern::cuda::adamw_8bit
