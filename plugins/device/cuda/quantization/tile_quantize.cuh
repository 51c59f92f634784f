#pragma once
// Ops that make every element of a matrix on its own and quantize it: quantized values and their transpose are written
// in one pass over the inputs. A block takes tiles of 128 x 128; a thread 4 rows by two packs of 8, so that reads and
// both writes are of whole sectors. A Producer says what the values are:
//
//   static constexpr int kParts;                       // values (N, kParts * width), a part beside the other
//   static constexpr bool kSums;                       // their columns are summed as well; of one part only
//   template <class T> struct Loaded;                  // the inputs of 8 columns of each part of a row
//   template <Access, class T> Loaded<T> load(row, column, columns, width) const;  // columns: width, or 0 past the end
//   template <Access, class T> void make(const Loaded<T>&, column, Eight<T> (&values)[kParts]) const;  // rounded; zero
//   past it
//
// A thread's packs begin at columns 8 lane and 64 + 8 lane of the tile. A producer that mixes columns may choose
// others, and has both packs of a row to itself before it makes values of them. Kernels of lines do not take these:
//
//   int column_of(lane, pack) const;  // of the tile; (column / 8) % 8 differs among the eight lanes (ByteTile)
//   template <class T> void mix(Loaded<T>&, Loaded<T>&, row, column, columns) const;  // column: where the first begins

#include "elementwise/column_sum_order.cuh"
#include "primitives/byte_tile.cuh"
#include "primitives/divide.cuh"
#include "primitives/vector.cuh"
#include "quantization/quantize_plan.cuh"
#include "runtime/launch.cuh"

namespace quern::cuda {

/// Eight elements.
template <class T>
struct Eight {
  Pack<T> pack[8 / kPack<T>];
};

template <Access kAccess, class T>
__device__ __forceinline__ Eight<T> load_eight(const T* row, int at, int columns) {
  Eight<T> eight;
#pragma unroll
  for (int p = 0; p < 8 / kPack<T>; ++p) eight.pack[p] = load_pack<kAccess>(row, at + p * kPack<T>, columns);
  return eight;
}

template <Access kAccess, class T>
__device__ __forceinline__ void store_eight(T* row, int at, int columns, const Eight<T>& eight) {
#pragma unroll
  for (int p = 0; p < 8 / kPack<T>; ++p) store_pack<kAccess>(row, at + p * kPack<T>, columns, eight.pack[p]);
}

template <class T>
__device__ __forceinline__ void unpack_eight(const Eight<T>& eight, float (&values)[8]) {
#pragma unroll
  for (int p = 0; p < 8 / kPack<T>; ++p) {
    const Floats<T> part = unpack(eight.pack[p]);
#pragma unroll
    for (int i = 0; i < kPack<T>; ++i) values[p * kPack<T> + i] = part.at[i];
  }
}

template <class T>
__device__ __forceinline__ Eight<T> round_eight(const float (&values)[8]) {
  Eight<T> eight;
#pragma unroll
  for (int p = 0; p < 8 / kPack<T>; ++p) {
    Floats<T> part;
#pragma unroll
    for (int i = 0; i < kPack<T>; ++i) part.at[i] = values[p * kPack<T> + i];
    eight.pack[p] = round_pack(part);
  }
  return eight;
}

/// The larger magnitudes of two packs, by element; a NaN is the largest where its code would not show it (loses_nan).
__device__ __forceinline__ void take_largest(Pack<bf16>& most, const Pack<bf16>& x, DType format) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    auto& a = reinterpret_cast<__nv_bfloat162&>(most.word[i]);
    const std::uint32_t magnitudes = x.word[i] & 0x7fff7fffu;
    const auto b = reinterpret_cast<const __nv_bfloat162&>(magnitudes);
    a = format == DType::i8 ? __hmax2_nan(a, b) : __hmax2(a, b);
  }
}
__device__ __forceinline__ void take_largest(Pack<float>& most, const Pack<float>& x, DType format) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const std::uint32_t magnitude = x.word[i] & 0x7fffffffu;
    most.word[i] = format == DType::i8
                       ? max(most.word[i], magnitude)
                       : __float_as_uint(fmaxf(__uint_as_float(most.word[i]), __uint_as_float(magnitude)));
  }
}
template <class T>
__device__ __forceinline__ void take_largest(Eight<T>& most, const Eight<T>& x, DType format) {
#pragma unroll
  for (int p = 0; p < 8 / kPack<T>; ++p) take_largest(most.pack[p], x.pack[p], format);
}

