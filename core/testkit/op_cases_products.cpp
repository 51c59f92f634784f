// Matmuls, the ops that make their operands, and the language-model loss.
#include <cmath>

#include "quern/block_scales.h"
#include "quern/step_state.h"
#include "quern/testkit/op_cases.h"

namespace quern::testkit {

namespace {

constexpr DType kDtypes[] = {DType::f32, DType::bf16};
constexpr DType kBf16 = DType::bf16, kF32 = DType::f32;

std::int64_t flag(bool value) { return value ? 1 : 0; }

/// Sums of k terms of order one: each of k additions rounds a partial sum of order sqrt(k), 2^-24 of it, and these
/// errors add like a random walk, to 6e-8 k; six times that for the worst of many.
Tolerance product(DType dtype, std::int64_t k) { return one_step(dtype, 4e-7 * static_cast<double>(k) + 1e-6); }
/// Where the matmul is added to a bf16 y, the library may round it to bf16 first: half a step (2^-9) of the largest of
/// some ten thousand results of deviation sqrt(k), which is about four deviations.
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

/// Matmuls with columns of a wider matrix, in place where they are added to it.
void narrow_matmul_cases(const OpRunner& runner) {
  struct Case {
    std::int64_t rows, width, first, columns, rank;
  };
  for (const Case& c : {Case{64, 128, 0, 128, 8}, Case{17, 96, 32, 64, 16}, Case{5, 21, 3, 7, 3},
                        Case{300, 40, 8, 24, 4}, Case{1, 9, 8, 1, 1}})
    for (DType dtype : kDtypes) {
      const Extents wide{c.rows, c.width}, narrow{c.rows, c.rank}, weight{c.columns, c.rank};
      Attributes attributes{{"first", c.first}, {"factor", 0.75}, {"transpose_b", std::int64_t{1}}};
      const auto added = [&] {
        OpComparison op("add_matmul", attributes);
        op.in(normal(dtype, wide, 1)).in(normal(dtype, narrow, 2));
        return op;
      };
      added().in(normal(dtype, weight, 3)).out(dtype, wide, added_product(dtype, c.rank)).run(runner);
      OpComparison("columns_matmul", attributes)
          .in(normal(dtype, wide, 1))
          .in(normal(dtype, weight, 3))
          .out(dtype, narrow, product(dtype, c.columns))
          .run(runner);
      const auto gradient = [&] {
        OpComparison op("columns_weight_grad", attributes);
        op.in(normal(dtype, wide, 1)).in(normal(dtype, narrow, 2)).in(normal(dtype, weight, 3));
        return op;
      };
      for (DType sum : {dtype, kF32}) {
        gradient().out(sum, weight, product(sum, c.rows)).run(runner);
        gradient().sum(sum, weight, added_product(sum, c.rows)).run(runner);
      }
      attributes.set("transpose_b", std::int64_t{0});
      added().in(normal(dtype, {c.rank, c.columns}, 3)).out(dtype, wide, added_product(dtype, c.rank)).run(runner);
    }
}

}  // namespace

void matmul_cases(const OpRunner& runner) {
  narrow_matmul_cases(runner);

  for (bool ta : {false, true}) {
    for (bool tb : {false, true}) {
      for (Matmul s :
           {Matmul{64, 128, 96}, Matmul{17, 33, 65}, Matmul{1, 8, 40}, Matmul{256, 40, 1024}, Matmul{5, 1, 3}}) {
        s.transpose_a = ta, s.transpose_b = tb;
        for (DType in : kDtypes) {
          for (DType out : {in, kF32}) {
            matmul(s, in).out(out, {s.m, s.n}, product(out, s.k)).run(runner);
            matmul(s, in).sum(out, {s.m, s.n}, added_product(out, s.k)).run(runner);
            matmul(s, in).in(normal(out, {s.n}, 3)).out(out, {s.m, s.n}, product(out, s.k)).run(runner);
          }
        }
      }
    }
  }
}

// A bias that is added apart rounds once, twice where y accumulates.
void matmul_bias_cases(const OpRunner& runner) {
  Matmul s{24, 40, 64, false, true};
  matmul(s, kBf16).in(normal(kF32, {s.n}, 3)).out(kBf16, {s.m, s.n}, {0x1p-6, 0.1}).run(runner);
  matmul(s, kBf16).in(normal(kBf16, {s.n}, 3)).sum(kBf16, {s.m, s.n}, {0x1p-6, 0.1}).run(runner);
  matmul(s, kBf16).in(normal(kF32, {s.n}, 3)).out(kF32, {s.m, s.n}, product(kF32, s.k)).run(runner);
}

namespace {

/// Operands of 8 bits with scales that make results of order sqrt(k) / 8: one each, one a row of a and of b, or, with
/// `scale_rows_b` 1 or 128, of blocks.
struct EightBits {
  DType a, b;
  Matmul size;
  bool rows = false;
  std::int64_t scale_rows_b = 0;

