// Updates of optimizers beside AdamW in 32 and 16 bits.
#include <cmath>

#include "quern/step_state.h"
#include "quern/testkit/op_cases.h"

namespace quern::testkit {

namespace {

constexpr DType kDtypes[] = {DType::f32, DType::bf16};

void add_step(OpComparison& op, bool apply) {
  UpdateState update;
  update.gradient_scale = 0.5f;
  update.apply = apply ? 1.0f : 0.0f;
  StepState state;
  state.step = 7, state.updates = 3;
  state.seed_low = 17, state.seed_high = 3;
  state.learning_rate = 0.01f;
  state.average = 0.2f;
  op.in(words(DType::f32, update)).in(words(DType::u32, state));
}

/// Stochastic rounding moves a whole step when the fp32 values before it differ in their last bit.
Tolerance tolerance_of(DType dtype, bool apply) {
  if (!apply) return {};
  if (dtype == DType::i8) return {0, 1};
  if (dtype == DType::e4m3) return {0x1p-3, 0x1p-9};
  return dtype == DType::bf16 ? Tolerance{0x1p-7, 1e-7} : Tolerance{2e-6, 1e-7};
}

void with_numbers(Attributes& attributes, std::size_t tensors) {
  std::vector<double> objects, offsets;
  for (std::size_t i = 0; i < tensors; ++i) {
    objects.push_back(static_cast<double>(3 * i + 5));
    offsets.push_back(static_cast<double>(4 * (i % 3)));
  }
  attributes.set("objects", std::move(objects));
  attributes.set("offsets", std::move(offsets));
}

/// A moment's, or a second moment's, which are not negative.
PoisonedTensor state_values(DType dtype, std::int64_t count, std::uint64_t seed, bool second) {
  std::vector<float> values = random_normal(count, seed + 3, 0.1);
  for (float& value : values) value = second ? std::fabs(value) : value;
  return {dtype, {count}, values};
}

void element_cases(const OpRunner& runner, const char* kind, std::size_t states, Attributes attributes) {
  const std::vector<std::int64_t> sizes[] = {{1}, {33}, {100000}, {0, 7, 4099, 40003}};
  for (const auto& counts : sizes)
    for (DType gradient : kDtypes)
      for (DType dtype : kDtypes)
        for (bool apply : {true, false}) {
          if (states > 2 && dtype != DType::f32) continue;
          with_numbers(attributes, counts.size());
          OpComparison op(kind, attributes);
          add_step(op, apply);
          const std::size_t each = 2 + states;
          for (std::size_t i = 0; i < counts.size(); ++i) {
            op.in(normal(gradient, {counts[i]}, 1 + each * i)).in(normal(dtype, {counts[i]}, 2 + each * i));
            for (std::size_t state = 0; state < states; ++state)
              op.in(state_values(dtype, counts[i], each * i + state, state > 0));
            for (std::size_t updated = 3; updated < 4 + states; ++updated)
              op.update(each * i + updated, tolerance_of(dtype, apply));
          }
          op.run(runner);
        }
}

/// Quantized values of magnitudes up to 100; roots are not negative.
PoisonedTensor codes(DType dtype, const Extents& extents, std::uint64_t seed, bool root) {
  std::vector<float> values = random_normal(element_count(extents), seed, size_of(dtype) == 1 ? 30 : 0.1);
  for (float& value : values) value = root ? std::fabs(value) : value;
  return {dtype, extents, values};
}

void adamw_8bit_case(const OpRunner& runner, const std::vector<Extents>& tensors, DType moment1, DType moment2,
                     std::int64_t block, bool apply) {
  Attributes attributes{{"beta1", 0.9}, {"beta2", 0.95}, {"eps", 1e-8}, {"weight_decay", 0.1}, {"block", block}};
  with_numbers(attributes, tensors.size());
  OpComparison op("adamw_8bit", attributes);
  add_step(op, apply);
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const Extents &extents = tensors[i], scales{extents[0], (extents[1] + block - 1) / block};
    op.in(normal(DType::bf16, extents, 1 + 8 * i)).in(normal(DType::f32, extents, 2 + 8 * i));
    op.in(codes(moment1, extents, 3 + 8 * i, false)).in(codes(moment2, extents, 4 + 8 * i, true));
    for (std::uint64_t seed : {5, 6}) op.in(codes(DType::f32, scales, seed + 8 * i, true));
    // Steps are as large as masters here: of two terms up to 4, each rounded, little may be left.
    op.update(3 + 6 * i, apply ? Tolerance{2e-6, 1e-6} : Tolerance{});
    op.update(4 + 6 * i, tolerance_of(moment1, apply)).update(5 + 6 * i, tolerance_of(moment2, apply));
    for (std::size_t scale : {6, 7}) op.update(scale + 6 * i, tolerance_of(DType::f32, apply));
  }
  op.run(runner);
}

void part_case(const OpRunner& runner, std::int64_t first, std::int64_t rows, DType gradient, DType dtype,
               DType direction, bool apply) {
  const Extents whole{50, 36}, part{rows, 36};
  Attributes attributes{{"first", first},
                        {"rows", rows},
                        {"momentum", 0.9},
                        {"nesterov", std::int64_t{first % 2}},
                        {"dtype", std::string(name_of(direction))},
                        {"weight_decay", 0.1},
                        {"factor", 0.3},
                        {"index", std::int64_t{1}}};
  with_numbers(attributes, 1);
  OpComparison along("muon_direction", attributes);
  add_step(along, apply);
  along.in(normal(gradient, whole, 1)).in(normal(dtype, whole, 2)).update(3, tolerance_of(dtype, apply));
  along.out(direction, part, tolerance_of(direction, true)).run(runner);
  for (const bool by_rows : {false, true}) {
    OpComparison step("muon_apply", attributes);
    add_step(step, apply);
    step.in(normal(dtype, whole, 1)).in(normal(direction, {3, rows, 36}, 2));
    if (by_rows) step.in(normal(DType::f32, {rows}, 3));
    step.update(2, tolerance_of(dtype, apply)).run(runner);
  }
  attributes.set("beta", 0.95);
  OpComparison factors("row_factors", attributes);
  add_step(factors, apply);
  factors.in(codes(DType::f32, {50, 1}, 4, true)).in(normal(direction, {3, rows, 36}, 5));
  factors.update(2, tolerance_of(DType::f32, apply)).out(DType::f32, {rows}, {4e-6, 1e-7}).run(runner);
}

}  // namespace