/// Writes four or eight quantized values that are below `columns`, at most 8 bytes at once.
template <Access kAccess, int kWords>
__device__ __forceinline__ void store_codes(std::uint8_t* row, int at, int columns,
                                            const std::uint32_t (&words)[kWords]) {
  static_assert(kWords == 1 || kWords == 2);
  if constexpr (kAccess == Access::vector) {
    if (at >= columns) return;
    if constexpr (kWords == 2)
      *reinterpret_cast<uint2*>(row + at) = make_uint2(words[0], words[1]);
    else
      *reinterpret_cast<std::uint32_t*>(row + at) = words[0];
  } else {
#pragma unroll
    for (int i = 0; i < 4 * kWords; ++i)
      if (at + i < columns) row[at + i] = static_cast<std::uint8_t>(words[i / 4] >> (8 * (i % 4)));
  }
}

/// Values that are there already.
struct Copy {
  static constexpr int kParts = 1;
  static constexpr bool kSums = false;
  const void* x;  ///< (N, C)

  template <class T>
  struct Loaded {
    Eight<T> x;
  };
  template <Access kAccess, class T>
  __device__ __forceinline__ Loaded<T> load(std::int64_t row, int column, int columns, int width) const {
    return {load_eight<kAccess>(static_cast<const T*>(x) + row * width, column, columns)};
  }
  template <Access kAccess, class T>
  __device__ __forceinline__ void make(const Loaded<T>& loaded, int, Eight<T> (&values)[1]) const {
    values[0] = loaded.x;
  }
};

/// Calls f(T{}) with the type of a Producer's values. Those that are there already are bf16 or fp32, those made beside
/// their quantized values bf16 (check_fused), as the activations of all 8-bit recipes are.
template <class Producer, class F>
decltype(auto) with_values_of(DType type, F&& f) {
  if constexpr (std::is_same_v<Producer, Copy>) {
    return with_element(type, std::forward<F>(f));
  } else {
    if (type != DType::bf16) fail_internal("device cuda", "values that are not bf16 were fused with quantization");
    return std::forward<F>(f)(bf16{});
  }
}

template <class Producer>
struct TileArguments {
  Producer producer;
  QuantizeArguments quantize;
  void* y;          ///< (N, parts * width), the values themselves; null: not wanted
  float* partials;  ///< (sum_tiles(N), width), where the producer sums; null: not wanted
  std::int64_t rows;
  int width;  ///< of a part
  std::uint32_t tiles;
  FastDivide column_tiles;  ///< of a part
};

template <class Producer>
concept MixesColumns = requires(const Producer& producer) {
  producer.column_of(0, 0);
};

/// Whether a thread's loads of a tile all go out before anything is used; blocks that a multiprocessor is to hold.
template <class Producer, class T>
inline constexpr bool kLoadsAhead = sizeof(typename Producer::template Loaded<T>) <= 32;
template <class Producer, class T>
inline constexpr int kTileBlocks = sizeof(typename Producer::template Loaded<T>) <= 16 ||
                                           (Producer::kSums && !kLoadsAhead<Producer, T>)
                                       ? 3
                                       : 2;

