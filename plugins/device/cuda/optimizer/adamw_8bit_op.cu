// AdamW with moments in 8 bits: int8 or e4m3 values with an fp32 scale for each block of a row. The second moment is
// stored as its root, and a nonzero one never becomes zero. Both round stochastically, by the halves of one
// random word, and the master's update uses them before they are rounded. This kernel takes any address, size and mix
// of formats: a warp has a block of 128 or 256 elements, a lane four neighbours at a time. Most tensors go to
// adamw_8bit_neighbours.cu, with the same bits.

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "optimizer/adamw_8bit.cuh"
#include "optimizer/optimizer_ops.h"
#include "runtime/launch.cuh"
#include "runtime/operand_check.h"
#include "shared/operands/op_checks.h"

namespace quern::cuda {

namespace {

using namespace adamw_8bit;

template <class T>
struct alignas(4 * sizeof(T)) Four {
  T at[4];
};

/// Four elements from `at`, of which `count` are there; at once where that is allowed.
template <class T, class ToFloat>
__device__ __forceinline__ void load_four_of(const void* tensor, std::int64_t at, int count, bool aligned,
                                             float (&values)[4], ToFloat to_float_of) {
  const T* from = static_cast<const T*>(tensor) + at;
  Four<T> four{};
  if (aligned && count >= 4)
    four = *reinterpret_cast<const Four<T>*>(from);
  else
    for (int i = 0; i < 4; ++i)
      if (i < count) four.at[i] = from[i];
#pragma unroll
  for (int i = 0; i < 4; ++i) values[i] = to_float_of(four.at[i]);
}

__device__ __forceinline__ void load_four(const void* tensor, DType dtype, std::int64_t at, int count, bool aligned,
                                          float (&values)[4]) {
  if (dtype == DType::f32)
    load_four_of<float>(tensor, at, count, aligned, values, [](float value) { return value; });
  else if (dtype == DType::bf16)
    load_four_of<std::uint16_t>(tensor, at, count, aligned, values,
                                [](std::uint16_t bits) { return __uint_as_float(std::uint32_t{bits} << 16); });
  else if (dtype == DType::i8)
    load_four_of<std::int8_t>(tensor, at, count, aligned, values,
                              [](std::int8_t value) { return static_cast<float>(value); });
  else
    load_four_of<__nv_fp8_storage_t>(tensor, at, count, aligned, values, [](__nv_fp8_storage_t bits) {
      return __half2float(__half(__nv_cvt_fp8_to_halfraw(bits, __NV_E4M3)));
    });
}

template <class T>
__device__ __forceinline__ void store_four(void* tensor, std::int64_t at, int count, bool aligned,
                                           const Four<T>& four) {
  T* to = static_cast<T*>(tensor) + at;
  if (aligned && count >= 4)
    *reinterpret_cast<Four<T>*>(to) = four;
  else
    for (int i = 0; i < 4; ++i)
      if (i < count) to[i] = four.at[i];
}

/// Numbers of four elements from global index `at` on.
__device__ __forceinline__ RandomWords four_words(const DrawStep& s, int index, std::uint32_t object, std::int64_t at) {
  const auto block = static_cast<std::uint64_t>(at) / 4;
  RandomWords words = random_words(s.seed_low, s.seed_high, rounding(index), object, s.step, block);
  const int skipped = static_cast<int>(at % 4);
  if (skipped == 0) return words;
  const RandomWords next = random_words(s.seed_low, s.seed_high, rounding(index), object, s.step, block + 1);
  RandomWords shifted;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    std::uint32_t word = 0;
#pragma unroll
    for (int j = 0; j < 7; ++j)
      if (j == i + skipped) word = j < 4 ? words.word[j % 4] : next.word[j % 4];
    shifted.word[i] = word;
  }
  return shifted;
}

/// The code of value / scale, as bits of the format.
template <int kMoment>
__device__ __forceinline__ std::uint8_t code_of(float value, DType format, float inverse, std::uint32_t random) {
  auto code = [&]<DType kFormat>() {
    return static_cast<std::uint8_t>(draw_code<kFormat, kMoment>(value, inverse, random) >>
                                     8 * kCodeByte<kFormat, kMoment>);
  };
  return format == DType::i8 ? code.template operator()<DType::i8>() : code.template operator()<DType::e4m3>();
}

__device__ __forceinline__ float warp_max(float value) {
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2) value = fmaxf(value, __shfl_xor_sync(0xffffffffu, value, lanes));
  return value;
}

