// Matrices in the formats of quern/weight_format.h: x (R, C) to packed integers and scales, and back. A block takes a
// row: its scales first, then its bytes.

#include <algorithm>
#include <cstdint>

#include "optimizer/update_rules.cuh"
#include "primitives/divide.cuh"
#include "primitives/element.cuh"
#include "primitives/philox.cuh"
#include "quantization/quantize_ops.h"
#include "quern/weight_format.h"
#include "runtime/launch.cuh"
#include "runtime/operand_check.h"
#include "shared/operands/op_checks.h"

namespace quern::cuda {

namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;

/// A row of the table of formats, as kernels take it.
struct Packing {
  int bits, largest;
  std::int64_t columns, group, groups;
  bool mean;
};

Packing packing_of(const OpInstance& op, const Extents& x) {
  const WeightFormat& format = *weight_format_named(op.attributes.word("format"));
  const std::int64_t groups = format.row_scales(x[1]);
  return {format.bits, format.largest, x[1], x[1] / groups, groups, format.scale == WeightFormat::Scale::mean};
}

struct QuantizeArguments {
  Packing packing;
  const void* x;
  std::uint8_t* q;
  float* scales;
  std::int64_t rows;
  // of requantize_weights; else null and 0
  const UpdateState* update = nullptr;
  const StepState* step = nullptr;
  std::uint64_t offset = 0;
  std::uint32_t object = 0;
};

// ---- scales ----

/// Of the magnitudes that threads or lanes have; the sum is infinite or NaN where an element is not finite.
struct Magnitudes {
  double sum = 0;
  float largest = 0;

