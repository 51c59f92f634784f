// Every op kind of the CUDA device against the CPU device, at odd sizes, in fp32 and bf16, adding and overwriting.
#include <cmath>

#include "op_comparison.h"
#include "quern/step_state.h"

using namespace quern;
using namespace quern::cuda;

namespace {

constexpr DType kDtypes[] = {DType::f32, DType::bf16};
constexpr DType kBf16 = DType::bf16, kF32 = DType::f32;

std::int64_t flag(bool value) { return value ? 1 : 0; }

/// Sums of k products of order one: each of k additions rounds a partial sum of order sqrt(k), 2^-24 of it, and these
/// errors add like a random walk, to 6e-8 k; six times that for the worst of many.
Tolerance product(DType dtype, std::int64_t k) { return one_step(dtype, 4e-7 * static_cast<double>(k) + 1e-6); }
/// Where the product is added to a bf16 y, the library may round it to bf16 first: half a step (2^-9) of the largest of
/// some ten thousand products of deviation sqrt(k), which is about four deviations.
Tolerance added_product(DType dtype, std::int64_t k) {
  Tolerance tolerance = product(dtype, k);
  if (dtype == DType::bf16) tolerance.absolute += 0x1p-9 * 4 * std::sqrt(static_cast<double>(k));
  return tolerance;
}

struct Matmul {
  std::int64_t m, n, k;
  bool transpose_a = false, transpose_b = false;
};

OpComparison matmul(const Matmul& s, DType in, double deviation = 1) {
  Extents a = s.transpose_a ? Extents{s.k, s.m} : Extents{s.m, s.k};
  Extents b = s.transpose_b ? Extents{s.n, s.k} : Extents{s.k, s.n};
  OpComparison op("matmul", {{"transpose_a", flag(s.transpose_a)}, {"transpose_b", flag(s.transpose_b)}});
  op.in(normal(in, a, 1, deviation)).in(normal(in, b, 2, deviation));
  return op;
}

}  // namespace

TEST_CASE("matmul: layouts, formats, bias and sums") {
  DevicePair pair = open_pair();
  for (bool ta : {false, true}) {
    for (bool tb : {false, true}) {
      for (Matmul s :
           {Matmul{64, 128, 96}, Matmul{17, 33, 65}, Matmul{1, 8, 40}, Matmul{256, 40, 1024}, Matmul{5, 1, 3}}) {
        s.transpose_a = ta, s.transpose_b = tb;
        for (DType in : kDtypes) {
          for (DType out : {in, kF32}) {
            matmul(s, in).out(out, {s.m, s.n}, product(out, s.k)).run(pair);
            matmul(s, in).sum(out, {s.m, s.n}, added_product(out, s.k)).run(pair);
            matmul(s, in).in(normal(out, {s.n}, 3)).out(out, {s.m, s.n}, product(out, s.k)).run(pair);
          }
        }
      }
    }
  }
}

TEST_CASE("matmul: a bias that is added apart rounds once, twice where y accumulates") {
  DevicePair pair = open_pair();
  Matmul s{24, 40, 64, false, true};
  matmul(s, kBf16).in(normal(kF32, {s.n}, 3)).out(kBf16, {s.m, s.n}, {0x1p-6, 0.1}).run(pair);
  matmul(s, kBf16).in(normal(kBf16, {s.n}, 3)).sum(kBf16, {s.m, s.n}, {0x1p-6, 0.1}).run(pair);
  matmul(s, kBf16).in(normal(kF32, {s.n}, 3)).out(kF32, {s.m, s.n}, product(kF32, s.k)).run(pair);
}

TEST_CASE("matmul: 8-bit operands with scales") {
  DevicePair pair = open_pair();
  for (auto [a, b] : {std::pair{DType::e4m3, DType::e4m3}, {DType::e5m2, DType::e4m3}, {DType::e4m3, DType::e5m2}}) {
    for (DType out : {kBf16, kF32}) {
      for (Matmul s : {Matmul{32, 48, 64, false, true}, Matmul{128, 256, 512, false, true}}) {
        OpComparison op("matmul", {{"transpose_b", std::int64_t{1}}});
        op.in(normal(a, {s.m, s.k}, 1)).in(normal(b, {s.n, s.k}, 2)).absent();
        op.in(normal(kF32, {1}, 4, 0, 0.5)).in(normal(kF32, {1}, 5, 0, 0.25));
        // Tensor cores keep about 14 bits of each product's sum: relative to values of order sqrt(k) / 8.
        double slack = 0x1p-12 * std::sqrt(static_cast<double>(s.k));
        op.out(out, {s.m, s.n}, {out == kBf16 ? 0x1p-7 : 0x1p-10, slack});
        std::string refusal = pair.gpu->query(op.instance()).refusal;
        if (refusal.find("compute capability") != std::string::npos) {
          MESSAGE("skipped: " << refusal);
          return;
        }
        op.run(pair);
      }
    }
  }
}

