#include "attention/attention.h"

#include <algorithm>

#include "primitives/rows.h"
#include "quern/error.h"

namespace quern::cpu {

namespace {

[[noreturn]] void refuse_documents(std::int64_t index, const std::string& found, const std::string& expected) {
  throw Error(ErrorCode::input,
              {.where = "documents[" + std::to_string(index) + "]",
               .what = "not the start of a document",
               .found = found,
               .expected = expected,
               .next = "offsets ascend from 0 to the number of tokens, and no document crosses a row"});
}

}  // namespace

AttentionShape attention_shape(const OpInstance& op) {
  AttentionShape shape;
  shape.batch = op.geometry.batch;
  shape.sequence = op.geometry.sequence;
  shape.heads = op.attributes.integer("heads");
  shape.kv_heads = op.attributes.integer("kv_heads");
  shape.head_dim = op.attributes.integer("head_dim");
  shape.causal = op.attributes.word("mask") == "causal";
  shape.window = op.attributes.integer_or("window", 0);
  shape.scale = static_cast<float>(op.attributes.real("scale"));
  shape.cap = static_cast<float>(op.attributes.real_or("cap", 0));
  return shape;
}

KeyRanges::KeyRanges(const AttentionShape& shape, const View& documents, std::int32_t* memory)
    : begin_(memory), end_(memory + shape.tokens()), causal_(shape.causal) {
  const std::int64_t tokens = shape.tokens();
  auto fill = [&](std::int64_t from, std::int64_t to) {
    for (std::int64_t i = from; i < to; ++i)
      begin_[i] = static_cast<std::int32_t>(shape.window > 0 ? std::max(from, i - shape.window + 1) : from);
    std::fill(end_ + from, end_ + to, static_cast<std::int32_t>(to));
  };
  if (!documents) {
    for (std::int64_t row = 0; row < shape.batch; ++row) fill(row * shape.sequence, (row + 1) * shape.sequence);
    return;
  }
  const auto* start = documents.as<std::int32_t>();
  if (start[0] != 0) refuse_documents(0, std::to_string(start[0]), "0");
  for (std::int64_t i = 0, from = 0; from < tokens; ++i) {
    std::int64_t row_end = (from / shape.sequence + 1) * shape.sequence;
    std::int64_t to = i + 1 < documents.count() ? start[i + 1] : -1;
    if (to <= from || to > row_end) {
      refuse_documents(i + 1, std::to_string(to), std::to_string(from + 1) + " to " + std::to_string(row_end));
    }
    fill(from, to);
    from = to;
  }
}

MatrixView load_block(const View& view, std::int64_t row, std::int64_t rows, std::int64_t column, std::int64_t columns,
                      float* panel) {
  const std::int64_t stride = view.columns(), begin = row * stride + column;
  if (view.dtype == DType::f32) return {view.as<float>() + begin, stride};
  for (std::int64_t i = 0; i < rows; ++i) load(view, begin + i * stride, columns, panel + i * columns);
  return {panel, columns};
}

}  // namespace quern::cpu
