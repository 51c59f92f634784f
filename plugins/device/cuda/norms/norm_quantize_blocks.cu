// RMS norm, alone or with the residual add before it, quantized with block or tile scales
// (quantize_blocks_op.cu). A first launch adds and finds each row's statistic; the second reads again, recomputes
// and quantizes, so that the values go through memory only where an op reads them.

#include <algorithm>
#include <string>

#include "norms/norm_ops.h"
#include "primitives/rows.cuh"
#include "quantization/block_quantize.cuh"
#include "quantization/quantize_ops.h"
#include "shared/operands/op_checks.h"

namespace quern::cuda {

namespace {

/// A Producer (tile_quantize.cuh): y as rms_norm_kernel makes it.
struct Normed {
  static constexpr int kParts = 1;
  static constexpr bool kSums = false;
  const void *x, *weight;
  const float* rstd;
  int columns;

  template <class T>
  struct Loaded {
    Eight<T> x;
    float rstd;
  };
  template <Access kAccess, class T>
  __device__ __forceinline__ Loaded<T> load(std::int64_t row, int column, int of_columns, int width) const {
    return {load_eight<kAccess>(static_cast<const T*>(x) + row * width, column, of_columns),
            of_columns > 0 ? rstd[row] : 0.0f};
  }
  template <Access kAccess, class T>
  __device__ __forceinline__ void make(const Loaded<T>& loaded, int column, Eight<T> (&values)[1]) const {
    float of_x[8], of_weight[8];
    unpack_eight(loaded.x, of_x);
    unpack_eight(load_eight<kAccess>(static_cast<const T*>(weight), column, columns), of_weight);
#pragma unroll
    for (int i = 0; i < 8; ++i) of_x[i] = of_x[i] * loaded.rstd * of_weight[i];
    values[0] = round_eight<T>(of_x);
  }
};

/// Operands: the norm's, and y's quantized values behind its outputs.
template <bool kAdd>
struct Form {
  enum Input : std::size_t { kX, kWeight = kAdd ? 2 : 1, kInputs };
  enum Output : std::size_t { kSum, kY = kAdd ? 1 : 0, kRstd, kCodes };
};

template <bool kAdd>
Launch prepare(const OpInstance& op, CudaContext& context) {
  using Of = Form<kAdd>;
  const Matrix size = matrix_of(op, 0);
  const auto make = [columns = size.columns](std::span<const View> in) {
    return Normed{in[0].data, in[1].data, in[2].as<const float>(), static_cast<int>(columns)};
  };
  const BlockOutputs outputs{.y = Of::kY, .codes = Of::kCodes};
  return [statistics = prepare_rms_norm(op, context, kAdd),
          codes = is_square(op) ? prepare_blocks<Normed, true>(op, context, size.rows, size.columns, outputs, make)
                                : prepare_blocks<Normed, false>(op, context, size.rows, size.columns, outputs, make)](
             std::span<const View> in, std::span<const View> out, const Exec& exec) {
    View made[Of::kCodes];
    std::copy_n(out.begin(), Of::kCodes, made);
    made[Of::kY] = {};
    if (!made[Of::kRstd]) made[Of::kRstd].data = exec.workspace;
    statistics(in, made, exec);
    const View operands[] = {kAdd ? out[Of::kSum] : in[Of::kX], in[Of::kWeight], made[Of::kRstd]};
    codes(operands, out, exec);
  };
}

template <bool kAdd>
OpSupport query(const OpInstance& op, const CudaTraits&) {
  using Of = Form<kAdd>;
  const auto [rows, columns] = matrix_of(op, 0);
  OperandCheck check(op, Of::kInputs, Of::kCodes + 4);
  check_fused(check, op);
  operands::check_norm(check, op, false, kAdd);
  check_blocks(check, op, Of::kCodes, rows, columns);
  check.that(!is_square(op) || is_spread(op), "is not fused with scales laid out as weights' scales");
  check.that(fits_row(op, 0), kRowTooLong);
  if (check.ok()) check.that(!kAdd || op.outputs[Of::kSum].present, "needs the sum, which is read again");
  return check.support(static_cast<std::size_t>(rows) * sizeof(float));
}

}  // namespace

void add_norm_quantize_blocks_ops(OpTable& table) {
  for (const char* way : {"_quantize_blocks", "_quantize_squares"}) {
    table[std::string("rms_norm") + way] = {prepare<false>, query<false>};
    table[std::string("add_rms_norm") + way] = {prepare<true>, query<true>};
  }
}

}  // namespace quern::cuda