TEST_CASE("transpose and cast move and round as the CPU does, to the bit") {
  DevicePair pair = open_pair();
  for (Extents size :
       {Extents{1, 1}, Extents{64, 64}, Extents{33, 70}, Extents{129, 8}, Extents{5, 1000}, Extents{272, 144}}) {
    Extents turned{size[1], size[0]};
    for (DType dtype : {kF32, kBf16, DType::e4m3, DType::i8})
      OpComparison("transpose").in(normal(dtype, size, 1, 10)).out(dtype, turned, {}).run(pair);
    for (DType from : {kF32, kBf16, DType::e4m3, DType::e5m2}) {
      for (DType to : {kF32, kBf16, DType::e4m3, DType::e5m2}) {
        OpComparison("cast", {{"dtype", std::string(name_of(to))}})
            .in(normal(from, size, 1, 200))
            .out(to, size, {})
            .run(pair);
      }
    }
  }
}

TEST_CASE("embedding and its gradient") {
  DevicePair pair = open_pair();
  struct Shape {
    std::int64_t tokens, vocabulary, columns;
  };
  for (Shape s : {Shape{1, 1, 1}, Shape{7, 5, 3}, Shape{300, 1000, 64}, Shape{1111, 11, 200}, Shape{700, 5000, 130}}) {
    for (DType dtype : kDtypes) {
      OpComparison("embedding")
          .in(integers(s.tokens, 0, s.vocabulary, 1))
          .in(normal(dtype, {s.vocabulary, s.columns}, 2))
          .out(dtype, {s.tokens, s.columns}, {})
          .run(pair);
      for (DType sum : kDtypes) {
        auto gradient = [&] {
          OpComparison op("embedding_grad", {{"rows", s.vocabulary}});
          op.in(normal(dtype, {s.tokens, s.columns}, 3)).in(integers(s.tokens, 0, s.vocabulary, 1));
          return op;
        };
        Tolerance tolerance = one_step(sum, 1e-4);  // up to a hundred terms, summed in another order
        gradient().out(sum, {s.vocabulary, s.columns}, tolerance).run(pair);
        gradient().sum(sum, {s.vocabulary, s.columns}, tolerance).run(pair);
      }
    }
  }
}

TEST_CASE("embedding_grad of tokens as uneven as words are") {
  DevicePair pair = open_pair();
  std::vector<std::int32_t> tokens;  // a third are seven frequent ones
  for (std::int32_t i = 0; i < 5003; ++i) tokens.push_back(i % 3 == 0 ? i * 5 % 7 : i * 79 % 20000);
  for (std::int64_t columns : {130, 896}) {
    for (DType dtype : kDtypes) {
      OpComparison op("embedding_grad", {{"rows", std::int64_t{20000}}});
      op.in(normal(dtype, {5003, columns}, 3)).in(integer_list(tokens));
      op.sum(kF32, {20000, columns}, {1e-4, 5e-4}).run(pair);  // up to 240 terms, summed in another order
    }
  }
}

TEST_CASE("lm_loss and its gradients, in one chunk and in several") {
  DevicePair pair = open_pair();
  struct Shape {
    std::int64_t tokens, width, vocabulary, chunk;
  };
  for (Shape s : {Shape{5, 16, 37, 5}, Shape{64, 32, 256, 64}, Shape{50, 24, 1001, 16}, Shape{33, 64, 9000, 20},
                  Shape{9, 16, 50257, 9}, Shape{12, 16, 152064, 8}, Shape{3, 8, 260000, 3}}) {
    for (DType dtype : kDtypes) {
      Attributes attributes{{"chunk", s.chunk}, {"seed", 4.0}, {"z_loss", 0.001}};
      // Values of deviation one half give logits of deviation sqrt(width) / 4 at most 2.
      auto inputs = [&](const char* kind) {
        OpComparison op(kind, attributes);
        op.in(normal(dtype, {s.tokens, s.width}, 1, 0.5)).in(normal(dtype, {s.vocabulary, s.width}, 2, 0.5));
        op.in(integers(s.tokens, -1, s.vocabulary, 3));
        return op;
      };
      // A logit at the edge of two bf16 values may round either way: a step of 2^-4 between 8 and 16.
      Tolerance loss = dtype == kBf16 ? Tolerance{1e-3, 0.07} : Tolerance{1e-5, 1e-5};
      // Each chunk's share of the weight's gradient rounds on its own.
      Tolerance gradient = dtype == kBf16 ? Tolerance{0.03, 0.03} : Tolerance{1e-4, 2e-5};
      inputs("lm_loss").out(kF32, {s.tokens}, loss).run(pair);
      auto train = [&] { return inputs("lm_loss_train").out(kF32, {s.tokens}, loss); };
      for (DType sum : {dtype, kF32}) {
        train().out(dtype, {s.tokens, s.width}, gradient).out(sum, {s.vocabulary, s.width}, gradient).run(pair);
        train().out(dtype, {s.tokens, s.width}, gradient).sum(sum, {s.vocabulary, s.width}, gradient).run(pair);
      }
      train().unread(dtype, {s.tokens, s.width}).out(dtype, {s.vocabulary, s.width}, gradient).run(pair);
    }
  }
}

