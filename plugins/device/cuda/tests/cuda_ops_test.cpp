// Every op kind of the CUDA device against the CPU device, at odd sizes, in fp32 and bf16, adding and overwriting. The
// cases are those that any device must pass, and larger ones.
#include <algorithm>
#include <cmath>

#include "quern/testkit/op_cases.h"
#include "quern/testkit/stochastic_rounding.h"
#include "quern/testkit/tensor_sums.h"
#include "tests/device_pair.h"
#include "tests/gpu_run.h"

using namespace quern;
using namespace quern::cuda;

TEST_CASE("matmul: layouts, formats, bias and sums") { testkit::matmul_cases(open_pair()); }

TEST_CASE("matmul: a bias that is added apart rounds once, twice where y accumulates") {
  testkit::matmul_bias_cases(open_pair());
}

TEST_CASE("matmul: 8-bit operands with scales") { testkit::matmul_8bit_cases(open_pair()); }

TEST_CASE("transpose and cast move and round as the CPU does, to the bit") { testkit::conversion_cases(open_pair()); }

TEST_CASE("tokens before rows and means of rows") { testkit::token_rows_cases(open_pair()); }
TEST_CASE("losses of classes") { testkit::class_loss_cases(open_pair()); }
TEST_CASE("embedding and its gradient") { testkit::embedding_cases(open_pair()); }

TEST_CASE("loss_stats and its gradient") {
  testkit::loss_stats_cases(open_pair());
  testkit::loss_stats_grad_cases(open_pair());
}

TEST_CASE("rms_norm family") { testkit::rms_norm_cases(open_pair()); }

TEST_CASE("layer_norm family") { testkit::layer_norm_cases(open_pair()); }

TEST_CASE("rope, head_norm and their gradients") { testkit::head_cases(open_pair()); }

TEST_CASE("element-wise ops and column sums") { testkit::elementwise_cases(open_pair()); }

TEST_CASE("reduce_ranks sums and takes maxima as the CPU does, to the bit") {
  testkit::reduce_ranks_cases(open_pair());
}

TEST_CASE("sum_tree") { testkit::sum_tree_cases(open_pair()); }

TEST_CASE("sum_squares and clip_scale") { testkit::norm_and_clip_cases(open_pair()); }

TEST_CASE("sum_squares of a tensor has the same bits alone and in any list, aligned or not") {
  DevicePair pair = open_pair();
  if (!pair.open) return;
  for (DType dtype : {DType::f32, DType::bf16})
    for (std::size_t alignment : {std::size_t{1}, pair.gpu->traits().alignment})
      CHECK(testkit::tensor_sums_fault(*pair.gpu, dtype, alignment) == "");
}

TEST_CASE("adamw, its stochastic rounding and its skip") { testkit::adamw_cases(open_pair()); }

TEST_CASE("adamw over a list of tensors, more than one launch takes") { testkit::adamw_list_cases(open_pair()); }

TEST_CASE("adamw with moments in 8 bits") { testkit::adamw_8bit_cases(open_pair()); }

TEST_CASE("sgd and lion") { testkit::optimizer_cases(open_pair()); }

TEST_CASE("matmuls of stacks") { testkit::stacked_matmul_cases(open_pair()); }

// Not to the bit: cuBLASLt may choose another algorithm for another number of matrices (docs/optimizers.md).
TEST_CASE("a matrix's matmul is the same within a rounding in stacks of 7, 3 and 1, and no matter which it is") {
  DevicePair pair = open_pair();
  if (!pair.open) return;
  for (DType dtype : {DType::f32, DType::bf16})
    for (const Extents& size : {Extents{32, 96}, {128, 896}, {33, 70}}) {
      const std::int64_t m = size[0], k = size[1];
      testkit::PoisonedTensor x = testkit::normal(dtype, {7, m, k}, 1), c = testkit::normal(dtype, {7, m, m}, 2);
      auto some = [&](const View& all, std::int64_t first, std::int64_t count) {
        View part{static_cast<char*>(all.data) + first * all.bytes() / 7, dtype, all.extents};
        part.extents[0] = count;
        return part;
      };
      auto product = [&](std::int64_t first, std::int64_t count) {
        const Run run{
            "stacked_matmul",
            {{"transpose_a", std::int64_t{0}}, {"transpose_b", std::int64_t{1}}, {"alpha", 2.0315}, {"beta", -4.775}},
            {{dtype, {count, m, m}, true}}};
        const View a = some(x.view(), first, count);
        return run(*pair.gpu, {a, a, some(c.view(), first, count)})[0].floats();
      };
      const std::vector<float> want = product(0, 7);
      const double step = dtype == DType::bf16 ? 1.0 / 128 : 1e-5;  // one of bf16; in fp32 the order of sums
      for (const std::int64_t count : {3, 1})
        for (std::int64_t first = 0; first + count <= 7; first += count) {
          CAPTURE(to_string(Extents{count, m, k}));
          CAPTURE(first);
          const std::vector<float> got = product(first, count);
          std::size_t wrong = 0;
          for (std::size_t i = 0; i < got.size(); ++i) {
            const double other = want[static_cast<std::size_t>(first * m * m) + i];
            if (!(std::abs(got[i] - other) <= step * std::max(std::abs(other), std::sqrt(static_cast<double>(k)))))
              ++wrong;
          }
          CHECK(wrong == 0);
        }
    }
}

TEST_CASE("muon's ops beside matmuls") { testkit::muon_cases(open_pair()); }

TEST_CASE("every rounding of an update has a draw of its own") {
  DevicePair pair = open_pair();
  if (pair.open) CHECK(testkit::stochastic_rounding_fault(*pair.cpu, *pair.gpu) == "");
}

constexpr testkit::LossShape kLargeLosses[] = {
    {33, 64, 9000, 20}, {9, 16, 50257, 9}, {12, 16, 152064, 8}, {3, 8, 260000, 3}};

TEST_CASE("lm_loss and its gradients, in one chunk and in several") {
  DevicePair pair = open_pair();
  testkit::loss_cases(pair, testkit::kLossShapes);
  testkit::loss_cases(pair, kLargeLosses);
}

TEST_CASE("soft caps of logits, in the loss and outside it") {
  DevicePair pair = open_pair();
  testkit::capped_logits_cases(pair, testkit::kLossShapes);
  testkit::capped_logits_cases(pair, kLargeLosses);
}

TEST_CASE("embedding_grad of tokens as uneven as words are") {
  DevicePair pair = open_pair();
  std::vector<std::int32_t> tokens;  // a third are seven frequent ones
  for (std::int32_t i = 0; i < 5003; ++i) tokens.push_back(i % 3 == 0 ? i * 5 % 7 : i * 79 % 20000);
  for (std::int64_t columns : {130, 896}) {
    for (DType dtype : {DType::f32, DType::bf16}) {
      OpComparison op("embedding_grad", {{"rows", std::int64_t{20000}}});
      op.in(normal(dtype, {5003, columns}, 3)).in(integer_list(tokens));
      op.sum(DType::f32, {20000, columns}, {1e-4, 5e-4}).run(pair);  // up to 240 terms, summed in another order
    }
  }
}
