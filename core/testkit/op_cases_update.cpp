// What an optimizer step is made of.
#include <cmath>

#include "quern/step_state.h"
#include "quern/testkit/op_cases.h"

namespace quern::testkit {

namespace {

constexpr DType kDtypes[] = {DType::f32, DType::bf16};
constexpr DType kBf16 = DType::bf16, kF32 = DType::f32;

StepState step_state(std::uint32_t step) {
  StepState state;
  state.step = step;
  state.updates = step / 2;  // two counts, which kernels must not mistake for one another
  state.seed_low = 17, state.seed_high = 3;
  state.learning_rate = 0.01f;
  state.clip_norm = 2.5f;
  return state;
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

/// `arrays` of `sums` elements each.
void clip_case(const OpRunner& runner, int arrays, int sums, double valid) {
  OpComparison op("clip_scale");
  op.in(words(DType::f64, LossStats{10.0, valid, {}})).in(words(DType::u32, step_state(3)));
  for (int array = 0; array < arrays; ++array) {
    PoisonedTensor squares(DType::f64, {sums});
    for (int i = 0; i < sums; ++i) squares.view().as<double>()[i] = 9.0 + array * sums + i;
    op.in(std::move(squares));
  }
  op.out(kF32, {4}, {1e-6, 0}).run(runner);
}

/// Terms of 2^57, whose sum is 0, among terms of order 100, so that another order of sums gives another total.
void clip_order_case(const OpRunner& runner, int arrays, int sums) {
  OpComparison op("clip_scale");
  op.in(words(DType::f64, LossStats{10.0, 4.0, {}})).in(words(DType::u32, step_state(3)));
  for (int array = 0; array < arrays; ++array) {
    PoisonedTensor squares(DType::f64, {sums});
    for (int i = 0; i < sums; ++i) {
      const int number = array * sums + i;
      const double large = number / 7 % 2 == 0 ? 0x1p57 : -0x1p57;
      squares.view().as<double>()[i] = number % 7 == 0 ? large : 100.0 + number % 97;
    }
    op.in(std::move(squares));
  }
  op.out(kF32, {4}, {}).run(runner);
}

Attributes adamw_attributes(std::vector<double> objects, std::vector<double> offsets) {
  return {{"beta1", 0.9},
          {"beta2", 0.95},
          {"eps", 1e-8},
          {"weight_decay", 0.1},
          {"objects", std::move(objects)},
          {"offsets", std::move(offsets)}};
}

}  // namespace

void reduce_ranks_cases(const OpRunner& runner) {
  auto run = [&](DType dtype, std::int64_t ranks, std::int64_t count, const char* reduction) {
    OpComparison("reduce_ranks", {{"reduction", std::string(reduction)}})
        .in(normal(dtype, {ranks, count}, 1))
        .out(dtype, {count}, {})
        .run(runner);
    if (std::string_view(reduction) == "tree") return;
    OpComparison("reduce_ranks", {{"reduction", std::string(reduction)}, {"own", ranks / 2}})
        .in(normal(dtype, {ranks, count}, 1))
        .in(normal(dtype, {count}, 2))
        .out(dtype, {count}, {})
        .run(runner);
  };
  for (std::int64_t ranks : {1, 2, 3, 8})
    for (std::int64_t count : {1, 7, 128, 4099}) {
      for (DType dtype : {DType::f32, DType::bf16, DType::f64}) run(dtype, ranks, count, "sum");
      for (DType dtype : {DType::f32, DType::f64}) run(dtype, ranks, count, "tree");
      run(kF32, ranks, count, "maximum");
    }
}

void sum_tree_cases(const OpRunner& runner) {
  constexpr std::int64_t kBlock = 8, kCount = 14;  // micro-batches: the second block is not full
  for (DType dtype : {DType::f32, DType::f64})
    for (std::int64_t micro_step : {0, 1, 3, 6, 7, 8, 12, 13}) {
      OpComparison op("sum_tree", {{"block", kBlock}, {"count", kCount}});
      StepState state;
      state.micro_step = static_cast<std::uint32_t>(micro_step);
      op.in(words(DType::u32, state));
      for (std::int64_t count : {1, 7, 4099}) op.in(normal(dtype, {count}, 1)).in(normal(dtype, {3, count}, 2));
      for (std::size_t operand = 1; operand <= 6; ++operand) op.update(operand, {});
      op.run(runner);
    }
}

void norm_and_clip_cases(const OpRunner& runner) {
  for (std::int64_t count : {1, 3, 4097, 300000})
    for (DType dtype : kDtypes)
      OpComparison("sum_squares").in(normal(dtype, {count}, 1, 100)).out(DType::f64, {1}, {1e-6, 0}).run(runner);
  for (DType dtype : kDtypes) {  // more tensors than one launch takes
    OpComparison list("sum_squares");
    for (std::int64_t i = 0; i < 300; ++i)
      list.in(normal(dtype, {i * i * 7 % 1000 + (i == 17 ? 70000 : 0)}, 1 + i, 100));
    list.out(DType::f64, {300}, {1e-6, 0}).run(runner);
  }
  for (int arrays : {1, 2, 31, 700})
    for (double valid : {4.0, 1.0, 0.0}) clip_case(runner, arrays, 1, valid);
  for (int sums : {2, 255, 256, 257, 1000}) clip_case(runner, 1, sums, 4);
  clip_case(runner, 300, 7, 4);
  for (int arrays : {1, 3, 300})
    for (int sums : {238, 1008}) clip_order_case(runner, arrays, sums);
}

void adamw_cases(const OpRunner& runner) {
  for (std::int64_t count : {1, 3, 33, 4099, 100000}) {
    for (DType gradient : kDtypes) {
      for (DType state : kDtypes) {
        for (bool apply : {true, false}) {
          OpComparison op("adamw", adamw_attributes({5}, {308}));
          add_adamw_tensors(op, {count}, gradient, state, apply);
          op.run(runner);
        }
      }
    }
  }
}

void adamw_list_cases(const OpRunner& runner) {
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
      op.run(runner);
    }
  }
}

}  // namespace quern::testkit