TEST_CASE("loss_stats") {
  DevicePair pair = open_pair();
  for (std::int64_t tokens : {1, 33, 1024, 5000}) {
    auto op = [&] {
      OpComparison op("loss_stats");
      op.in(normal(kF32, {tokens}, 1)).in(integers(tokens, -1, 3, 2));
      return op;
    };
    op().out(DType::f64, {4}, {1e-6, 1e-6}).run(pair);
    op().sum(DType::f64, {4}, {1e-6, 1e-6}).run(pair);
  }
}

namespace {

/// Norm ops at sizes that fill packs, warps and blocks, and that do not.
const Extents kRows[] = {{1, 1}, {3, 7}, {33, 64}, {17, 896}, {5, 3584}, {130, 130}, {2, 9000}};
constexpr double kNormSlack = 2e-5;  // fp32 sums over thousands of columns and rows

Attributes eps() { return {{"eps", 1e-6}}; }

}  // namespace

namespace {

/// A sum of two values, the first of which rounds before and may fall either side: a bf16 step (2^-7) of values up
/// to 4.
Tolerance fused_sum(Tolerance value, DType dtype) {
  if (dtype == DType::bf16) value.absolute += 0x1p-5;
  return value;
}

}  // namespace

TEST_CASE("rms_norm family") {
  DevicePair pair = open_pair();
  for (const Extents& size : kRows) {
    for (DType dtype : kDtypes) {
      const Extents rows{size[0]}, columns{size[1]};
      const Tolerance value = one_step(dtype, kNormSlack), fp32 = one_step(kF32, kNormSlack);
      auto x = [&](std::uint64_t seed) { return normal(dtype, size, seed); };
      auto weight = [&] { return normal(dtype, columns, 9, 0.1, 1); };
      auto rstd = [&] { return normal(kF32, rows, 8, 0.1, 1); };
      OpComparison("rms_norm", eps()).in(x(1)).in(weight()).out(dtype, size, value).out(kF32, rows, fp32).run(pair);
      OpComparison("rms_norm", eps()).in(x(1)).in(weight()).out(dtype, size, value).unread(kF32, rows).run(pair);
      OpComparison("add_rms_norm", eps())
          .in(x(1))
          .in(x(2))
          .in(weight())
          .out(dtype, size, {})
          .out(dtype, size, value)
          .out(kF32, rows, fp32)
          .run(pair);
      for (bool add : {false, true}) {
        for (DType sum_dtype : {dtype, kF32}) {
          Tolerance sum = one_step(sum_dtype, 2e-4);
          auto weight_gradient = [&](OpComparison& op) {
            add ? op.sum(sum_dtype, columns, sum) : op.out(sum_dtype, columns, sum);
          };
          OpComparison gradient("rms_norm_grad");
          gradient.in(x(1)).in(x(2)).in(weight()).in(rstd()).out(dtype, size, value);
          weight_gradient(gradient);
          gradient.run(pair);
          OpComparison fused("rms_norm_grad_add");
          fused.in(x(1)).in(x(2)).in(weight()).in(rstd()).in(x(3)).unread(dtype, size);
          weight_gradient(fused);
          fused.out(dtype, size, fused_sum(value, dtype)).run(pair);
        }
      }
    }
  }
}

