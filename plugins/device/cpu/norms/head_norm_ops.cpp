// RMS norm of the queries and keys of a packed qkv (QK-norm), of each head or of all together, and its gradient, also
// fused with the rotation that follows the norm, or with that rotation's gradient. Values pass through.

#include <algorithm>

#include "attention/rope_table.h"
#include "norms/norm_ops.h"
#include "primitives/blocks.h"
#include "primitives/row_math.h"
#include "runtime/operand_check.h"
#include "shared/operands/op_checks.h"

namespace quern::cpu {

namespace {

enum Slot : int { kQueryWeight, kKeyWeight, kX, kOther, kY, kZ, kRstd };

struct HeadWeights {
  const float *query, *key;
};

HeadWeights load_weights(const View& query, const View& key, const NormedHeads& normed) {
  return {load(query, 0, normed.query_size(), scratch(kQueryWeight, normed.query_size())),
          load(key, 0, normed.key_size(), scratch(kKeyWeight, normed.key_size()))};
}

/// One packed row; rstd of each stretch.
void norm_row(const float* x, const NormedHeads& normed, const HeadWeights& weights, float eps, float* y, float* rstd) {
  const PackedHeads& packed = normed.packed;
  std::int64_t keys = packed.heads * packed.head_dim, values = packed.values_begin();
  head_norm(x, weights.query, normed.queries(), normed.query_size(), eps, y, rstd);
  head_norm(x + keys, weights.key, normed.keys(), normed.key_size(), eps, y + keys, rstd + normed.queries());
  if (x != y) std::copy(x + values, x + packed.packed(), y + values);
}

// qkv (N, (H + 2 K) D), query_weight (D), key_weight (D) -> y like qkv, rstd (N, H + K) f32
Launch prepare_head_norm(const OpInstance& op) {
  NormedHeads normed(op.attributes);
  auto eps = static_cast<float>(op.attributes.real("eps"));
  return [normed, eps](std::span<const View> in, std::span<const View> out, const Exec&) {
    const View &x = in[0], &y = out[0], &rstd = out[1];
    std::int64_t columns = x.columns();
    HeadWeights weights = load_weights(in[1], in[2], normed);
    for_blocks(x.rows(), kBlockRows, [&](std::int64_t, std::int64_t begin, std::int64_t end) {
      float *x_space = scratch(kX, columns), *y_space = scratch(kY, columns),
            *rstd_space = scratch(kRstd, normed.all());
      for (std::int64_t row = begin; row < end; ++row) {
        float* y_row = place_row(y, row, y_space);
        norm_row(load_row(x, row, x_space), normed, weights, eps, y_row, place_row(rstd, row, rstd_space));
        if (y) store_row(y, row, y_row);
      }
    });
  };
}

// qkv, query_weight (D), key_weight (D), positions (N) i32 -> y = head_norm(qkv), rstd (N, H + K) f32, z = rope(y)
Launch prepare_head_norm_rope(const OpInstance& op) {
  NormedHeads normed(op.attributes);
  auto eps = static_cast<float>(op.attributes.real("eps"));
  DType y_dtype = op.outputs[0].dtype;
  return [normed, packed = normed.packed, eps, y_dtype, table = make_rope_table(op, Rotation::forward)](
             std::span<const View> in, std::span<const View> out, const Exec&) {
    const View &x = in[0], &positions = in[3], &y = out[0], &rstd = out[1], &z = out[2];
    std::int64_t columns = x.columns();
    HeadWeights weights = load_weights(in[1], in[2], normed);
    table->require(positions);
    for_blocks(x.rows(), kBlockRows, [&](std::int64_t, std::int64_t begin, std::int64_t end) {
      float *x_space = scratch(kX, columns), *y_space = scratch(kY, columns);
      float *z_space = scratch(kZ, columns), *rstd_space = scratch(kRstd, normed.all());
      for (std::int64_t row = begin; row < end; ++row) {
        std::int64_t position = positions.as<std::int32_t>()[row];
        float* y_row = place_row(y, row, y_space);
        norm_row(load_row(x, row, x_space), normed, weights, eps, y_row, place_row(rstd, row, rstd_space));
        finish_row(y, y_dtype, row, columns, y_row);
        if (!z) continue;
        float* z_row = target_row(z, row, z_space);
        rotate_heads(y_row, table->cos(position), table->sin(position), packed.rotated(), packed.head_dim, z_row);
        std::copy(y_row + packed.values_begin(), y_row + columns, z_row + packed.values_begin());
        store_row(z, row, z_row);
      }
    });
  };
}

// dy, qkv (N, (H + 2 K) D), query_weight (D), key_weight (D), rstd (N, H + K) f32 -> dqkv, dquery_weight (D),
// dkey_weight (D); rotated: dy, positions (N) i32, qkv, ... -> d = rope_grad(dy), dqkv, ...
Launch prepare_head_norm_grad(const OpInstance& op, bool rotated) {
  NormedHeads normed(op.attributes);
  const std::size_t first_in = rotated ? 2 : 1, first_out = rotated ? 1 : 0;
  bool accumulate_query = op.outputs[first_out + 1].accumulate, accumulate_key = op.outputs[first_out + 2].accumulate;
  const auto table = rotated ? make_rope_table(op, Rotation::inverse) : nullptr;
  const DType d_dtype = op.outputs[0].dtype;
  return [=, packed = normed.packed](std::span<const View> in, std::span<const View> out, const Exec& exec) {
    const View &dy = in[0], &x = in[first_in], &rstd = in[first_in + 3];
    const View &dx = out[first_out], &dquery = out[first_out + 1], &dkey = out[first_out + 2];
    std::int64_t rows = x.rows(), columns = x.columns();
    HeadWeights weights = load_weights(in[first_in + 1], in[first_in + 2], normed);
    if (table) table->require(in[1]);
    bool summed = dquery || dkey;
    // Of the query weight, then of the key weight.
    ColumnSums sums(static_cast<float*>(exec.workspace), rows, normed.query_size() + normed.key_size());
    for_blocks(rows, kBlockRows, [&](std::int64_t block, std::int64_t begin, std::int64_t end) {
      float *x_space = scratch(kX, columns), *dy_space = scratch(kOther, columns), *dx_space = scratch(kY, columns);
      float* d_space = scratch(kZ, columns);
      float* partial = summed ? sums.start(block) : nullptr;
      for (std::int64_t row = begin; row < end; ++row) {
        const float *dy_row = load_row(dy, row, dy_space), *x_row = load_row(x, row, x_space);
        if (table) {
          const std::int64_t position = in[1].as<std::int32_t>()[row];
          rotate_heads(dy_row, table->cos(position), table->sin(position), packed.rotated(), packed.head_dim, d_space);
          std::copy(dy_row + packed.values_begin(), dy_row + columns, d_space + packed.values_begin());
          finish_row(out[0], d_dtype, row, columns, d_space);
          dy_row = d_space;
        }
        const float* rstd_row = rstd.as<float>() + row * normed.all();
        float* dx_row = place_row(dx, row, dx_space);
        for (std::int64_t i = 0, at = 0; i < normed.all(); ++i) {
          const bool is_key = i >= normed.queries();
          const std::int64_t size = is_key ? normed.key_size() : normed.query_size();
          rms_grad(dy_row + at, x_row + at, is_key ? weights.key : weights.query, rstd_row[i], size, dx_row + at,
                   summed ? partial + (is_key ? normed.query_size() : 0) : nullptr);
          at += size;
        }
        if (dy_row != dx_row)
          std::copy(dy_row + packed.values_begin(), dy_row + columns, dx_row + packed.values_begin());
        if (dx) store_row(dx, row, dx_row);
      }
    });
    if (dquery) sums.finish(dquery, accumulate_query);
    if (dkey) sums.finish(dkey, accumulate_key, normed.query_size());
  };
}

OpSupport query_head_norm(const OpInstance& op, bool rotated) {
  OperandCheck check(op, rotated ? 4 : 3, rotated ? 3 : 2);
  operands::check_head_norm(check, op, rotated);
  return check.support();
}

OpSupport query_head_norm_grad(const OpInstance& op, bool rotated) {
  const NormedHeads normed(op.attributes);
  const std::size_t x = rotated ? 2 : 1, dx = rotated ? 1 : 0;
  OperandCheck check(op, x + 4, dx + 3);
  operands::check_head_norm_grad(check, op, rotated);
  bool summed = check.ok() && (op.outputs[dx + 1].present || op.outputs[dx + 2].present);
  return check.support(summed ? ColumnSums::bytes(matrix_of(op, x).rows, normed.query_size() + normed.key_size()) : 0);
}

}  // namespace

void add_head_norm_ops(OpTable& table) {
  table["head_norm"] = {prepare_head_norm, [](const OpInstance& op) { return query_head_norm(op, false); }};
  table["head_norm_rope"] = {prepare_head_norm_rope, [](const OpInstance& op) { return query_head_norm(op, true); }};
  table["head_norm_grad"] = {[](const OpInstance& op) { return prepare_head_norm_grad(op, false); },
                             [](const OpInstance& op) { return query_head_norm_grad(op, false); }};
  table["rope_grad_head_norm_grad"] = {[](const OpInstance& op) { return prepare_head_norm_grad(op, true); },
                                       [](const OpInstance& op) { return query_head_norm_grad(op, true); }};
}

}  // namespace quern::cpu
