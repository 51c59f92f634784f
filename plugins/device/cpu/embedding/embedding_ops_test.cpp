#include <cstring>
#include <vector>

#include <doctest/doctest.h>

#include "quern/error.h"
#include "quern/testkit/refusal.h"
#include "tests/op_harness.h"

using namespace quern;
using namespace quern::cpu::harness;
using testkit::PoisonedTensor;

namespace {
std::vector<std::int32_t> some_tokens(std::int64_t count, std::int64_t vocabulary) {
  std::vector<std::int32_t> tokens;
  // Squares: some tokens repeat often, many never come.
  for (std::int64_t i = 0; i < count; ++i) tokens.push_back(static_cast<std::int32_t>(i * i % vocabulary));
  return tokens;
}
}  // namespace

TEST_CASE("embedding copies and converts rows") {
  for (DType from : {DType::f32, DType::bf16}) {
    for (DType to : {DType::f32, DType::bf16}) {
      for (std::int64_t count : {1, 7, 33}) {
        auto tokens = some_tokens(count, 17);
        auto table = normal(from, {17, 5}, 1);
        PoisonedTensor y(to, {count, 5});
        TestOp{"embedding", {integer_tensor(tokens).view(), table.view()}, {y.view()}}.run();
        std::vector<double> want;
        auto rows = doubles(table);
        for (std::int32_t token : tokens)
          want.insert(want.end(), rows.begin() + token * 5, rows.begin() + token * 5 + 5);
        CHECK(compare(y.view(), want, 0, 0) == "");
      }
    }
  }
}

TEST_CASE("embedding_grad sums rows by token, overwriting or adding") {
  for (DType dtype : {DType::f32, DType::bf16}) {
    for (bool add : {false, true}) {
      for (std::int64_t count : {1, 7, 65, 300}) {
        CAPTURE(name_of(dtype));
        CAPTURE(count);
        const std::int64_t vocabulary = 67, columns = 9;
        auto tokens = some_tokens(count, vocabulary);
        auto dy = normal(dtype, {count, columns}, 1);
        auto dtable = add ? normal(dtype, {vocabulary, columns}, 2) : PoisonedTensor(dtype, {vocabulary, columns});
        std::vector<double> want(static_cast<std::size_t>(vocabulary * columns), 0.0);
        if (add) want = doubles(dtable);
        auto rows = doubles(dy);
        for (std::int64_t i = 0; i < count; ++i) {
          for (std::int64_t c = 0; c < columns; ++c) {
            want[static_cast<std::size_t>(tokens[static_cast<std::size_t>(i)] * columns + c)] +=
                rows[static_cast<std::size_t>(i * columns + c)];
          }
        }
        TestOp{"embedding_grad", {dy.view(), integer_tensor(tokens).view()}, {dtable.view()}, {}, {}, add}.run();
        // Slack: sums in fp32 of at most some twenty rows of a few units each.
        CHECK(compare(dtable.view(), want, 1e-5, 0) == "");
      }
    }
  }
}

TEST_CASE("embedding_grad gives the same bits with any number of threads") {
  auto tokens = integer_tensor(some_tokens(500, 31));
  auto dy = normal(DType::f32, {500, 33}, 1);
  PoisonedTensor one(DType::f32, {31, 33}), three(DType::f32, {31, 33});
  TestOp{"embedding_grad", {dy.view(), tokens.view()}, {one.view()}}.run(1);
  TestOp{"embedding_grad", {dy.view(), tokens.view()}, {three.view()}}.run(3);
  CHECK(std::memcmp(one.view().data, three.view().data, one.view().bytes()) == 0);
}

TEST_CASE("tokens outside the vocabulary are an input error that names the first") {
  auto table = normal(DType::f32, {5, 2}, 1);
  PoisonedTensor y(DType::f32, {3, 2});
  for (std::int32_t bad : {5, -1}) {
    auto tokens = integer_tensor({0, bad, 99});
    const Error error = testkit::error_of([&] {
      TestOp{"embedding", {tokens.view(), table.view()}, {y.view()}}.run();
    });
    CHECK(error.code() == ErrorCode::input);
    CHECK(error.detail().where == "tokens[1]");
    CHECK(error.detail().found == std::to_string(bad));
    CHECK_THROWS_AS((TestOp{"embedding_grad", {y.view(), tokens.view()}, {table.view()}}.run()), Error);
  }
}