TEST_CASE("layer_norm family") {
  DevicePair pair = open_pair();
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
          .run(pair);
      OpComparison("add_layer_norm", eps())
          .in(x(1))
          .in(x(2))
          .in(weight())
          .in(bias())
          .out(dtype, size, {})
          .out(dtype, size, value)
          .out(kF32, rows, fp32)
          .out(kF32, rows, fp32)
          .run(pair);
      auto gradient = [&](const char* kind) {
        OpComparison op(kind);
        op.in(x(1)).in(x(2)).in(weight()).in(normal(kF32, rows, 7, 0.1)).in(normal(kF32, rows, 8, 0.1, 1));
        return op;
      };
      const Tolerance sum = one_step(dtype, 2e-4);
      gradient("layer_norm_grad").out(dtype, size, value).out(dtype, columns, sum).out(dtype, columns, sum).run(pair);
      gradient("layer_norm_grad").out(dtype, size, value).sum(dtype, columns, sum).sum(dtype, columns, sum).run(pair);
      gradient("layer_norm_grad_add")
          .in(x(3))
          .unread(dtype, size)
          .out(dtype, columns, sum)
          .out(dtype, columns, sum)
          .out(dtype, size, fused_sum(value, dtype))
          .run(pair);
    }
  }
}

namespace {

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

}  // namespace

TEST_CASE("rope, head_norm and their gradients") {
  DevicePair pair = open_pair();
  for (const Heads& h : kHeads) {
    for (DType dtype : kDtypes) {
      const Geometry geometry{1, h.tokens};
      const Tolerance value = one_step(dtype, kNormSlack), fp32 = one_step(kF32, kNormSlack);
      const Extents stats{h.tokens, h.heads + h.kv_heads}, size{h.head_dim};
      auto qkv = [&](std::uint64_t seed) { return normal(dtype, h.packed(), seed); };
      auto positions = [&] { return integers(h.tokens, 0, h.tokens, 5); };
      auto weight = [&](std::uint64_t seed) { return normal(dtype, size, seed, 0.1, 1); };
      // Cancelling products differ by a step of their own, not of the sum.
      Tolerance rotated = dtype == kBf16 ? Tolerance{0x1p-7, 0x1p-7} : Tolerance{1e-5, 1e-5};
      for (const char* kind : {"rope", "rope_grad"})
        OpComparison(kind, h.attributes(), geometry)
            .in(qkv(1))
            .in(positions())
            .out(dtype, h.packed(), rotated)
            .run(pair);
      OpComparison("head_norm", h.attributes(), geometry)
          .in(qkv(1))
          .in(weight(2))
          .in(weight(3))
          .out(dtype, h.packed(), value)
          .out(kF32, stats, fp32)
          .run(pair);
      OpComparison("head_norm_rope", h.attributes(), geometry)
          .in(qkv(1))
          .in(weight(2))
          .in(weight(3))
          .in(positions())
          .out(dtype, h.packed(), value)
          .out(kF32, stats, fp32)
          .out(dtype, h.packed(), {4 * rotated.relative, 4 * rotated.absolute})
          .run(pair);
      auto gradient = [&] {
        OpComparison op("head_norm_grad", h.attributes(), geometry);
        op.in(qkv(1))
            .in(qkv(4))
            .in(weight(2))
            .in(weight(3))
            .in(normal(kF32, stats, 8, 0.1, 1))
            .out(dtype, h.packed(), value);
        return op;
      };
      const Tolerance sum = one_step(dtype, 2e-4);
      gradient().out(dtype, size, sum).out(dtype, size, sum).run(pair);
      gradient().sum(dtype, size, sum).sum(dtype, size, sum).run(pair);
    }
  }
}

TEST_CASE("element-wise ops and column sums") {
  DevicePair pair = open_pair();
  for (Extents size :
       {Extents{1, 2}, Extents{3, 14}, Extents{33, 64}, Extents{17, 1792}, Extents{300, 130}, Extents{5, 9728}}) {
    const Extents half{size[0], size[1] / 2}, columns{size[1]};
    for (DType dtype : kDtypes) {
      auto x = [&](std::uint64_t seed) { return normal(dtype, size, seed); };
      auto y = [&](std::uint64_t seed) { return normal(dtype, half, seed); };
      const Tolerance value = one_step(dtype, 2e-6);
      OpComparison("add").in(x(1)).in(x(2)).out(dtype, size, {}).run(pair);
      OpComparison("swiglu").in(x(1)).out(dtype, half, value).run(pair);
      OpComparison("swiglu_grad").in(y(2)).in(x(1)).out(dtype, size, value).run(pair);
      for (const char* approximation : {"erf", "tanh"}) {
        Attributes attributes{{"approximation", std::string(approximation)}};
        OpComparison("gelu", attributes).in(x(1)).out(dtype, size, value).run(pair);
        OpComparison("gelu_grad", attributes).in(x(2)).in(x(1)).out(dtype, size, value).run(pair);
      }
      for (DType sum : {dtype, kF32}) {
        OpComparison("column_sum").in(x(1)).out(sum, columns, one_step(sum, 5e-5)).run(pair);
        OpComparison("column_sum").in(x(1)).sum(sum, columns, one_step(sum, 5e-5)).run(pair);
      }
    }
  }
}

