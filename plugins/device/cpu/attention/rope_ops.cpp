// Rotary position embedding of a packed qkv: query and key heads are rotated half-split as in Hugging Face, values pass
// through. The gradient is the inverse rotation.

#include <algorithm>
#include <string>

#include "attention/rope_table.h"
#include "primitives/blocks.h"
#include "primitives/row_math.h"
#include "quern/error.h"
#include "runtime/kernels.h"
#include "runtime/operand_check.h"
#include "shared/rope/rope_rows.h"

namespace quern::cpu {

RopeTable::RopeTable(const OpInstance& op, Rotation rotation) : positions_(op.geometry.sequence) {
  half_ = static_cast<std::int64_t>(op.attributes.list("inverse_frequencies").size());
  values_.resize(static_cast<std::size_t>(positions_ * 2 * half_));
  const double turn = rotation == Rotation::forward ? 1.0 : -1.0;
  for_blocks(positions_, kBlockRows, [&](std::int64_t, std::int64_t begin, std::int64_t end) {
    rope::make_rows(op, begin, end, turn, values_.data() + begin * 2 * half_);
  });
}

void RopeTable::require(const View& positions) const {
  const auto* begin = positions.as<std::int32_t>();
  const auto* end = begin + positions.count();
  const auto* bad = std::find_if(begin, end, [this](std::int32_t p) { return p < 0 || p >= positions_; });
  if (bad == end) return;
  throw Error(ErrorCode::input, {.where = "rope, token " + std::to_string(bad - begin),
                                 .what = "position outside the sequence",
                                 .found = std::to_string(*bad),
                                 .expected = "0 to " + std::to_string(positions_ - 1),
                                 .next = "check the data source's positions against the configured sequence length"});
}

std::shared_ptr<const RopeTable> make_rope_table(const OpInstance& op, Rotation rotation) {
  return std::make_shared<const RopeTable>(op, rotation);
}

namespace {

enum Slot : int { kX, kY };

// qkv (N, (H + 2 K) D), positions (N) i32 -> y like qkv
Launch prepare_rope(const OpInstance& op, Rotation rotation) {
  PackedHeads packed(op.attributes);
  return [packed, table = make_rope_table(op, rotation)](std::span<const View> in, std::span<const View> out,
                                                         const Exec&) {
    const View &x = in[0], &positions = in[1], &y = out[0];
    std::int64_t columns = x.columns();
    table->require(positions);
    for_blocks(x.rows(), kBlockRows, [&](std::int64_t, std::int64_t begin, std::int64_t end) {
      float *x_space = scratch(kX, columns), *y_space = scratch(kY, columns);
      for (std::int64_t row = begin; row < end; ++row) {
        std::int64_t position = positions.as<std::int32_t>()[row];
        const float* x_row = load_row(x, row, x_space);
        float* y_row = target_row(y, row, y_space);
        rotate_heads(x_row, table->cos(position), table->sin(position), packed.rotated(), packed.head_dim, y_row);
        if (x_row != y_row) std::copy(x_row + packed.values_begin(), x_row + columns, y_row + packed.values_begin());
        store_row(y, row, y_row);
      }
    });
  };
}

OpSupport query_rope(const OpInstance& op) {
  OperandCheck check(op, 2, 1);
  check_packed(check, op, 0, "qkv");
  check_rope(check, op, 1);
  return check.output(0, "y", extents_of(op, 0)).support();
}

}  // namespace

void add_rope_ops(OpTable& table) {
  table["rope"] = {[](const OpInstance& op) { return prepare_rope(op, Rotation::forward); }, query_rope};
  table["rope_grad"] = {[](const OpInstance& op) { return prepare_rope(op, Rotation::inverse); }, query_rope};
}

}  // namespace quern::cpu