template <class Producer, class T, Access kAccess, Formats kFormats>
__global__ void __launch_bounds__(kTileThreads, kTileBlocks<Producer, T>)
    tile_quantize_kernel(const TileArguments<Producer> args) {
  constexpr int kParts = Producer::kParts;
  static_assert(!Producer::kSums || kParts == 1);
  __shared__ ByteTile<3> tiles[kParts];
  __shared__ ColumnStrands<kTileSide> strands;  // takes no room where it is not used
  Quantizer<kFormats> quantizer(args.quantize);
  if (quantizer.idle()) return;
  const TileThread thread(static_cast<int>(threadIdx.x));
  const int width = args.width;
  for (std::uint32_t index = blockIdx.x; index < args.tiles; index += gridDim.x) {
    std::uint32_t column_tile;
    const std::int64_t tile_row = std::int64_t{args.column_tiles.divide(index, column_tile)} * kTileSide;
    const int tile_column = static_cast<int>(column_tile) * kTileSide;
    const bool turned = args.quantize.t != nullptr && quantizer.writes();
    const bool summed = Producer::kSums && args.partials != nullptr;
    if (turned || summed) __syncthreads();  // the last tile is empty
    const std::int64_t first_row = tile_row + 4 * thread.row_group;
    auto local_of = [&](int half) {
      if constexpr (MixesColumns<Producer>)
        return args.producer.column_of(thread.lane, half);
      else
        return half * 64 + thread.lane * 8;
    };
    constexpr bool kAhead = kLoadsAhead<Producer, T>;
    typename Producer::template Loaded<T> loaded[kAhead ? 2 : 1][4];
    auto load_half = [&](int half) {
      const int column = tile_column + local_of(half);
#pragma unroll
      for (int r = 0; r < 4; ++r)
        loaded[kAhead ? half : 0][r] = args.producer.template load<kAccess, T>(
            first_row + r, column, first_row + r < args.rows ? width : 0, width);
    };
    if constexpr (kAhead) {
      load_half(0);
      load_half(1);
    }
    if constexpr (MixesColumns<Producer>) {
      static_assert(kAhead);
#pragma unroll
      for (int r = 0; r < 4; ++r)
        args.producer.mix(loaded[0][r], loaded[1][r], first_row + r, tile_column + local_of(0),
                          first_row + r < args.rows ? width : 0);
    }
#pragma unroll(kAhead ? 2 : 1)  // code that fits the instruction cache
    for (int half = 0; half < 2; ++half) {
      const int local = local_of(half), column = tile_column + local;
      if constexpr (!kAhead) load_half(half);
      std::uint32_t codes[kParts][2][4] = {};
      [[maybe_unused]] float sums[8] = {};
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        const std::int64_t row = first_row + r;
        const int columns = row < args.rows ? width : 0;  // a row past the end reads zeros and writes nothing
        Eight<T> made[kParts];
        args.producer.template make<kAccess, T>(loaded[kAhead ? half : 0][r], column, made);
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
          const std::int64_t offset = (row * kParts + part) * width;
          if (args.y) store_eight<kAccess>(static_cast<T*>(args.y) + offset, column, columns, made[part]);
          float values[8];
          unpack_eight(made[part], values);
          if constexpr (Producer::kSums) add_row(sums, values);
          quantizer.measure(args.quantize, values);
          if (!quantizer.writes()) continue;
          std::uint32_t words[2];
          quantizer.encode(args.quantize, values, words);
          if (args.quantize.q) store_codes<kAccess>(args.quantize.q + offset, column, columns, words);
          codes[part][0][r] = words[0];
          codes[part][1][r] = words[1];
        }
      }
      if constexpr (Producer::kSums)
        if (summed) strands.put(thread, local, sums);
      if (!turned) continue;
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
#pragma unroll
        for (int word = 0; word < 2; ++word) {
          std::uint32_t turned_words[4];
          turn_bytes(codes[part][word], turned_words);
#pragma unroll
          for (int i = 0; i < 4; ++i) tiles[part].put(local + 4 * word + i, thread.row_group, turned_words[i]);
        }
      }
    }
    if (turned || summed) __syncthreads();
    if constexpr (Producer::kSums) {
      const int local = static_cast<int>(threadIdx.x), column = tile_column + local;
      if (summed && local < kTileSide && column < width)
        args.partials[tile_row / kTileSide * width + column] = strands.total(local);
    }
    if (!turned) continue;
#pragma unroll
    for (int part = 0; part < kParts; ++part)
      store_columns<kAccess == Access::vector>(tiles[part], thread,
                                               args.quantize.t + std::int64_t{part} * width * args.rows, tile_row,
                                               std::int64_t{tile_column}, args.rows, std::int64_t{width});
  }
  quantizer.finish(args.quantize);
}

/// The kernels of a producer for one element type, and when each serves.
template <class Producer>
struct TileKernels {
  LoadedKernel<TileArguments<Producer>> vector, scalar;
  std::int64_t rows = 0;
  int width = 0;