namespace {

StepState step_state(std::uint32_t step) {
  StepState state;
  state.step = step;
  state.seed_low = 17, state.seed_high = 3;
  state.learning_rate = 0.01f;
  state.clip_norm = 2.5f;
  return state;
}

}  // namespace

TEST_CASE("sum_squares and clip_scale") {
  DevicePair pair = open_pair();
  for (std::int64_t count : {1, 3, 4097, 300000})
    for (DType dtype : kDtypes)
      OpComparison("sum_squares").in(normal(dtype, {count}, 1, 100)).out(DType::f64, {1}, {1e-6, 0}).run(pair);
  for (DType dtype : kDtypes) {  // more tensors than one launch takes
    OpComparison list("sum_squares");
    for (std::int64_t i = 0; i < 300; ++i)
      list.in(normal(dtype, {i * i * 7 % 1000 + (i == 17 ? 70000 : 0)}, 1 + i, 100));
    list.out(DType::f64, {1}, {1e-6, 0}).run(pair);
  }
  for (int sums : {1, 2, 31, 700}) {
    for (double valid : {4.0, 0.0}) {
      OpComparison op("clip_scale");
      op.in(words(DType::f64, LossStats{10.0, valid, {}})).in(words(DType::u32, step_state(3)));
      for (int i = 0; i < sums; ++i) op.in(words(DType::f64, 9.0 + i));
      op.out(kF32, {4}, {1e-6, 0}).run(pair);
    }
  }
}

/// Of each count a tensor, added to an adamw whose attributes name as many.
void add_adamw_tensors(OpComparison& op, const std::vector<std::int64_t>& counts, DType gradient, DType state,
                       bool apply) {
  // Stochastic rounding moves a whole step when the fp32 values before it differ in their last bit.
  const Tolerance tolerance = !apply ? Tolerance{} : state == kBf16 ? Tolerance{0x1p-7, 1e-7} : Tolerance{2e-6, 1e-7};
  UpdateState update;
  update.gradient_scale = 0.5f;
  update.apply = apply ? 1.0f : 0.0f;
  op.in(words(kF32, update)).in(words(DType::u32, step_state(7)));
  for (std::size_t i = 0; i < counts.size(); ++i) {
    const Extents size{counts[i]};
    op.in(normal(gradient, size, 1 + 4 * i)).in(normal(state, size, 2 + 4 * i)).in(normal(state, size, 3 + 4 * i, 0.1));
    op.in(normal(state, size, 4 + 4 * i, 0.001, 0.01));
    for (std::size_t updated : {1, 2, 3}) op.update(2 + 4 * i + updated, tolerance);
  }
}

Attributes adamw_attributes(std::vector<double> objects, std::vector<double> offsets) {
  return {{"beta1", 0.9},
          {"beta2", 0.95},
          {"eps", 1e-8},
          {"weight_decay", 0.1},
          {"objects", std::move(objects)},
          {"offsets", std::move(offsets)}};
}

TEST_CASE("adamw, its stochastic rounding and its skip") {
  DevicePair pair = open_pair();
  for (std::int64_t count : {1, 3, 33, 4099, 100000}) {
    for (DType gradient : kDtypes) {
      for (DType state : kDtypes) {
        for (bool apply : {true, false}) {
          OpComparison op("adamw", adamw_attributes({5}, {308}));
          add_adamw_tensors(op, {count}, gradient, state, apply);
          op.run(pair);
        }
      }
    }
  }
}

TEST_CASE("adamw over a list of tensors, more than one launch takes") {
  DevicePair pair = open_pair();
  std::vector<std::int64_t> counts;
  std::vector<double> objects, offsets;
  for (std::int64_t i = 0; i < 270; ++i) {
    counts.push_back(i == 3 ? 0 : i % 90 == 5 ? 40003 : i * i * 5 % 700);
    objects.push_back(static_cast<double>(3 * i + 1));
    offsets.push_back(static_cast<double>(4 * (i % 3)));
  }
  for (DType gradient : kDtypes) {
    for (DType state : kDtypes) {
      OpComparison op("adamw", adamw_attributes(objects, offsets));
      add_adamw_tensors(op, counts, gradient, state, true);
      op.run(pair);
    }
  }
}
