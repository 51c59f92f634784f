// embedding: y[n] = table[token[n]], and its gradient: rows of dy summed by token. Sums run in token order whatever the
// number of threads, because each vocabulary row is summed by one thread.

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>
#include <string>

#include "primitives/row_math.h"
#include "primitives/rows.h"
#include "runtime/kernels.h"
#include "runtime/support.h"

namespace quern::cpu {

namespace {

void embed(std::span<const View> inputs, std::span<const View> outputs, const Exec&) {
  const View &tokens = inputs[0], &table = inputs[1], &y = outputs[0];
  check_indices(tokens, 0, table.extents[0], "tokens");
  const auto* token = tokens.as<std::int32_t>();
  const std::int64_t count = tokens.count(), columns = table.columns();
#pragma omp parallel for schedule(static)
  for (std::int64_t i = 0; i < count; ++i)
    store_row(y, i, load_row(table, token[i], target_row(y, i, scratch(0, columns))));
}

OpSupport query_embed(const OpInstance& op) {
  if (std::string text = check_operands(op, operands(0), 0); !text.empty()) return {text, 0};
  const Operand &tokens = op.inputs[0], &table = op.inputs[1], &y = op.outputs[0];
  bool fits = table.extents.size() == 2 && y.extents == Extents{element_count(tokens.extents), table.extents[1]};
  return {fits ? "" : "embedding: tokens (N) and table (V, C) give (N, C)", 0};
}

/// Positions sorted by token, those of one token ascending: token v is at order[first[v]] up to order[first[v + 1]].
struct Buckets {
  std::int32_t* first;  // (V + 1)
  std::int32_t* order;  // (N)
};

void sort_by_token(const std::int32_t* token, std::int64_t count, std::int64_t vocabulary, const Buckets& buckets) {
  std::fill_n(buckets.first, vocabulary + 1, 0);
  for (std::int64_t i = 0; i < count; ++i) ++buckets.first[token[i] + 1];
  for (std::int64_t v = 0; v < vocabulary; ++v) buckets.first[v + 1] += buckets.first[v];
  // Filling moves first[v] to the end of its bucket, which is the beginning of the next one.
  for (std::int64_t i = 0; i < count; ++i) buckets.order[buckets.first[token[i]]++] = static_cast<std::int32_t>(i);
  for (std::int64_t v = vocabulary; v > 0; --v) buckets.first[v] = buckets.first[v - 1];
  buckets.first[0] = 0;
}

/// One row of dtable: the sum of dy over the positions of its token, in fp64.
void sum_bucket(const View& dy, std::span<const std::int32_t> positions, const View& dtable, std::int64_t row,
                bool add) {
  const std::int64_t columns = dtable.columns(), begin = row * columns;
  if (positions.empty()) {
    if (!add)
      std::memset(dtable.as<char>() + static_cast<std::size_t>(begin) * size_of(dtable.dtype), 0,
                  static_cast<std::size_t>(columns) * size_of(dtable.dtype));
    return;
  }
  auto* sums = std::bit_cast<double*>(scratch(0, 2 * columns));
  float* sum = scratch(1, columns);
  std::fill_n(sums, columns, 0.0);
  for (std::int32_t position : positions) add_to_sums(load_row(dy, position, sum), columns, sums);
  round_sums(sums, columns, sum);
  if (add)
    accumulate(dtable, begin, columns, sum);
  else
    store(dtable, begin, columns, sum);
}

void embedding_grad(std::span<const View> inputs, std::span<const View> outputs, const Exec& exec, bool add) {
  const View &dy = inputs[0], &tokens = inputs[1], &dtable = outputs[0];
  const std::int64_t vocabulary = dtable.extents[0], count = tokens.count();
  check_indices(tokens, 0, vocabulary, "tokens");
  Workspace workspace(exec.workspace);
  Buckets buckets{workspace.integers(vocabulary + 1), workspace.integers(count)};
  sort_by_token(tokens.as<std::int32_t>(), count, vocabulary, buckets);
#pragma omp parallel for schedule(dynamic, 64)
  for (std::int64_t v = 0; v < vocabulary; ++v) {
    std::span<const std::int32_t> positions(buckets.order + buckets.first[v], buckets.order + buckets.first[v + 1]);
    sum_bucket(dy, positions, dtable, v, add);
  }
}

OpSupport query_grad(const OpInstance& op) {
  if (std::string text = check_operands(op, operands(1), operands(0)); !text.empty()) return {text, 0};
  const Operand &dy = op.inputs[0], &tokens = op.inputs[1], &dtable = op.outputs[0];
  std::int64_t count = element_count(tokens.extents);
  if (dtable.extents.size() != 2 || dy.extents != Extents{count, dtable.extents[1]}) {
    return {"embedding_grad: dy (N, C) and tokens (N) give (V, C)", 0};
  }
  return {{}, float_bytes(dtable.extents[0] + 1) + float_bytes(count)};
}

}  // namespace

void add_embedding_ops(OpTable& table) {
  table["embedding"] = {[](const OpInstance&) { return Launch(embed); }, query_embed};
  table["embedding_grad"] = {[](const OpInstance& op) -> Launch {
                               return [add = op.outputs[0].accumulate](
                                          std::span<const View> inputs, std::span<const View> outputs,
                                          const Exec& exec) { embedding_grad(inputs, outputs, exec, add); };
                             },
                             query_grad};
}

}  // namespace quern::cpu
