// attention over packed qkv rows, and its gradient: flash-style blocks (Dao et al., "FlashAttention", 2022), so scores
// are never stored whole. Each thread takes whole blocks of outputs and sums them in a fixed order, with
// single-threaded GEMMs inside, so results do not depend on the number of threads.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include "attention/attention.h"
#include "primitives/rows.h"
#include "primitives/simd.h"
#include "primitives/softmax_rows.h"
#include "runtime/kernels.h"
#include "runtime/operand_check.h"
#include "runtime/support.h"

namespace quern::cpu {

namespace {

enum Scratch : int {
  kScores,
  kScoreGrads,
  kQueries,
  kKeys,
  kValues,
  kSums,
  kOutGrads,
  kKeyGrads,
  kValueGrads,
  kQueryGrads,
  kCapped
};

QUERN_CPU_CLONES float dot(const float* a, const float* b, std::int64_t count) {
  float sum = 0;
#pragma omp simd reduction(+ : sum)
  for (std::int64_t i = 0; i < count; ++i) sum += a[i] * b[i];
  return sum;
}

/// Scores become probabilities, and gradients of probabilities become gradients of scores: p (dp - delta) scale.
QUERN_CPU_CLONES void score_gradients(float* scores, float* grads, std::int64_t count, float logsumexp, float delta,
                                      float scale) {
#pragma omp simd
  for (std::int64_t i = 0; i < count; ++i) {
    float p = fast_exp(scores[i] - logsumexp);
    scores[i] = p;
    grads[i] = p * (grads[i] - delta) * scale;
  }
}

/// Part of a query's keys in the block of keys [key, key + count), relative to `key`.
KeyRange within_block(const KeyRange& range, std::int64_t key, std::int64_t count) {
  std::int64_t begin = std::clamp<std::int64_t>(range.begin - key, 0, count);
  return {begin, std::clamp<std::int64_t>(range.end - key, begin, count)};
}

/// Zeroes elements outside the range.
void mask_row(float* row, std::int64_t count, const KeyRange& inside) {
  std::fill_n(row, inside.begin, 0.0f);
  std::fill(row + inside.end, row + count, 0.0f);
}

// ---- forward ----

/// Running softmax of a block of queries: maxima and sums so far, and the unnormalised output.
struct Running {
  float maximum[kQueryBlock];
  double sum[kQueryBlock];
};

/// Scores of one block of keys become exponentials; outputs so far are rescaled to the new maxima.
void softmax_block(const AttentionShape& shape, const KeyRanges& ranges, std::int64_t query, std::int64_t queries,
                   std::int64_t key, std::int64_t keys, float* scores, float* sums, Running& running) {
  for (std::int64_t i = 0; i < queries; ++i) {
    float* row = scores + i * keys;
    KeyRange inside = within_block(ranges.of(query + i), key, keys);
    mask_row(row, keys, inside);
    const std::int64_t count = inside.end - inside.begin;
    if (count == 0) continue;
    if (shape.cap > 0) soft_cap(row + inside.begin, count, shape.cap, row + inside.begin);
    float maximum = std::max(running.maximum[i], row_maximum(row + inside.begin, count));
    double sum = exponentiate(row + inside.begin, count, maximum);
    if (running.sum[i] > 0) {
      float correction = std::exp(running.maximum[i] - maximum);
      sum += running.sum[i] * correction;
      multiply(sums + i * shape.head_dim, shape.head_dim, correction, sums + i * shape.head_dim);
    }
    running.maximum[i] = maximum;
    running.sum[i] = sum;
  }
}

/// Queries [query, query + queries) of one head.
void attend(const AttentionShape& shape, const KeyRanges& ranges, const View& qkv, std::int64_t query,
            std::int64_t queries, std::int64_t head, const View& out, const View& logsumexp) {
  const std::int64_t width = shape.head_dim, kv_head = head / shape.group();
  MatrixView q =
      load_block(qkv, query, queries, shape.query_column(head), width, scratch(kQueries, kQueryBlock * width));
  float* scores = scratch(kScores, kQueryBlock * kKeyBlock);
  float* sums = scratch(kSums, kQueryBlock * width);
  std::fill_n(sums, queries * width, 0.0f);
  Running running;
  std::fill_n(running.maximum, queries, -std::numeric_limits<float>::infinity());
  std::fill_n(running.sum, queries, 0.0);
  const KeyRange all = ranges.of_block(query, query + queries);
  for (std::int64_t key = all.begin; key < all.end; key += kKeyBlock) {
    const std::int64_t keys = std::min(kKeyBlock, all.end - key);
    MatrixView k = load_block(qkv, key, keys, shape.key_column(kv_head), width, scratch(kKeys, kKeyBlock * width));
    MatrixView v = load_block(qkv, key, keys, shape.value_column(kv_head), width, scratch(kValues, kKeyBlock * width));
    k.read = MatrixView::Read::transposed;
    gemm_here(queries, keys, width, shape.scale, q, k, 0, scores, keys);
    softmax_block(shape, ranges, query, queries, key, keys, scores, sums, running);
    gemm_here(queries, width, keys, 1, {scores, keys}, v, 1, sums, width);
  }
  for (std::int64_t i = 0; i < queries; ++i) {
    const std::int64_t begin = (query + i) * shape.heads * width + head * width;
    float* row = target(out, begin, sums + i * width);
    multiply(sums + i * width, width, static_cast<float>(1 / running.sum[i]), row);
    store(out, begin, width, row);
    if (logsumexp)
      logsumexp.as<float>()[(query + i) * shape.heads + head] =
          static_cast<float>(running.maximum[i] + std::log(running.sum[i]));
  }
}

void run_forward(const AttentionShape& shape, std::span<const View> inputs, std::span<const View> outputs,
                 const Exec& exec) {
  const KeyRanges ranges(shape, inputs.size() > 1 ? inputs[1] : View{}, static_cast<std::int32_t*>(exec.workspace));
  const std::int64_t blocks = (shape.sequence + kQueryBlock - 1) / kQueryBlock;
#pragma omp parallel for collapse(3) schedule(dynamic)
  for (std::int64_t b = 0; b < shape.batch; ++b) {
    for (std::int64_t head = 0; head < shape.heads; ++head) {
      for (std::int64_t block = 0; block < blocks; ++block) {
        const std::int64_t first = block * kQueryBlock, queries = std::min(kQueryBlock, shape.sequence - first);
        attend(shape, ranges, inputs[0], b * shape.sequence + first, queries, head, outputs[0], outputs[1]);
      }
    }
  }
}

// ---- gradient ----

struct GradOperands {
  const View &dout, &qkv, &out, &logsumexp, &dqkv;
};

/// One row of the micro-batch and one key head: keys and values, and the sums of their gradients over its query heads.
struct KeyHead {
  std::int64_t row_begin;   ///< first token of the row
  MatrixView keys, values;  ///< (sequence, head_dim)
  float *dkeys, *dvalues;   ///< (sequence, head_dim)
};

/// Gradients of the scores of queries [query, query + queries) against keys [key, key + keys), in place of both blocks:
/// scores become probabilities, `grads` (gradients of probabilities) gradients of scores.
void softmax_grad_block(const AttentionShape& shape, const KeyRanges& ranges, std::int64_t query, std::int64_t queries,
                        std::int64_t key, std::int64_t keys, std::int64_t head, const View& logsumexp,
                        const float* delta, float* scores, float* grads) {
  for (std::int64_t i = 0; i < queries; ++i) {
    float *score = scores + i * keys, *grad = grads + i * keys;
    KeyRange inside = within_block(ranges.of(query + i), key, keys);
    mask_row(score, keys, inside);
    mask_row(grad, keys, inside);
    const std::int64_t count = inside.end - inside.begin;
    float* capped = nullptr;
    if (shape.cap > 0) {
      capped = scratch(kCapped, kKeyBlock);
      soft_cap(score + inside.begin, count, shape.cap, capped);
      std::copy_n(capped, count, score + inside.begin);
    }
    score_gradients(score + inside.begin, grad + inside.begin, count,
                    logsumexp.as<float>()[(query + i) * shape.heads + head], delta[i], shape.scale);
    if (capped) soft_cap_grad(capped, count, shape.cap, grad + inside.begin);
  }
}

/// Adds one block of queries' share to the key head's gradients, and writes the queries' gradients to `dqueries`.
void attend_grad(const AttentionShape& shape, const KeyRanges& ranges, const GradOperands& operands, const KeyHead& kv,
                 std::int64_t query, std::int64_t queries, std::int64_t head, float* dqueries) {
  const std::int64_t width = shape.head_dim;
  MatrixView q =
      load_block(operands.qkv, query, queries, shape.query_column(head), width, scratch(kQueries, kQueryBlock * width));
  MatrixView dout =
      load_block(operands.dout, query, queries, head * width, width, scratch(kOutGrads, kQueryBlock * width));
  MatrixView out = load_block(operands.out, query, queries, head * width, width, scratch(kSums, kQueryBlock * width));
  float delta[kQueryBlock];  // sum of dout * out: what the softmax's normalisation takes from every key's gradient
  for (std::int64_t i = 0; i < queries; ++i)
    delta[i] = dot(dout.data + i * dout.stride, out.data + i * out.stride, width);
  float* scores = scratch(kScores, kQueryBlock * kKeyBlock);
  float* grads = scratch(kScoreGrads, kQueryBlock * kKeyBlock);
  const KeyRange all = ranges.of_block(query, query + queries);
  for (std::int64_t key = all.begin; key < all.end; key += kKeyBlock) {
    const std::int64_t keys = std::min(kKeyBlock, all.end - key), local = key - kv.row_begin;
    const MatrixView k{kv.keys.data + local * kv.keys.stride, kv.keys.stride};
    const MatrixView v{kv.values.data + local * kv.values.stride, kv.values.stride};
    gemm_here(queries, keys, width, shape.scale, q, {k.data, k.stride, MatrixView::Read::transposed}, 0, scores, keys);
    gemm_here(queries, keys, width, 1, dout, {v.data, v.stride, MatrixView::Read::transposed}, 0, grads, keys);
    softmax_grad_block(shape, ranges, query, queries, key, keys, head, operands.logsumexp, delta, scores, grads);
    gemm_here(keys, width, queries, 1, {scores, keys, MatrixView::Read::transposed}, dout, 1,
              kv.dvalues + local * width, width);
    gemm_here(keys, width, queries, 1, {grads, keys, MatrixView::Read::transposed}, q, 1, kv.dkeys + local * width,
              width);
    gemm_here(queries, width, keys, 1, {grads, keys}, k, key == all.begin ? 0 : 1, dqueries, width);
  }
}

void store_head(const View& view, std::int64_t row, std::int64_t rows, std::int64_t column, std::int64_t columns,
                const float* values) {
  for (std::int64_t i = 0; i < rows; ++i)
    store(view, (row + i) * view.columns() + column, columns, values + i * columns);
}

/// All gradients of one row's key head and its query heads. They are written last: dqkv may be qkv's memory, of
/// which this task reads just what it writes.
void key_head_grad(const AttentionShape& shape, const KeyRanges& ranges, const GradOperands& operands, std::int64_t b,
                   std::int64_t kv_head) {
  const std::int64_t width = shape.head_dim, size = shape.sequence * width, row = b * shape.sequence;
  KeyHead kv{row, {}, {}, scratch(kKeyGrads, size), scratch(kValueGrads, size)};
  kv.keys = load_block(operands.qkv, row, shape.sequence, shape.key_column(kv_head), width, scratch(kKeys, size));
  kv.values = load_block(operands.qkv, row, shape.sequence, shape.value_column(kv_head), width, scratch(kValues, size));
  std::fill_n(kv.dkeys, size, 0.0f);
  std::fill_n(kv.dvalues, size, 0.0f);
  float* dqueries = scratch(kQueryGrads, size);
  for (std::int64_t head = kv_head * shape.group(); head < (kv_head + 1) * shape.group(); ++head) {
    for (std::int64_t first = 0; first < shape.sequence; first += kQueryBlock) {
      const std::int64_t queries = std::min(kQueryBlock, shape.sequence - first);
      attend_grad(shape, ranges, operands, kv, row + first, queries, head, dqueries + first * width);
    }
    store_head(operands.dqkv, row, shape.sequence, shape.query_column(head), width, dqueries);
  }
  store_head(operands.dqkv, row, shape.sequence, shape.key_column(kv_head), width, kv.dkeys);
  store_head(operands.dqkv, row, shape.sequence, shape.value_column(kv_head), width, kv.dvalues);
}

void run_grad(const AttentionShape& shape, std::span<const View> inputs, std::span<const View> outputs,
              const Exec& exec) {
  const KeyRanges ranges(shape, inputs.size() > 4 ? inputs[4] : View{}, static_cast<std::int32_t*>(exec.workspace));
  const GradOperands operands{inputs[0], inputs[1], inputs[2], inputs[3], outputs[0]};
#pragma omp parallel for collapse(2) schedule(dynamic)
  for (std::int64_t b = 0; b < shape.batch; ++b) {
    for (std::int64_t kv_head = 0; kv_head < shape.kv_heads; ++kv_head)
      key_head_grad(shape, ranges, operands, b, kv_head);
  }
}

// ---- table ----

OpSupport query_attention(const OpInstance& op, std::size_t qkv, std::size_t documents) {
  const std::string& mask = op.attributes.word("mask");
  const AttentionShape shape = attention_shape(op);
  const std::int64_t tokens = shape.tokens(), width = shape.heads * shape.head_dim;
  const bool gradient = qkv != 0, masked = op.inputs.size() > documents;
  OperandCheck check(op, documents + (masked ? 1 : 0), gradient ? 1 : 2);
  check.that(mask == "causal" || mask == "full", "knows the masks causal and full, not \"" + mask + "\"");
  check.that(shape.heads > 0 && shape.kv_heads > 0 && shape.head_dim > 0 && shape.heads % shape.kv_heads == 0,
             "needs heads that are a multiple of kv_heads, all positive");
  check.input(qkv, "qkv", {tokens, shape.packed()});
  if (gradient) {
    check.input(0, "dy", {tokens, width}).input(2, "y", {tokens, width});
    check.input(3, "logsumexp", {tokens, shape.heads}, DType::f32).output(0, "dqkv", {tokens, shape.packed()});
  } else {
    check.output(0, "y", {tokens, width}).output(1, "logsumexp", {tokens, shape.heads}, DType::f32);
  }
  if (masked && op.inputs[documents].present) check.input(documents, "documents", {tokens + 1}, DType::i32);
  return check.support(float_bytes(2 * tokens));  // key ranges
}

using Run = void (*)(const AttentionShape&, std::span<const View>, std::span<const View>, const Exec&);

/// `qkv` and `documents` are the indices of these inputs.
CpuOp attention_op(Run run, std::size_t qkv, std::size_t documents) {
  return {[run](const OpInstance& op) -> Launch {
            return [run, shape = attention_shape(op)](std::span<const View> inputs, std::span<const View> outputs,
                                                      const Exec& exec) { run(shape, inputs, outputs, exec); };
          },
          [qkv, documents](const OpInstance& op) { return query_attention(op, qkv, documents); }};
}

}  // namespace

void add_attention_ops(OpTable& table) {
  table["attention"] = attention_op(run_forward, 0, 1);
  table["attention_grad"] = attention_op(run_grad, 1, 4);
}

}  // namespace quern::cpu