/// Elements of one block; a lane has four at lane * 4, and in blocks of 256 four more 128 behind.
template <int kFours>
__device__ void update_block(const BlockArguments& args, const AdamwRule::Step& rule, const DrawStep& draw,
                             const BlockTensor& t, std::int64_t index) {
  std::uint32_t block;
  const std::int64_t row = t.row_blocks.divide(static_cast<std::uint32_t>(index), block);
  const int lane = static_cast<int>(threadIdx.x % 32);
  const int column = static_cast<int>(block) * 128 * kFours + lane * 4;
  float values[kFours][3][4];
  float amax[2] = {0, 0};
#pragma unroll
  for (int f = 0; f < kFours; ++f) {
    const int count = t.columns - column - f * 128;
    const std::int64_t at = row * t.columns + column + f * 128;
    float gradient[4];
    load_four(t.gradient, args.gradient, at, count, t.aligned, gradient);
#pragma unroll
    for (int j = 0; j < 3; ++j) {
      load_four(t.updated[j], args.dtypes[j], at, count, t.aligned, values[f][j]);
      if (j == 0 || t.updated[kScales1 + j - 1] == nullptr) continue;
      const float scale = static_cast<const float*>(t.updated[kScales1 + j - 1])[index];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        values[f][j][i] *= scale;
        if (j == kMoment2) values[f][j][i] *= values[f][j][i];
      }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float element[3] = {values[f][0][i], values[f][1][i], values[f][2][i]};
      const float root = AdamwRule::swift_update(rule, gradient[i], element);
      if (t.updated[kScales2] != nullptr) element[2] = root;
#pragma unroll
      for (int j = 0; j < 3; ++j) values[f][j][i] = element[j];
      if (i < count) amax[0] = fmaxf(amax[0], fabsf(element[1])), amax[1] = fmaxf(amax[1], fabsf(element[2]));
    }
  }
#pragma unroll
  for (int j = 0; j < 3; ++j) {
    float* scales = j == 0 ? nullptr : static_cast<float*>(t.updated[kScales1 + j - 1]);
    float inverse = 1;
    if (scales != nullptr) {
      const BlockScale scale = block_scale(warp_max(amax[j - 1]), args.dtypes[j]);
      inverse = scale.inverse;
      __syncwarp();  // all have read it
      if (lane == 0) scales[index] = scale.scale;
    }
#pragma unroll
    for (int f = 0; f < kFours; ++f) {
      const int count = t.columns - column - f * 128;
      const std::int64_t at = row * t.columns + column + f * 128;
      if (count <= 0) continue;
      RandomWords random{};
      const int drawn = scales != nullptr ? kMoment1 : j;
      if (args.dtypes[j] != DType::f32) random = four_words(draw, drawn, t.object, t.offset + at);
      if (scales != nullptr) {
        Four<std::uint8_t> codes;
#pragma unroll
        for (int i = 0; i < 4; ++i)
          codes.at[i] = j == kMoment1 ? code_of<kMoment1>(values[f][j][i], args.dtypes[j], inverse, random.word[i])
                                      : code_of<kMoment2>(values[f][j][i], args.dtypes[j], inverse, random.word[i]);
        store_four(t.updated[j], at, count, t.aligned, codes);
      } else if (args.dtypes[j] == DType::f32) {
        store_four(t.updated[j], at, count, t.aligned,
                   Four<float>{{values[f][j][0], values[f][j][1], values[f][j][2], values[f][j][3]}});
      } else {
        Four<std::uint16_t> bits;
#pragma unroll
        for (int i = 0; i < 4; ++i)
          bits.at[i] = static_cast<std::uint16_t>(stochastic_bits(values[f][j][i], random.word[i]) >> 16);
        store_four(t.updated[j], at, count, t.aligned, bits);
      }
    }
  }
}

template <int kFours>
__global__ void __launch_bounds__(kThreads) adamw_8bit_kernel(const __grid_constant__ BlockArguments args) {
  __shared__ AdamwRule::Step shared;
  if (threadIdx.x == 0) shared = AdamwRule::step(args.constants, *args.update, *args.step);
  __syncthreads();
  const DrawStep draw = draw_step(*args.update, *args.step);
  if (draw.apply == 0) return;
  for (int i = static_cast<int>(blockIdx.x); i < args.list.chunks; i += static_cast<int>(gridDim.x)) {
    const Chunk chunk = chunk_at<kChunk>(args.list, i);
    const BlockTensor& tensor = args.list.tensor[chunk.tensor];
    for (std::int64_t index = chunk.begin + threadIdx.x / 32; index < chunk.end; index += kWarps)
      update_block<kFours>(args, shared, draw, tensor, index);
  }
}

/// Whether neighbours can be read and written so many at once, up to 16 bytes of them.
bool runs_of(const BlockTensor& tensor, const BlockArguments& args, int elements) {
  auto begins = [&](const void* data, DType dtype) {
    const auto bytes = std::min<std::size_t>(16, static_cast<std::size_t>(elements) * size_of(dtype));
    return reinterpret_cast<std::uintptr_t>(data) % bytes == 0;
  };
  bool can = tensor.columns % elements == 0 && begins(tensor.gradient, args.gradient);
  for (int j = 0; j < 3; ++j) can = can && begins(tensor.updated[j], args.dtypes[j]);
  return can;
}

