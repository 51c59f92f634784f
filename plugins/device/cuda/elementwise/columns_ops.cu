// Columns of a matrix that another is added to, and the gradient of the added matrix. The sum is made in place where it
// may be; else y is copied first.

#include "elementwise/elementwise_ops.h"
#include "primitives/vector.cuh"
#include "runtime/launch.cuh"
#include "runtime/operand_check.h"
#include "shared/operands/op_checks.h"

namespace quern::cuda {

namespace {

constexpr int kThreads = 256;

struct ColumnsArguments {
  const void* part;        ///< (N, P); null: factor * y of the columns goes to `out`
  void* y;                 ///< (N, C), at the first column
  void* out;               ///< (N, P)
  std::int64_t packs;      ///< of all rows
  int row_packs;           ///< of a row of P elements
  int columns, y_columns;  ///< P and C
  float factor;
};

template <class T, Access kAccess>
__global__ void __launch_bounds__(kThreads) columns_kernel(const ColumnsArguments args) {
  const std::int64_t pack = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (pack >= args.packs) return;
  const std::int64_t row = pack / args.row_packs;
  const int at = static_cast<int>(pack % args.row_packs) * kPack<T>;
  T* y = static_cast<T*>(args.y) + row * args.y_columns;
  Floats<T> values = unpack(load_pack<kAccess>(static_cast<const T*>(y), at, args.columns));
  if (args.part) {
    const T* part = static_cast<const T*>(args.part) + row * args.columns;
    const Floats<T> added = unpack(load_pack<kAccess>(part, at, args.columns));
#pragma unroll
    for (int i = 0; i < kPack<T>; ++i) values.at[i] = fmaf(args.factor, added.at[i], values.at[i]);
    return store_pack<kAccess>(y, at, args.columns, round_pack(values));
  }
#pragma unroll
  for (int i = 0; i < kPack<T>; ++i) values.at[i] *= args.factor;
  store_pack<kAccess>(static_cast<T*>(args.out) + row * args.columns, at, args.columns, round_pack(values));
}

// y (N, C), part (N, P) -> y + factor * part at columns [first, first + P); or x (N, C) -> factor * x of these, (N, P)
Launch prepare_columns(const OpInstance& op, CudaContext& context) {
  const bool adds = op.kind == "add_columns";
  const Matrix whole = matrix_of(op, 0);
  const DType type = op.inputs[0].dtype;
  const std::int64_t columns = adds ? matrix_of(op, 1).columns : op.attributes.integer("columns");
  const std::int64_t first = op.attributes.integer("first"), size = static_cast<std::int64_t>(size_of(type));
  const std::int64_t row_packs =
      with_element(type, [&](auto element) { return ceil_divide(columns, std::int64_t{kPack<decltype(element)>}); });
  const bool packs = whole.columns * size % 16 == 0 && columns * size % 16 == 0 && first * size % 16 == 0;
  const ColumnsArguments constant{.part = nullptr,
                                  .y = nullptr,
                                  .out = nullptr,
                                  .packs = whole.rows * row_packs,
                                  .row_packs = static_cast<int>(row_packs),
                                  .columns = static_cast<int>(columns),
                                  .y_columns = static_cast<int>(whole.columns),
                                  .factor = static_cast<float>(op.attributes.real("factor"))};
  auto load = [&](auto access) {
    return with_element(type, [&](auto element) {
      KernelFunction<ColumnsArguments> kernel = columns_kernel<decltype(element), access()>;
      return load_kernel(kernel, dim3(kThreads), context.multiprocessors);
    });
  };
  auto vector = load(AccessConstant<Access::vector>{}), scalar = load(AccessConstant<Access::scalar>{});
  return [=](std::span<const View> in, std::span<const View> out, const Exec& exec) {
    if (constant.packs == 0) return;
    ColumnsArguments args = constant;
    void* y = adds ? out[0].data : in[0].data;
    if (adds && y != in[0].data)
      QUERN_CUDA(cudaMemcpyAsync(y, in[0].data, in[0].bytes(), cudaMemcpyDeviceToDevice, stream_of(exec)));
    args.y = static_cast<char*>(y) + first * size;
    args.part = adds ? in[1].data : nullptr;
    args.out = adds ? nullptr : out[0].data;
    const auto& kernel = packs && aligned_16({args.y, args.part, args.out}) ? vector : scalar;
    kernel.launch(ceil_divide(args.packs, std::int64_t{kThreads}), stream_of(exec), args);
  };
}

}  // namespace

void add_columns_ops(OpTable& table) {
  table["add_columns"] = {prepare_columns, [](const OpInstance& op, const CudaTraits&) {
                            OperandCheck check(op, 2, 1);
                            operands::check_add_columns(check, op);
                            return check.support();
                          }};
  table["columns"] = {prepare_columns, [](const OpInstance& op, const CudaTraits&) {
                        OperandCheck check(op, 1, 1);
                        operands::check_columns(check, op);
                        return check.support();
                      }};
}

}  // namespace quern::cuda