  OpComparison op(bool bias) const {
    const auto& [m, n, k, ta, tb] = size;
    Attributes attributes{{"transpose_b", std::int64_t{1}}};
    if (scale_rows_b != 0) attributes.set("scale_rows_b", scale_rows_b);
    OpComparison op("matmul", attributes);
    auto codes = [](DType dtype) { return dtype == DType::i8 ? 30.0 : 1.0; };
    op.in(normal(a, {m, k}, 1, codes(a))).in(normal(b, {n, k}, 2, codes(b)));
    bias ? op.in(normal(kF32, {n}, 3)) : op.absent();
    Extents of_a{rows ? m : 1}, of_b{rows ? n : 1};
    if (scale_rows_b != 0) {
      of_a = row_block_scales(m, k);
      of_b = scale_rows_b == 1 ? row_block_scales(n, k) : square_scales(n, k);
    }
    auto scales = [&](const Extents& extents, std::uint64_t seed, double mean) {
      return normal(kF32, extents, seed, element_count(extents) > 1 ? mean / 8 : 0, mean);
    };
    op.in(scales(of_a, 4, 0.5 / codes(a))).in(scales(of_b, 5, 0.25 / codes(b)));
    return op;
  }

  /// Tensor cores keep about 14 bits in an accumulator: relative to values of order sqrt(k) / 8.
  Tolerance alone(DType out) const {
    return {out == kBf16 ? 0x1p-7 : 0x1p-10, 0x1p-12 * std::sqrt(static_cast<double>(size.k))};
  }
  /// A bias, or a y that is added to, may round the result to bf16 first: half a step of four deviations, each.
  Tolerance added(DType out) const {
    Tolerance tolerance = alone(out);
    if (out == kBf16)
      tolerance = {0x1p-6, tolerance.absolute + 0x1p-9 * std::sqrt(static_cast<double>(size.k)) + 0x1p-7};
    return tolerance;
  }

  void run_forms(const OpRunner& runner) const {
    for (DType out : {kBf16, kF32}) {
      const Extents y{size.m, size.n};
      op(false).out(out, y, alone(out)).run(runner);
      op(true).out(out, y, added(out)).run(runner);
      op(false).sum(out, y, added(out)).run(runner);
      op(true).sum(out, y, added(out)).run(runner);
    }
  }
};

constexpr Matmul kEightBitSizes[] = {{32, 48, 64, false, true}, {128, 256, 512, false, true}};
constexpr std::pair<DType, DType> kFloat8[] = {
    {DType::e4m3, DType::e4m3}, {DType::e5m2, DType::e4m3}, {DType::e4m3, DType::e5m2}};

}  // namespace

void matmul_8bit_cases(const OpRunner& runner) {
  for (auto [a, b] : kFloat8)
    for (DType out : {kBf16, kF32})
      for (const Matmul& s : kEightBitSizes) {
        const EightBits product{a, b, s};
        product.op(false).out(out, {s.m, s.n}, product.alone(out)).run(runner);
      }
}

void matmul_8bit_form_cases(const OpRunner& runner) {
  auto run = [&](DType a, DType b) {
    for (const Matmul& s : kEightBitSizes) {
      EightBits{a, b, s}.run_forms(runner);
      EightBits{a, b, s, true}.run_forms(runner);
      for (std::int64_t rows : {std::int64_t{1}, kScaleBlock}) EightBits{a, b, s, false, rows}.run_forms(runner);
    }
  };
  for (auto [a, b] : kFloat8) run(a, b);
  run(DType::i8, DType::i8);
}

void conversion_cases(const OpRunner& runner) {
  for (Extents size :
       {Extents{1, 1}, Extents{64, 64}, Extents{33, 70}, Extents{129, 8}, Extents{5, 1000}, Extents{272, 144}}) {
    Extents turned{size[1], size[0]};
    for (DType dtype : {kF32, kBf16, DType::e4m3, DType::i8})
      OpComparison("transpose").in(normal(dtype, size, 1, 10)).out(dtype, turned, {}).run(runner);
    OpComparison("transpose").in(normal(kF32, size, 1, 10)).out(kBf16, turned, {}).run(runner);
    for (DType from : {kF32, kBf16, DType::e4m3, DType::e5m2}) {
      for (DType to : {kF32, kBf16, DType::e4m3, DType::e5m2}) {
        OpComparison("cast", {{"dtype", std::string(name_of(to))}})
            .in(normal(from, size, 1, 200))
            .out(to, size, {})
            .run(runner);
      }
    }
  }
}

void scaled_cast_cases(const OpRunner& runner) {
  struct Case {
    std::int64_t rows, columns, images, channels;
  };
  for (const Case& c : {Case{1, 1, 1, 1}, Case{9, 48, 3, 3}, Case{17, 43, 1, 1}, Case{34, 588, 17, 3}})
    for (DType to : {kF32, kBf16}) {
      PoisonedTensor bytes(DType::u8, {c.rows, c.columns});
      for (std::int64_t i = 0; i < bytes.view().count(); ++i)
        bytes.view().as<std::uint8_t>()[i] = static_cast<std::uint8_t>(i * 7 + i / 256);
      OpComparison("cast", {{"dtype", std::string(name_of(to))}})
          .in(std::move(bytes))
          .in(normal(kF32, {c.images, 2 * c.channels}, 3))
          .out(to, {c.rows, c.columns}, {})
          .run(runner);
    }
}

void loss_cases(const OpRunner& runner, std::span<const LossShape> shapes) {
  for (const LossShape& s : shapes) {
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
      inputs("lm_loss").out(kF32, {s.tokens}, loss).run(runner);
      auto train = [&] { return inputs("lm_loss_train").out(kF32, {s.tokens}, loss); };
      for (DType sum : {dtype, kF32}) {
        train().out(dtype, {s.tokens, s.width}, gradient).out(sum, {s.vocabulary, s.width}, gradient).run(runner);
        train().out(dtype, {s.tokens, s.width}, gradient).sum(sum, {s.vocabulary, s.width}, gradient).run(runner);
      }
      train().unread(dtype, {s.tokens, s.width}).out(dtype, {s.vocabulary, s.width}, gradient).run(runner);
    }
  }
}