  /// `whole`: the producer's operands can be read by packs. The values and their sums are of the first pass.
  void launch(const Producer& producer, bool whole, const QuantizeArguments& quantize, void* y, float* partials,
              cudaStream_t stream) const {
    const bool again = quantize.pass == Pass::again;
    const std::int64_t column_tiles = ceil_divide(width, kTileSide),
                       tiles = ceil_divide(rows, kTileSide) * column_tiles;
    TileArguments<Producer> args{
        .producer = producer,
        .quantize = quantize,
        .y = again ? nullptr : y,
        .partials = again ? nullptr : partials,
        .rows = rows,
        .width = width,
        .tiles = static_cast<std::uint32_t>(tiles),
        .column_tiles = FastDivide(static_cast<std::uint32_t>(std::max<std::int64_t>(column_tiles, 1)))};
    const bool wide =
        whole && width % 8 == 0 && (!quantize.t || rows % 16 == 0) && aligned_16({quantize.q, quantize.t, args.y});
    const auto& kernel = wide ? vector : scalar;
    // Many tiles go to blocks that stay, so that few of them report; few tiles to as many blocks.
    const bool many = tiles > 8 * std::int64_t{kernel.resident} || again;
    kernel.launch(many ? kernel.persistent(tiles) : std::max<std::int64_t>(tiles, 1), stream, args);
  }
};

template <class Producer>
TileKernels<Producer> load_tiles(DType type, DType format, std::int64_t rows, std::int64_t width, int multiprocessors) {
  TileKernels<Producer> kernels;
  kernels.rows = rows;
  kernels.width = static_cast<int>(width);
  auto load = [&](auto element, auto formats) {
    using T = decltype(element);
    KernelFunction<TileArguments<Producer>> vector = tile_quantize_kernel<Producer, T, Access::vector, formats()>,
                                            scalar = tile_quantize_kernel<Producer, T, Access::scalar, formats()>;
    kernels.vector = load_kernel(vector, dim3(kTileThreads), multiprocessors);
    kernels.scalar = load_kernel(scalar, dim3(kTileThreads), multiprocessors);
  };
  with_values_of<Producer>(type, [&](auto element) {
    if (format == DType::i8)
      load(element, std::integral_constant<Formats, Formats::any>{});
    else
      load(element, std::integral_constant<Formats, Formats::float8>{});
  });
  return kernels;
}

/// The launch of an op whose values a Producer makes: `make(inputs)` gives it, `y` is the output of the values
/// themselves (-1: none), `whole` says that rows of the inputs hold whole packs. A producer that sums leaves the sums
/// in the output behind y; their partial rows follow the plan's workspace.
template <class Producer, class Make>
Launch prepare_tiles(const OpInstance& op, CudaContext& context, const QuantizePlan& plan, std::int64_t rows,
                     std::int64_t width, bool whole, int y, Make make) {
  auto kernels = load_tiles<Producer>(op.inputs[0].dtype, plan.format(), rows, width, context.multiprocessors);
  const auto sum = static_cast<std::size_t>(y + 1);
  const bool sums = Producer::kSums && op.outputs[sum].present, accumulate = sums && op.outputs[sum].accumulate;
  if (sums) load_column_sums();
  return [=](std::span<const View> in, std::span<const View> out, const Exec& exec) {
    bool aligned = whole;
    for (const View& input : in) aligned = aligned && aligned_16({input.data});
    void* values = y < 0 ? nullptr : out[static_cast<std::size_t>(y)].data;
    auto* partials = reinterpret_cast<float*>(static_cast<char*>(exec.workspace) + QuantizePlan::kWorkspace);
    plan.run(in, out, exec, [&](const QuantizeArguments& quantize) {
      kernels.launch(make(in), aligned, quantize, values, sums ? partials : nullptr, stream_of(exec));
    });
    if (sums) sum_partial_rows(partials, sum_tiles(rows), width, out[sum], accumulate, stream_of(exec));
  };
}

/// Adds "<producer>_<quantize kind>", or the quantize kind itself for no producer, for each way to find the scale.
template <class Prepare, class Query>
void add_quantize_kinds(OpTable& table, const std::string& producer, Prepare prepare, Query query) {
  for (const auto& way : kQuantizeKinds) {
    const ScaleSource source = way.source;
    table[producer.empty() ? way.kind : producer + "_" + way.kind] = {
        [prepare, source](const OpInstance& op, CudaContext& context) { return prepare(op, context, source); },
        [query, source](const OpInstance& op, const CudaTraits&) { return query(op, source); }};
  }
}

}  // namespace quern::cuda