constexpr std::size_t kInputs = 6, kOutputs = 5;

// update (4) f32, step (16) u32, of each matrix gradient, master, moment1, moment2, scales1, scales2 -> all but the
// first
Launch prepare_adamw_8bit(const OpInstance& op, CudaContext& context) {
  const std::int64_t block = op.attributes.integer("block");
  const std::vector<double>&objects = op.attributes.list("objects"), &offsets = op.attributes.list("offsets");
  auto tensors = std::make_shared<std::vector<BlockTensor>>();
  for (std::size_t i = 0; i < objects.size(); ++i) {
    const Extents& extents = op.inputs[2 + kInputs * i].extents;
    BlockTensor& tensor = tensors->emplace_back();
    tensor.columns = static_cast<int>(extents[1]);
    const std::int64_t row_blocks = ceil_divide(extents[1], block);
    tensor.row_blocks = FastDivide(static_cast<std::uint32_t>(row_blocks));
    tensor.count = extents[0] * row_blocks;
    tensor.offset = static_cast<std::int64_t>(offsets[i]);
    tensor.object = static_cast<std::uint32_t>(objects[i]);
  }
  BlockArguments constant{};
  constant.constants = AdamwRule::constants(op.attributes);
  constant.gradient = op.inputs[2].dtype;
  for (std::size_t j = 0; j < 3; ++j) constant.dtypes[j] = op.inputs[3 + j].dtype;
  KernelFunction<BlockArguments> of_any = block == 128 ? adamw_8bit_kernel<1> : adamw_8bit_kernel<2>;
  auto any = load_kernel(of_any, dim3(kThreads), context.multiprocessors);
  LoadedKernel<BlockArguments> neighbours;
  if (KernelFunction<BlockArguments> function = choose_neighbours(
          constant.gradient, constant.dtypes[kMaster], constant.dtypes[kMoment1], constant.dtypes[kMoment2], block))
    neighbours = load_kernel(function, dim3(kThreads), context.multiprocessors);
  return [=](std::span<const View> in, std::span<const View> out, const Exec& exec) {
    auto tensor_at = [&](std::size_t i) {
      BlockTensor tensor = (*tensors)[i];
      tensor.gradient = in[2 + kInputs * i].data;
      for (std::size_t j = 0; j < kUpdated; ++j) {
        tensor.updated[j] = out[kOutputs * i + j].data;
        if (tensor.updated[j] != in[2 + kInputs * i + 1 + j].data)
          fail_internal("adamw_8bit", "output " + std::to_string(kOutputs * i + j) + " is not its input's memory");
      }
      return tensor;
    };
    BlockArguments args = constant;
    args.update = static_cast<const UpdateState*>(in[0].data);
    args.step = static_cast<const StepState*>(in[1].data);
    for (const bool whole : {true, false}) {
      const LoadedKernel<BlockArguments>& kernel = whole ? neighbours : any;
      auto some_at = [&](std::size_t i) {
        BlockTensor tensor = tensor_at(i);
        const bool eights = neighbours.function != nullptr && tensor.offset % 4 == 0 && runs_of(tensor, constant, 8);
        tensor.aligned = runs_of(tensor, constant, 4);
        if (eights != whole) tensor.count = 0;
        return tensor;
      };
      for_tensor_lists<kChunk>(tensors->size(), some_at, [&](const TensorList<BlockTensor>& list) {
        args.list = list;
        kernel.launch(kernel.persistent(list.chunks), stream_of(exec), args);
      });
    }
  };
}

OpSupport query_adamw_8bit(const OpInstance& op, const CudaTraits&) {
  const std::size_t tensors = op.attributes.list("objects").size();
  OperandCheck check(op, 2 + kInputs * tensors, kOutputs * tensors, 2);
  check.that(tensors > 0, "needs at least one object");
  operands::check_adamw_8bit(check, op);
  constexpr std::int64_t kMost = std::int64_t{1} << 31;  // of FastDivide
  for (std::size_t i = 2; check.ok() && i < op.inputs.size(); i += kInputs)
    check.that(op.inputs[i].extents[0] * ceil_divide(op.inputs[i].extents[1], op.attributes.integer("block")) < kMost,
               "on cuda takes matrices of less than 2^31 blocks");
  for (std::size_t i = 2 + kInputs; check.ok() && i < op.inputs.size(); ++i)
    check.that(op.inputs[i].dtype == op.inputs[i - kInputs].dtype, "on cuda takes tensors of the same dtypes");
  return check.support();
}

}  // namespace

void add_adamw_8bit_op(OpTable& table) { table["adamw_8bit"] = {prepare_adamw_8bit, query_adamw_8bit}; }

}  // namespace quern::cuda