void capped_logits_cases(const OpRunner& runner, std::span<const LossShape> shapes) {
  for (DType dtype : kDtypes) {
    OpComparison("soft_cap", {{"cap", 0.5}})
        .in(normal(dtype, {33, 130}, 1))
        .out(dtype, {33, 130}, one_step(dtype, 2e-6))
        .run(runner);
    // The cap bends logits of deviation 1; tolerances as of losses without one.
    for (const LossShape& s : shapes) {
      const Tolerance loss = dtype == kBf16 ? Tolerance{1e-3, 0.07} : Tolerance{1e-5, 1e-5},
                      gradient = dtype == kBf16 ? Tolerance{0.03, 0.03} : Tolerance{1e-4, 2e-5};
      auto inputs = [&](const char* kind) {
        OpComparison op(kind, {{"chunk", s.chunk}, {"seed", 4.0}, {"z_loss", 0.001}, {"cap", 1.5}});
        op.in(normal(dtype, {s.tokens, s.width}, 1, 0.5)).in(normal(dtype, {s.vocabulary, s.width}, 2, 0.5));
        op.in(integers(s.tokens, -1, s.vocabulary, 3));
        return op;
      };
      inputs("lm_loss").out(kF32, {s.tokens}, loss).run(runner);
      inputs("lm_loss_train")
          .out(kF32, {s.tokens}, loss)
          .out(dtype, {s.tokens, s.width}, gradient)
          .out(dtype, {s.vocabulary, s.width}, gradient)
          .run(runner);
    }
  }
}

void loss_stats_cases(const OpRunner& runner) {
  for (std::int64_t tokens : {1, 33, 1024, 5000}) {
    auto op = [&] {
      OpComparison op("loss_stats");
      op.in(normal(kF32, {tokens}, 1)).in(integers(tokens, -1, 3, 2));
      return op;
    };
    op().out(DType::f64, {4}, {1e-6, 1e-6}).run(runner);
    op().sum(DType::f64, {4}, {1e-6, 1e-6}).run(runner);
    op().in(normal(kF32, {tokens}, 3)).sum(DType::f64, {4}, {1e-6, 1e-6}).run(runner);
    OpComparison term("loss_stats", {{"weight", 0.25}, {"counts", std::int64_t{0}}});
    term.in(normal(kF32, {tokens}, 1)).in(integers(tokens, -1, 3, 2)).sum(DType::f64, {4}, {1e-6, 1e-6}).run(runner);
  }
}

void loss_stats_grad_cases(const OpRunner& runner) {
  for (std::int64_t tokens : {1, 33, 5000}) {
    OpComparison op("loss_stats_grad", {{"factor", -0.75}});
    op.in(integers(tokens, -1, 3, 2)).out(kF32, {tokens}, {0, 0}).run(runner);
  }
}

}  // namespace quern::testkit
