// embedding: y[n] = table[token[n]], and its gradient: rows of dy summed by token. Sums run in token order whatever the
// number of threads, because each vocabulary row is summed by one thread.

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>

#include "primitives/row_math.h"
#include "primitives/rows.h"
#include "runtime/kernels.h"
#include "runtime/operand_check.h"
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
  OperandCheck check(op, 2, 1);
  const Extents tokens = extents_of(op, 0);
  const Matrix table = matrix_of(op, 1);
  check.input(0, "tokens", tokens, DType::i32).input(1, "table", {table.rows, table.columns});
  return check.output(0, "y", {element_count(tokens), table.columns}).support();
}

/// Positions sorted by token, one token's ascending: token v is at order[first[v]] up to order[first[v + 1]].
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
  OperandCheck check(op, 2, 1);
  const Extents tokens = extents_of(op, 1);
  const std::int64_t count = element_count(tokens), columns = matrix_of(op, 0).columns;
  check.input(0, "dy", {count, columns}).input(1, "tokens", tokens, DType::i32);
  if (!check.ok()) return check.support();
  const std::int64_t vocabulary = op.outputs[0].extents.empty() ? 0 : op.outputs[0].extents[0];
  check.sum(0, "dtable", {vocabulary, columns});
  return check.support(float_bytes(vocabulary + 1) + float_bytes(count));
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