void optimizer_cases(const OpRunner& runner) {
  for (std::int64_t nesterov : {0, 1})
    element_cases(runner, "sgd", 1, {{"momentum", 0.9}, {"nesterov", nesterov}, {"weight_decay", 0.1}});
  element_cases(runner, "lion", 1, {{"beta1", 0.9}, {"beta2", 0.99}, {"weight_decay", 0.1}, {"rate", 0.5}});
  element_cases(runner, "schedule_free", 3,
                {{"beta1", 0.9}, {"beta2", 0.95}, {"eps", 1e-8}, {"weight_decay", 0.1}, {"rate", 0.5}});
  OpComparison exchange("exchange");
  for (const std::int64_t count : {1, 33, 40003})
    for (const std::uint64_t seed : {1, 2}) exchange.in(normal(DType::f32, {count}, seed));
  for (std::size_t i = 0; i < 6; ++i) exchange.update(i, {});
  exchange.run(runner);
}

void adamw_8bit_cases(const OpRunner& runner) {
  const std::vector<Extents> lists[] = {{{1, 1}}, {{3, 128}, {17, 300}}, {{64, 1021}}};
  for (const auto& tensors : lists)
    for (std::int64_t block : {128, 256})
      for (bool apply : {true, false}) {
        for (DType moment : {DType::i8, DType::e4m3}) {
          adamw_8bit_case(runner, tensors, moment, moment, block, apply);
        }
        adamw_8bit_case(runner, tensors, DType::i8, DType::e4m3, block, apply);
      }
}

void stacked_matmul_cases(const OpRunner& runner) {
  struct Sizes {
    std::int64_t count, m, n, k;
  };
  for (DType dtype : kDtypes)
    for (const Sizes& s : {Sizes{1, 64, 64, 200}, Sizes{3, 48, 136, 80}, Sizes{2, 1, 33, 7}})
      for (std::int64_t turned : {0, 1, 2}) {
        const std::int64_t ta = turned == 1, tb = turned == 2;
        const Extents y{s.count, s.m, s.n};
        // Terms cancel: their sum of k has a deviation of root k, and its rounding in another order is of that size.
        const Tolerance tolerance{dtype == DType::bf16 ? 0x1p-7 : 1e-5, 1e-5 * static_cast<double>(s.k)};
        auto matmul = [&] {
          OpComparison op("stacked_matmul",
                          {{"transpose_a", ta}, {"transpose_b", tb}, {"alpha", 2.0315}, {"beta", -4.775}});
          op.in(normal(dtype, ta ? Extents{s.count, s.k, s.m} : Extents{s.count, s.m, s.k}, 1));
          op.in(normal(dtype, tb ? Extents{s.count, s.n, s.k} : Extents{s.count, s.k, s.n}, 2));
          return op;
        };
        matmul().out(dtype, y, tolerance).run(runner);
        matmul().in(normal(dtype, y, 3)).out(dtype, y, tolerance).run(runner);
      }
}

void muon_cases(const OpRunner& runner) {
  for (DType gradient : kDtypes)
    for (DType dtype : kDtypes)
      for (DType direction : kDtypes)
        for (bool apply : {true, false}) {
          part_case(runner, 0, 50, gradient, dtype, direction, apply);
          part_case(runner, 13, 20, gradient, dtype, direction, apply);
        }
  for (DType dtype : kDtypes)
    for (std::int64_t columns : {1, 33, 4100}) {
      PoisonedTensor squares(DType::f64, {3});
      OpComparison over("over_norm");
      for (std::size_t i = 0; i < 3; ++i) squares.view().as<double>()[i] = static_cast<double>(i) * 2.5;
      over.in(squares);
      for (std::uint64_t seed : {1, 2, 3}) over.in(normal(dtype, {7, columns}, seed, 1e-6));
      over.out(dtype, {3, 7, columns}, one_step(dtype, 2e-6)).run(runner);
    }
}

}  // namespace quern::testkit
