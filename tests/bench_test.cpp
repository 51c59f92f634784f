// What `quern bench` compares speeds with, and what it trains on.
#include <algorithm>
#include <cmath>

#include <doctest/doctest.h>

#include "bench/bench.h"
#include "config/document.h"
#include "end_to_end.h"
#include "run/run_schemas.h"

using namespace quern;
using namespace quern::testing;

namespace {

std::map<DType, double> work(const TinyFiles& files, const Overrides& overrides) {
  PluginHost host = run_host();
  ConfigDocument document = ConfigDocument::read(files.config());
  for (const std::string& override : overrides) document.set(override);
  ResolvedConfig config = resolve(document, run_schemas(), host);
  Session session(config, host);
  return training_work(make_plan(session.parts(), session.plan_options()));
}

/// TinyFiles: width 32, vocabulary 64, a tied head; sequences of 16.
constexpr double kHead = 6.0 * 32 * 64, kAttention = 6.0 * 2 * 32 * 16;

}  // namespace

TEST_CASE("work is counted by the format of each product, the head's too") {
  TinyFiles files;
  const auto bf16 = work(files, {"precision.id=bf16"}), whole = work(files, {"precision.id=e4m3"}),
             blocks = work(files, {"precision.id=e4m3", "precision.e4m3.head=bf16"}),
             inner = work(files, {"precision.id=e4m3", "precision.first_layers=1"});
  REQUIRE(bf16.size() == 1);
  const double all = bf16.at(DType::bf16), block = all - kHead - kAttention;
  CHECK(block > 0);
  CHECK(whole.at(DType::bf16) == doctest::Approx(kAttention));
  CHECK(whole.at(DType::e4m3) == doctest::Approx(block + kHead));
  CHECK(blocks.at(DType::bf16) == doctest::Approx(kAttention + kHead));
  CHECK(blocks.at(DType::e4m3) == doctest::Approx(block));
  CHECK(inner.at(DType::e4m3) == doctest::Approx(block / 2 + kHead));
  CHECK(work(files, {"precision.id=bf16", "memory.recompute=[\"block\"]"}) == bf16);
}

TEST_CASE("benched tokens are in the vocabulary, skewed as in text, and no two batches are alike") {
  constexpr std::int64_t kVocabulary = 1000;
  const Geometry geometry{8, 1024};
  const Batch batch = text_like_tokens(geometry, kVocabulary, 0), other = text_like_tokens(geometry, kVocabulary, 1);
  CHECK(batch.tokens != other.tokens);
  CHECK(batch.tokens != batch.targets);
  for (const auto* ids : {&batch.tokens, &batch.targets}) {
    REQUIRE(ids->size() == 8 * 1024);
    CHECK(*std::min_element(ids->begin(), ids->end()) == 0);
    CHECK(*std::max_element(ids->begin(), ids->end()) < kVocabulary);
    const auto first = static_cast<double>(std::count(ids->begin(), ids->end(), 0)) / 8192;
    CHECK(first == doctest::Approx(std::log(2) / std::log(kVocabulary + 1)).epsilon(0.1));
  }
}
