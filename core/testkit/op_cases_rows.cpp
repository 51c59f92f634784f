// Ops that work row by row, and the sums over rows that are their gradients.
#include <cmath>

#include "quern/step_state.h"
#include "quern/testkit/op_cases.h"

namespace quern::testkit {

namespace {

constexpr DType kDtypes[] = {DType::f32, DType::bf16};
constexpr DType kBf16 = DType::bf16, kF32 = DType::f32;

/// Norm ops at sizes that fill packs, warps and blocks, and that do not.
const Extents kRows[] = {{1, 1}, {3, 7}, {33, 64}, {17, 896}, {5, 3584}, {130, 130}, {2, 9000}};
constexpr double kNormSlack = 2e-5;  // sums in fp32 over thousands of columns and rows

Attributes eps() { return {{"eps", 1e-6}}; }

/// A sum of two values, the first of which rounds before and may fall either side: a bf16 step (2^-7) of values up
/// to 4.
Tolerance fused_sum(Tolerance value, DType dtype) {
  if (dtype == DType::bf16) value.absolute += 0x1p-5;
  return value;
}

struct Heads {
  std::int64_t tokens, heads, kv_heads, head_dim;
  Extents packed() const { return {tokens, (heads + 2 * kv_heads) * head_dim}; }
  Attributes attributes() const {
    std::vector<double> frequencies;
    for (std::int64_t i = 0; i < head_dim / 2; ++i)
      frequencies.push_back(std::pow(10000.0, -2.0 * static_cast<double>(i) / static_cast<double>(head_dim)));
    return {{"heads", heads},
            {"kv_heads", kv_heads},
            {"head_dim", head_dim},
            {"eps", 1e-6},
            {"inverse_frequencies", frequencies},
            {"magnitude", 1.25}};
  }
};
const Heads kHeads[] = {{1, 1, 1, 2}, {7, 3, 1, 6}, {33, 7, 1, 64}, {20, 4, 2, 128}, {9, 2, 2, 34}, {65, 14, 2, 64}};

/// Of each head; `width`: of all queries and all keys.
void head_norm_cases(const OpRunner& runner, const Heads& h, DType dtype, Tolerance rotated, bool width) {
  const Geometry geometry{1, h.tokens};
  const Tolerance value = one_step(dtype, kNormSlack), fp32 = one_step(kF32, kNormSlack);
  const Extents stats{h.tokens, width ? 2 : h.heads + h.kv_heads};
  const Extents query{width ? h.heads * h.head_dim : h.head_dim}, key{width ? h.kv_heads * h.head_dim : h.head_dim};
  Attributes attributes = h.attributes();
  if (width) attributes.set("over", std::string("width"));
  auto qkv = [&](std::uint64_t seed) { return normal(dtype, h.packed(), seed); };
  auto positions = [&] { return integers(h.tokens, 0, h.tokens, 5); };
  auto forward = [&](const char* kind) {
    OpComparison op(kind, attributes, geometry);
    op.in(qkv(1)).in(normal(dtype, query, 2, 0.1, 1)).in(normal(dtype, key, 3, 0.1, 1));
    return op;
  };
  forward("head_norm").out(dtype, h.packed(), value).out(kF32, stats, fp32).run(runner);
  forward("head_norm_rope")
      .in(positions())
      .out(dtype, h.packed(), value)
      .out(kF32, stats, fp32)
      .out(dtype, h.packed(), {4 * rotated.relative, 4 * rotated.absolute})
      .run(runner);
  for (const bool turned : {false, true}) {
    auto gradient = [&] {
      OpComparison op(turned ? "rope_grad_head_norm_grad" : "head_norm_grad", attributes, geometry);
      op.in(qkv(1));
      if (turned) op.in(positions());
      op.in(qkv(4)).in(normal(dtype, query, 2, 0.1, 1)).in(normal(dtype, key, 3, 0.1, 1));
      op.in(normal(kF32, stats, 8, 0.1, 1));
      if (turned) op.out(dtype, h.packed(), rotated);
      op.out(dtype, h.packed(), turned ? Tolerance{8 * rotated.relative, 8 * rotated.absolute} : value);
      return op;
    };
    const Tolerance sum = turned ? Tolerance{8 * rotated.relative, 8 * rotated.absolute} : one_step(dtype, 2e-4);
    gradient().out(dtype, query, sum).out(dtype, key, sum).run(runner);
    gradient().sum(dtype, query, sum).sum(dtype, key, sum).run(runner);
  }
}

}  // namespace

void embedding_cases(const OpRunner& runner) {
  struct Shape {
    std::int64_t tokens, vocabulary, columns;
  };
  for (Shape s : {Shape{1, 1, 1}, Shape{7, 5, 3}, Shape{300, 1000, 64}, Shape{1111, 11, 200}, Shape{700, 5000, 130}}) {
    for (DType dtype : kDtypes) {
      OpComparison("embedding")
          .in(integers(s.tokens, 0, s.vocabulary, 1))
          .in(normal(dtype, {s.vocabulary, s.columns}, 2))
          .out(dtype, {s.tokens, s.columns}, {})
          .run(runner);
      for (DType sum : kDtypes) {
        auto gradient = [&] {
          OpComparison op("embedding_grad", {{"rows", s.vocabulary}});
          op.in(normal(dtype, {s.tokens, s.columns}, 3)).in(integers(s.tokens, 0, s.vocabulary, 1));
          return op;
        };
        Tolerance tolerance = one_step(sum, 1e-4);  // up to a hundred terms, summed in another order
        gradient().out(sum, {s.vocabulary, s.columns}, tolerance).run(runner);
        gradient().sum(sum, {s.vocabulary, s.columns}, tolerance).run(runner);
      }
    }
  }
}

void token_rows_cases(const OpRunner& runner) {
  struct Shape {
    std::int64_t rows, sequence, columns, tokens;
  };
  for (Shape s : {Shape{1, 2, 1, 1}, Shape{3, 5, 7, 2}, Shape{17, 9, 130, 1}, Shape{2, 50, 64, 5}})
    for (DType dtype : kDtypes) {
      const Geometry geometry{s.rows, s.sequence};
      const Extents all{geometry.tokens(), s.columns}, tokens{s.tokens, s.columns}, row{s.rows, s.columns};
      const Extents others{s.rows * (s.sequence - s.tokens), s.columns};
      OpComparison("prepend", {}, geometry)
          .in(normal(dtype, others, 1))
          .in(normal(dtype, tokens, 2))
          .out(dtype, all, {})
          .run(runner);
      for (DType sum : kDtypes) {
        const Tolerance tolerance = one_step(sum, 1e-5);  // up to 17 terms, in one order but in fp32 or fp64
        auto gradient = [&] {
          OpComparison op("prepend_grad", {{"tokens", s.tokens}}, geometry);
          op.in(normal(dtype, all, 3)).out(dtype, others, {});
          return op;
        };
        gradient().out(sum, tokens, tolerance).run(runner);
        gradient().sum(sum, tokens, tolerance).run(runner);
        gradient().unread(sum, tokens).run(runner);
      }
      for (const auto& [first, count] :
           {std::pair<std::int64_t, std::int64_t>{0, 1}, {s.tokens, 0}, {1, s.sequence - 1}}) {
        const Attributes attributes{{"first", first}, {"count", count}};
        OpComparison("row_mean", attributes, geometry)
            .in(normal(dtype, all, 4))
            .out(dtype, row, one_step(dtype, 1e-5))
            .run(runner);
        OpComparison("row_mean_grad", attributes, geometry)
            .in(normal(dtype, row, 5))
            .out(dtype, all, one_step(dtype, 1e-6))
            .run(runner);
      }
    }
}

void class_loss_cases(const OpRunner& runner) {
  struct Size {
    std::int64_t rows, classes;
  };
  for (const Size& size : {Size{1, 2}, {7, 10}, {33, 45}, {5, 1000}, {3, 21843}})
    for (DType dtype : kDtypes)
      for (double smoothing : {0.0, 0.1}) {
        const std::int64_t rows = size.rows, classes = size.classes;
        const Attributes attributes{{"smoothing", smoothing}};
        auto logits = [&] { return normal(dtype, {rows, classes}, 1, 3); };
        auto labels = [&] { return integers(rows, -1, classes, 2); };
        // Sums of thousands of terms in fp32, of losses of about 10.
        OpComparison("class_loss", attributes)
            .in(logits())
            .in(labels())
            .out(kF32, {rows}, {1e-5, 1e-4})
            .out(kF32, {rows}, {})
            .run(runner);
        OpComparison("class_loss_grad", attributes)
            .in(normal(kF32, {rows}, 3))
            .in(logits())
            .in(labels())
            .out(dtype, {rows, classes}, one_step(dtype, 1e-5))
            .run(runner);
      }
  for (std::int64_t count : {1, 257})
    OpComparison("weigh").in(normal(kF32, {count}, 1)).in(normal(kF32, {count}, 2)).out(kF32, {count}, {}).run(runner);
}

void rms_norm_cases(const OpRunner& runner) {
  for (const Extents& size : kRows) {
    for (DType dtype : kDtypes) {
      const Extents rows{size[0]}, columns{size[1]};
      const Tolerance value = one_step(dtype, kNormSlack), fp32 = one_step(kF32, kNormSlack);
      auto x = [&](std::uint64_t seed) { return normal(dtype, size, seed); };
      auto weight = [&] { return normal(dtype, columns, 9, 0.1, 1); };
      auto rstd = [&] { return normal(kF32, rows, 8, 0.1, 1); };
      OpComparison("rms_norm", eps()).in(x(1)).in(weight()).out(dtype, size, value).out(kF32, rows, fp32).run(runner);
      OpComparison("rms_norm", eps()).in(x(1)).in(weight()).out(dtype, size, value).unread(kF32, rows).run(runner);
      OpComparison("add_rms_norm", eps())
          .in(x(1))
          .in(x(2))
          .in(weight())
          .out(dtype, size, {})
          .out(dtype, size, value)
          .out(kF32, rows, fp32)
          .run(runner);
      for (bool add : {false, true}) {
        for (DType sum_dtype : {dtype, kF32}) {
          Tolerance sum = one_step(sum_dtype, 2e-4);
          auto weight_gradient = [&](OpComparison& op) {
            add ? op.sum(sum_dtype, columns, sum) : op.out(sum_dtype, columns, sum);
          };
          OpComparison gradient("rms_norm_grad");
          gradient.in(x(1)).in(x(2)).in(weight()).in(rstd()).out(dtype, size, value);
          weight_gradient(gradient);
          gradient.run(runner);
          OpComparison fused("rms_norm_grad_add");
          fused.in(x(1)).in(x(2)).in(weight()).in(rstd()).in(x(3)).unread(dtype, size);
          weight_gradient(fused);
          fused.out(dtype, size, fused_sum(value, dtype)).run(runner);
        }
      }
    }
  }
}

void layer_norm_cases(const OpRunner& runner) {
  for (const Extents& size : kRows) {
    for (DType dtype : kDtypes) {
      const Extents rows{size[0]}, columns{size[1]};
      // A row of one column has no variance: rstd is 1 / sqrt(eps), and multiplies rounding errors.
      if (size[1] < 2) continue;
      const Tolerance value = one_step(dtype, kNormSlack), fp32 = one_step(kF32, kNormSlack);
      auto x = [&](std::uint64_t seed) { return normal(dtype, size, seed); };
      auto weight = [&] { return normal(dtype, columns, 9, 0.1, 1); };
      auto bias = [&] { return normal(dtype, columns, 10); };
      OpComparison("layer_norm", eps())
          .in(x(1))
          .in(weight())
          .in(bias())
          .out(dtype, size, value)
          .out(kF32, rows, fp32)
          .out(kF32, rows, fp32)
          .run(runner);
      OpComparison("add_layer_norm", eps())
          .in(x(1))
          .in(x(2))
          .in(weight())
          .in(bias())
          .out(dtype, size, {})
          .out(dtype, size, value)
          .out(kF32, rows, fp32)
          .out(kF32, rows, fp32)
          .run(runner);
      auto gradient = [&](const char* kind) {
        OpComparison op(kind);
        op.in(x(1)).in(x(2)).in(weight()).in(normal(kF32, rows, 7, 0.1)).in(normal(kF32, rows, 8, 0.1, 1));
        return op;
      };
      const Tolerance sum = one_step(dtype, 2e-4);
      gradient("layer_norm_grad").out(dtype, size, value).out(dtype, columns, sum).out(dtype, columns, sum).run(runner);
      gradient("layer_norm_grad").out(dtype, size, value).sum(dtype, columns, sum).sum(dtype, columns, sum).run(runner);
      gradient("layer_norm_grad_add")
          .in(x(3))
          .unread(dtype, size)
          .out(dtype, columns, sum)
          .out(dtype, columns, sum)
          .out(dtype, size, fused_sum(value, dtype))
          .run(runner);
    }
  }
}

void head_cases(const OpRunner& runner) {
  for (const Heads& h : kHeads)
    for (DType dtype : kDtypes) {
      const Geometry geometry{1, h.tokens};
      // Cancelling terms differ by a step of their own, not of the sum.
      const Tolerance rotated = dtype == kBf16 ? Tolerance{0x1p-7, 0x1p-7} : Tolerance{1e-5, 1e-5};
      for (const char* kind : {"rope", "rope_grad"})
        OpComparison(kind, h.attributes(), geometry)
            .in(normal(dtype, h.packed(), 1))
            .in(integers(h.tokens, 0, h.tokens, 5))
            .out(dtype, h.packed(), rotated)
            .run(runner);
      for (const bool width : {false, true}) head_norm_cases(runner, h, dtype, rotated, width);
    }
}

void elementwise_cases(const OpRunner& runner) {
  for (Extents size :
       {Extents{1, 2}, Extents{3, 14}, Extents{33, 64}, Extents{17, 1792}, Extents{300, 130}, Extents{5, 9728}}) {
    const Extents half{size[0], size[1] / 2}, columns{size[1]};
    for (DType dtype : kDtypes) {
      auto x = [&](std::uint64_t seed) { return normal(dtype, size, seed); };
      auto y = [&](std::uint64_t seed) { return normal(dtype, half, seed); };
      const Tolerance value = one_step(dtype, 2e-6);
      OpComparison("add").in(x(1)).in(x(2)).out(dtype, size, {}).run(runner);
      OpComparison("swiglu").in(x(1)).out(dtype, half, value).run(runner);
      OpComparison("swiglu_grad").in(y(2)).in(x(1)).out(dtype, size, value).run(runner);
      OpComparison("geglu").in(x(1)).out(dtype, half, value).run(runner);
      OpComparison("geglu_grad").in(y(2)).in(x(1)).out(dtype, size, value).run(runner);
      OpComparison("scale", {{"factor", 1.7}}).in(x(1)).out(dtype, size, {}).run(runner);
      const Attributes dropout{{"probability", 0.3}, {"object", std::int64_t{2}}};
      const StepState step{.step = 3, .micro_step = 5, .seed_low = 9};
      OpComparison("dropout", dropout).in(x(1)).in(words(DType::u32, step)).out(dtype, size, {}).run(runner);
      OpComparison("dropout_grad", dropout)
          .in(x(2))
          .in(x(1))
          .in(words(DType::u32, step))
          .out(dtype, size, {})
          .run(runner);
      for (const char* approximation : {"erf", "tanh"}) {
        Attributes attributes{{"approximation", std::string(approximation)}};
        OpComparison("gelu", attributes).in(x(1)).out(dtype, size, value).run(runner);
        OpComparison("gelu_grad", attributes).in(x(2)).in(x(1)).out(dtype, size, value).run(runner);
      }
      for (DType sum : {dtype, kF32}) {
        OpComparison("column_sum").in(x(1)).out(sum, columns, one_step(sum, 5e-5)).run(runner);
        OpComparison("column_sum").in(x(1)).sum(sum, columns, one_step(sum, 5e-5)).run(runner);
      }
    }
  }
  for (std::int64_t rows : {127, 128, 129, 383}) {  // devices sum by tiles of rows
    OpComparison("column_sum").in(normal(kBf16, {rows, 24}, 1)).out(kF32, {24}, one_step(kF32, 5e-5)).run(runner);
    OpComparison("column_sum").in(normal(kBf16, {rows, 24}, 1)).sum(kF32, {24}, one_step(kF32, 5e-5)).run(runner);
  }
}

}  // namespace quern::testkit
