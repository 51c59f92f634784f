// Ops between tokens and rows, and a loss of a class for each row. Sums are taken in fp32, in the order of tokens and
// rows; none of these ops is large beside a matmul.

#include <algorithm>

#include "primitives/element.cuh"
#include "runtime/check.h"
#include "runtime/kernels.h"
#include "runtime/launch.cuh"
#include "runtime/operand_check.h"
#include "shared/operands/op_checks.h"

namespace quern::cuda {

namespace {

using operands::TokenRows;

constexpr int kThreads = 256;

/// A thread an element, in order.
unsigned blocks_of(std::int64_t elements) { return static_cast<unsigned>(ceil_divide(elements, kThreads)); }
__device__ __forceinline__ std::int64_t element_index() { return std::int64_t{blockIdx.x} * kThreads + threadIdx.x; }

template <class T>
__global__ void prepend_kernel(const T* __restrict__ x, const T* __restrict__ tokens, T* __restrict__ y,
                               const TokenRows of) {
  const std::int64_t i = element_index();
  if (i >= of.rows * of.sequence * of.columns) return;
  const std::int64_t token = i / of.columns, at = token % of.sequence;
  y[i] = at < of.count ? tokens[at * of.columns + i % of.columns]
                       : x[i - (token / of.sequence + 1) * of.count * of.columns];
}

template <class T>
__global__ void prepend_input_grad_kernel(const T* __restrict__ dy, T* __restrict__ dx, const TokenRows of) {
  const std::int64_t others = of.sequence - of.count, i = element_index();
  if (i >= of.rows * others * of.columns) return;
  dx[i] = dy[i + (i / of.columns / others + 1) * of.count * of.columns];
}

/// sums[r, c] (+)= factor times the sum over `count` of x[r * row + i * step, c].
template <class T, class Sum>
__global__ void sum_rows_kernel(const T* __restrict__ x, Sum* __restrict__ sums, std::int64_t rows,
                                std::int64_t columns, std::int64_t count, std::int64_t row, std::int64_t step,
                                float factor, bool add) {
  const std::int64_t i = element_index();
  if (i >= rows * columns) return;
  const T* from = x + i / columns * row * columns + i % columns;
  float sum = 0;
  for (std::int64_t at = 0; at < count; ++at) sum += to_float(from[at * step * columns]);
  sum *= factor;
  sums[i] = from_float<Sum>(add ? to_float(sums[i]) + sum : sum);
}

template <class T>
__global__ void row_mean_grad_kernel(const T* __restrict__ dmean, T* __restrict__ dx, float factor,
                                     const TokenRows of) {
  const std::int64_t i = element_index();
  if (i >= of.rows * of.sequence * of.columns) return;
  const std::int64_t token = i / of.columns, at = token % of.sequence - of.first;
  const bool inside = at >= 0 && at < of.count;
  dx[i] = from_float<T>(inside ? factor * to_float(dmean[token / of.sequence * of.columns + i % of.columns]) : 0.0f);
}

/// The whole block's, in the same order for every block.
template <class Combine>
__device__ float reduced(float value, float* shared, Combine combine) {
  __syncthreads();
  shared[threadIdx.x] = value;
  for (int half = kThreads / 2; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.x < half) shared[threadIdx.x] = combine(shared[threadIdx.x], shared[threadIdx.x + half]);
  }
  __syncthreads();
  return shared[0];
}

/// A block a row. With `dloss` the gradient, which may overwrite the logits, otherwise the loss, and whether the label
/// has the first of the largest logits. A label that is no class gives NaN, which the run's finite check reports.
template <class T>
__global__ void __launch_bounds__(kThreads)
    class_loss_kernel(const float* dloss, const T* logits, const std::int32_t* labels, float* losses, float* correct,
                      T* dlogits, std::int64_t classes, float smoothing) {
  __shared__ float shared[kThreads];
  const std::int64_t row = blockIdx.x;
  const T* x = logits + row * classes;
  const std::int32_t label = labels[row];
  const bool known = label < classes;
  const float label_logit = label >= 0 && known ? to_float(x[label]) : 0.0f;
  float largest = -INFINITY, exponentials = 0, sum = 0, before = 0;
  for (std::int64_t k = threadIdx.x; k < classes; k += kThreads) largest = fmaxf(largest, to_float(x[k]));
  largest = reduced(largest, shared, [](float a, float b) { return fmaxf(a, b); });
  for (std::int64_t k = threadIdx.x; k < classes; k += kThreads) {
    exponentials += expf(to_float(x[k]) - largest);
    sum += to_float(x[k]) - largest;
    before += k < label && to_float(x[k]) == largest ? 1.0f : 0.0f;
  }
  const auto add = [](float a, float b) { return a + b; };
  const float log_sum = logf(reduced(exponentials, shared, add));  // logsumexp - largest
  sum = reduced(sum, shared, add);
  const float share = smoothing / static_cast<float>(classes), nan = __int_as_float(0x7fc00000);
  if (dloss == nullptr) {
    const float loss = log_sum - (1 - smoothing) * (label_logit - largest) - share * sum;
    before = correct != nullptr ? reduced(before, shared, add) : 0.0f;
    if (threadIdx.x != 0) return;
    if (correct != nullptr) correct[row] = label >= 0 && label_logit == largest && before == 0 ? 1.0f : 0.0f;
    if (losses != nullptr) losses[row] = label < 0 ? 0.0f : known ? loss : nan;
    return;
  }
  const float factor = label < 0 ? 0.0f : known ? dloss[row] : nan;
  for (std::int64_t k = threadIdx.x; k < classes; k += kThreads) {
    const float softmax = expf(to_float(x[k]) - largest - log_sum);
    dlogits[row * classes + k] = from_float<T>(factor * (softmax - share - (k == label ? 1 - smoothing : 0.0f)));
  }
}

__global__ void weigh_kernel(const float* x, const float* factors, float* y, std::int64_t count) {
  const std::int64_t i = element_index();
  if (i < count) y[i] = x[i] * factors[i];
}

Launch prepare_prepend(const OpInstance& op, CudaContext&) {
  return [of = TokenRows(op)](std::span<const View> in, std::span<const View> out, const Exec& exec) {
    with_element(out[0].dtype, [&](auto element) {
      using T = decltype(element);
      prepend_kernel<<<blocks_of(out[0].count()), kThreads, 0, stream_of(exec)>>>(
          in[0].as<const T>(), in[1].as<const T>(), out[0].as<T>(), of);
    });
    QUERN_CUDA(cudaGetLastError());
  };
}

Launch prepare_prepend_grad(const OpInstance& op, CudaContext&) {
  return [of = TokenRows(op), add = op.outputs[1].accumulate](std::span<const View> in, std::span<const View> out,
                                                              const Exec& exec) {
    with_element(in[0].dtype, [&](auto element) {
      using T = decltype(element);
      if (out[0] && out[0].count() > 0)
        prepend_input_grad_kernel<<<blocks_of(out[0].count()), kThreads, 0, stream_of(exec)>>>(in[0].as<const T>(),
                                                                                               out[0].as<T>(), of);
      if (!out[1]) return;
      with_element(out[1].dtype, [&](auto sum) {
        using Sum = decltype(sum);
        sum_rows_kernel<<<blocks_of(out[1].count()), kThreads, 0, stream_of(exec)>>>(
            in[0].as<const T>(), out[1].as<Sum>(), of.count, of.columns, of.rows, 1, of.sequence, 1.0f, add);
      });
    });
    QUERN_CUDA(cudaGetLastError());
  };
}

Launch prepare_row_mean(const OpInstance& op, CudaContext&) {
  return [of = TokenRows(op)](std::span<const View> in, std::span<const View> out, const Exec& exec) {
    with_element(in[0].dtype, [&](auto element) {
      using T = decltype(element);
      sum_rows_kernel<<<blocks_of(out[0].count()), kThreads, 0, stream_of(exec)>>>(
          in[0].as<const T>() + of.first * of.columns, out[0].as<T>(), of.rows, of.columns, of.count, of.sequence, 1,
          1 / static_cast<float>(of.count), false);
    });
    QUERN_CUDA(cudaGetLastError());
  };
}

Launch prepare_row_mean_grad(const OpInstance& op, CudaContext&) {
  return [of = TokenRows(op)](std::span<const View> in, std::span<const View> out, const Exec& exec) {
    with_element(in[0].dtype, [&](auto element) {
      using T = decltype(element);
      row_mean_grad_kernel<<<blocks_of(out[0].count()), kThreads, 0, stream_of(exec)>>>(
          in[0].as<const T>(), out[0].as<T>(), 1 / static_cast<float>(of.count), of);
    });
    QUERN_CUDA(cudaGetLastError());
  };
}

Launch prepare_class_loss(const OpInstance& op, CudaContext&) {
  const bool gradient = op.kind == "class_loss_grad";
  return [=, smoothing = static_cast<float>(op.attributes.real("smoothing"))](
             std::span<const View> in, std::span<const View> out, const Exec& exec) {
    const View &logits = in[gradient ? 1 : 0], &labels = in[gradient ? 2 : 1];
    if (logits.rows() == 0) return;
    with_element(logits.dtype, [&](auto element) {
      using T = decltype(element);
      class_loss_kernel<<<static_cast<unsigned>(logits.rows()), kThreads, 0, stream_of(exec)>>>(
          gradient ? in[0].as<const float>() : nullptr, logits.as<const T>(), labels.as<const std::int32_t>(),
          gradient ? nullptr : out[0].as<float>(), gradient ? nullptr : out[1].as<float>(),
          gradient ? out[0].as<T>() : nullptr, logits.columns(), smoothing);
    });
    QUERN_CUDA(cudaGetLastError());
  };
}

Launch prepare_weigh(const OpInstance&, CudaContext&) {
  return [](std::span<const View> in, std::span<const View> out, const Exec& exec) {
    if (out[0].count() == 0) return;
    weigh_kernel<<<blocks_of(out[0].count()), kThreads, 0, stream_of(exec)>>>(
        in[0].as<const float>(), in[1].as<const float>(), out[0].as<float>(), out[0].count());
    QUERN_CUDA(cudaGetLastError());
  };
}

OpSupport query_weigh(const OpInstance& op, const CudaTraits&) {
  OperandCheck check(op, 2, 1);
  check.input(0, "x", extents_of(op, 0), DType::f32).input(1, "factors", extents_of(op, 0), DType::f32);
  return check.output(0, "y", extents_of(op, 0), DType::f32).support();
}

}  // namespace

void add_token_rows_ops(OpTable& table) {
  auto add = [&table](const char* kind, Launch (*prepare)(const OpInstance&, CudaContext&), std::size_t inputs,
                      std::size_t outputs) {
    table[kind] = {prepare, [=](const OpInstance& op, const CudaTraits&) {
                     return operands::check_token_rows(OperandCheck(op, inputs, outputs), op).support();
                   }};
  };
  add("prepend", prepare_prepend, 2, 1);
  add("prepend_grad", prepare_prepend_grad, 1, 2);
  add("row_mean", prepare_row_mean, 1, 1);
  add("row_mean_grad", prepare_row_mean_grad, 1, 1);
  table["class_loss"] = {prepare_class_loss, [](const OpInstance& op, const CudaTraits&) {
                           return operands::check_class_loss(OperandCheck(op, 2, 2), op).support();
                         }};
  table["class_loss_grad"] = {prepare_class_loss, [](const OpInstance& op, const CudaTraits&) {
                                return operands::check_class_loss(OperandCheck(op, 3, 1, 1), op).support();
                              }};
  table["weigh"] = {prepare_weigh, query_weigh};
}

}  // namespace quern::cuda