  __device__ __forceinline__ void add(float x) {
    sum += fabs(static_cast<double>(x));
    largest = fmaxf(largest, fabsf(x));
  }
  __device__ __forceinline__ void add(const Magnitudes& other) {
    sum += other.sum;
    largest = fmaxf(largest, other.largest);
  }
  __device__ __forceinline__ void add_lanes() {
#pragma unroll
    for (int lanes = 16; lanes > 0; lanes /= 2)
      add(Magnitudes{__shfl_xor_sync(0xffffffffu, sum, lanes), __shfl_xor_sync(0xffffffffu, largest, lanes)});
  }
  __device__ __forceinline__ float scale(const Packing& p) const {
    if (!isfinite(sum)) return __uint_as_float(0x7fc00000u);
    if (largest == 0) return 1.0f;
    const float scale = p.mean ? static_cast<float>(sum / static_cast<double>(p.group))
                               : __fdiv_rn(largest, static_cast<float>(p.largest));
    return fmaxf(scale, 0x1p-126f);
  }
};

template <class T>
__device__ __forceinline__ void make_scales(const Packing& p, const T* x, float* scales) {
  __shared__ Magnitudes of_warp[kWarps];
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  if (p.groups > 1) {  // a warp a group
    for (std::int64_t g = warp; g < p.groups; g += kWarps) {
      Magnitudes own;
      for (std::int64_t i = lane; i < p.group; i += 32) own.add(to_float(x[g * p.group + i]));
      own.add_lanes();
      if (lane == 0) scales[g] = own.scale(p);
    }
  } else {
    Magnitudes own;
    for (std::int64_t i = threadIdx.x; i < p.columns; i += kThreads) own.add(to_float(x[i]));
    own.add_lanes();
    if (lane == 0) of_warp[warp] = own;
    __syncthreads();
    if (threadIdx.x == 0) {
      for (int other = 1; other < kWarps; ++other) own.add(of_warp[other]);
      scales[0] = own.scale(p);
    }
  }
  __syncthreads();
}

// ---- integers ----

/// Random words of four consecutive elements, for requantize_weights.
__device__ __forceinline__ RandomWords words_of(const QuantizeArguments& args, std::uint64_t element) {
  return random_words(args.step->seed_low, args.step->seed_high, RandomPurpose::round_master, args.object,
                      args.step->step, element / 4);
}

__device__ __forceinline__ float up_by_chance(float value, std::uint32_t word) {
  const float below = floorf(value);
  return static_cast<float>(word >> 8) < (value - below) * 0x1p24f ? below + 1.0f : below;
}

__device__ __forceinline__ unsigned code_of(float value, const Packing& p) {
  const auto most = static_cast<float>(p.largest);
  const int integer = isnan(value) ? 0 : static_cast<int>(fminf(fmaxf(value, -most), most));
  return static_cast<unsigned>(integer) & ((1u << p.bits) - 1);
}

constexpr int kWideValues = 8;

/// `kWide`: a thread takes eight values at a time, which are of one group and aligned, and draws for four at once.
template <bool kStochastic, bool kWide, class T>
__global__ void __launch_bounds__(kThreads) quantize_kernel(const QuantizeArguments args) {
  if (kStochastic && args.update->apply == 0) return;
  const Packing p = args.packing;
  const std::int64_t row = blockIdx.x;
  const T* x = static_cast<const T*>(args.x) + row * p.columns;
  float* scales = args.scales + row * p.groups;
  std::uint8_t* q = args.q + row * (p.columns * p.bits / 8);
  make_scales(p, x, scales);
  const std::uint64_t first = args.offset + static_cast<std::uint64_t>(row * p.columns);
  if constexpr (kWide) {
    struct alignas(16) Values {
      T at[kWideValues];
    };
    for (std::int64_t i = std::int64_t{threadIdx.x} * kWideValues; i < p.columns; i += kThreads * kWideValues) {
      const Values values = *reinterpret_cast<const Values*>(x + i);
      const float inverse = __fdiv_rn(1.0f, scales[p.groups == 1 ? 0 : i / p.group]);
      RandomWords words;
      std::uint64_t packed = 0;
#pragma unroll
      for (int j = 0; j < kWideValues; ++j) {
        float value = __fmul_rn(to_float(values.at[j]), inverse);
        if constexpr (kStochastic) {
          if (j % 4 == 0) words = words_of(args, first + static_cast<std::uint64_t>(i + j));
          value = up_by_chance(value, words.word[j % 4]);
        } else {
          value = rintf(value);
        }
        packed |= std::uint64_t{code_of(value, p)} << (j * p.bits);
      }
      if (p.bits == 8)
        reinterpret_cast<std::uint64_t*>(q)[i / kWideValues] = packed;
      else if (p.bits == 4)
        reinterpret_cast<std::uint32_t*>(q)[i / kWideValues] = static_cast<std::uint32_t>(packed);
      else
        reinterpret_cast<std::uint16_t*>(q)[i / kWideValues] = static_cast<std::uint16_t>(packed);
    }
  } else {
    const int in_byte = 8 / p.bits;
    for (std::int64_t byte = threadIdx.x; byte < p.columns / in_byte; byte += kThreads) {
      unsigned packed = 0;
      for (int j = 0; j < in_byte; ++j) {
        const std::int64_t i = byte * in_byte + j;
        float value = __fmul_rn(to_float(x[i]), __fdiv_rn(1.0f, scales[i / p.group]));
        if constexpr (kStochastic) {
          const std::uint64_t element = first + static_cast<std::uint64_t>(i);
          const RandomWords words = words_of(args, element);
          std::uint32_t word = words.word[0];
#pragma unroll
          for (std::uint64_t k = 1; k < 4; ++k)
            if (element % 4 == k) word = words.word[k];
          value = up_by_chance(value, word);
        } else {
          value = rintf(value);
        }
        packed |= code_of(value, p) << (j * p.bits);
      }
      q[byte] = static_cast<std::uint8_t>(packed);
    }
  }
}

struct DequantizeArguments {
  const std::uint8_t* q;
  const float* scales;
  void* x;
  std::int64_t count;   ///< bytes of q
  FastDivide in_group;  ///< threads whose values share a scale
};

__device__ __forceinline__ void put(float* x, int integer, float scale) { *x = static_cast<float>(integer) * scale; }
__device__ __forceinline__ void put(bf16* x, int integer, float scale) {
  *x = from_float<bf16>(static_cast<float>(integer) * scale);
}
__device__ __forceinline__ void put(std::int8_t* x, int integer, float) { *x = static_cast<std::int8_t>(integer); }

/// `kWide` bytes of q a thread, which are of one group and aligned.
template <int kBits, int kWide, class T>
__global__ void __launch_bounds__(kThreads) dequantize_kernel(const DequantizeArguments args) {
  constexpr int kInByte = 8 / kBits, kValues = kWide * kInByte;
  struct alignas(kWide) Bytes {
    std::uint8_t at[kWide];
  };
  struct alignas(kValues * sizeof(T) < 16 ? kValues * sizeof(T) : 16) Values {
    T at[kValues];
  };
  const std::int64_t step = std::int64_t{gridDim.x} * kThreads;
  for (std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x; i < args.count / kWide; i += step) {
    const Bytes bytes = reinterpret_cast<const Bytes*>(args.q)[i];
    std::uint32_t rest;
    const float scale = args.scales ? args.scales[args.in_group.divide(static_cast<std::uint32_t>(i), rest)] : 1.0f;
    Values values;
#pragma unroll
    for (int k = 0; k < kValues; ++k) {
      const int up = 32 - kBits;
      const int integer = static_cast<int>(unsigned{bytes.at[k / kInByte]} >> (k % kInByte * kBits) << up) >> up;
      put(&values.at[k], integer, scale);
    }
    reinterpret_cast<Values*>(args.x)[i] = values;
  }
}

template <int kBits>
auto dequantize_for(DType dtype, bool wide) {
  constexpr int kWide = kBits == 8 ? 8 : kBits;  // of 8 values
  auto of = [&](auto t) -> KernelFunction<DequantizeArguments> {
    using T = decltype(t);
    if (wide) return dequantize_kernel<kBits, kWide, T>;
    return dequantize_kernel<kBits, 1, T>;
  };
  if (dtype == DType::i8) return of(std::int8_t{});
  return dtype == DType::bf16 ? of(bf16{}) : of(float{});
}

// q, scale -> x (R, C) f32 or bf16; q -> x i8
Launch prepare_dequantize(const OpInstance& op, CudaContext& context) {
  const Packing packing = packing_of(op, op.outputs[0].extents);
  const bool wide = packing.columns % 8 == 0;
  const DType dtype = op.outputs[0].dtype;
  const KernelFunction<DequantizeArguments> function = packing.bits == 8   ? dequantize_for<8>(dtype, wide)
                                                       : packing.bits == 4 ? dequantize_for<4>(dtype, wide)
                                                                           : dequantize_for<2>(dtype, wide);
  auto kernel = load_kernel(function, dim3(kThreads), context.multiprocessors);
  const std::int64_t values = wide ? 8 : 8 / packing.bits;  // of a thread
  const FastDivide in_group(static_cast<std::uint32_t>(packing.group / values));
  return [=](std::span<const View> in, std::span<const View> out, const Exec& exec) {
    const auto count = static_cast<std::int64_t>(in[0].bytes());
    const float* scales = dtype == DType::i8 ? nullptr : in[1].as<float>();
    kernel.launch(kernel.persistent(ceil_divide(count * (8 / packing.bits), values * kThreads)), stream_of(exec),
                  {in[0].as<std::uint8_t>(), scales, out[0].data, count, in_group});
  };
}

template <bool kStochastic>
LoadedKernel<QuantizeArguments> quantize_for(DType dtype, const Packing& packing, std::uint64_t offset,
                                             CudaContext& context) {
  const bool wide = packing.columns % kWideValues == 0 && offset % 4 == 0;  // groups are of 32
  return with_element(dtype, [&](auto t) {
    using T = decltype(t);
    KernelFunction<QuantizeArguments> function =
        wide ? quantize_kernel<kStochastic, true, T> : quantize_kernel<kStochastic, false, T>;
    return load_kernel(function, dim3(kThreads), context.multiprocessors);
  });
}

// x (R, C) f32 or bf16 -> q, scale
Launch prepare_quantize(const OpInstance& op, CudaContext& context) {
  const Packing packing = packing_of(op, op.inputs[0].extents);
  auto kernel = quantize_for<false>(op.inputs[0].dtype, packing, 0, context);
  return [=](std::span<const View> in, std::span<const View> out, const Exec& exec) {
    QuantizeArguments args{packing, in[0].data, out[0].as<std::uint8_t>(), out[1].as<float>(), in[0].extents[0]};
    kernel.launch(args.rows, stream_of(exec), args);
  };
}

// update, step, x (R, C), q, scale -> q, scale
Launch prepare_requantize(const OpInstance& op, CudaContext& context) {
  const Packing packing = packing_of(op, op.inputs[2].extents);
  const auto offset = static_cast<std::uint64_t>(op.attributes.list("offsets")[0]);
  auto kernel = quantize_for<true>(op.inputs[2].dtype, packing, offset, context);
  const auto object = static_cast<std::uint32_t>(op.attributes.list("objects")[0]);
  return [=](std::span<const View> in, std::span<const View> out, const Exec& exec) {
    for (std::size_t i : {0, 1})
      if (out[i].data != in[3 + i].data) fail_internal("requantize_weights", "an output is not its input's memory");
    QuantizeArguments args{packing, in[2].data, out[0].as<std::uint8_t>(), out[1].as<float>(), in[2].extents[0]};
    args.update = static_cast<const UpdateState*>(in[0].data);
    args.step = static_cast<const StepState*>(in[1].data);
    args.offset = offset;
    args.object = object;
    kernel.launch(args.rows, stream_of(exec), args);
  };
}

OpSupport query_weights(const OpInstance& op, const CudaTraits&) {
  // Quantized values and scales have types of their own.
  const std::size_t element = op.kind == "quantize_weights"     ? 0
                              : op.kind == "requantize_weights" ? 2
                                                                : op.inputs.size();
  OperandCheck check(op, op.inputs.size(), op.outputs.size(), element);
  operands::check_weight_format(check, op);
  for (const Operand& output : op.outputs) check.that(output.present, "needs all its outputs");
  if (check.ok() && op.kind == "dequantize_weights")
    check.that(op.outputs[0].count() < std::int64_t{1} << 31, "on cuda takes matrices of fewer than 2^31 elements");
  return check.support();
}

}  // namespace

void add_weight_ops(OpTable& table) {
  table["quantize_weights"] = {prepare_quantize, query_weights};
  table["dequantize_weights"] = {prepare_dequantize, query_weights};
  table["requantize_weights"] = {prepare_requantize, query_weights};
}

}  // namespace quern::cuda
