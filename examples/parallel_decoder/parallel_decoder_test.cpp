// Requirements of every model, and this model's own.
#include "parallel_decoder.h"

#include <doctest/doctest.h>

#include "quern/error.h"
#include "quern/testkit/model_conformance.h"

using namespace parallel_decoder;

namespace {

Options small() {
  Options o;
  o.vocab_size = 11, o.hidden_size = 12, o.num_hidden_layers = 2, o.num_attention_heads = 3;
  return o;
}

}  // namespace

TEST_CASE("the programs and the parameters agree") {
  ParallelDecoder model(small());
  for (const std::string& fault : quern::testkit::model_faults(model)) FAIL_CHECK(fault);
  // Two tables, the final norm, and per layer 12 width^2 and a norm.
  CHECK(quern::testkit::parameter_count(model) == 2 * 11 * 12 + 2 * 12 + 2 * (12 * 12 * 12 + 2 * 12));
}

TEST_CASE("heads of an odd width are refused") {
  Options o = small();
  o.num_attention_heads = 4;
  CHECK_THROWS_WITH_AS(ParallelDecoder{o}, doctest::Contains("found 12, expected a multiple of 8"), quern::Error);
}

TEST_CASE("config.json survives writing and reading") {
  const std::string once = ParallelDecoder(small()).hf_config();
  quern::OptionValues values = quern::parse_hf_config(once, "config.json", hf_model());
  CHECK(ParallelDecoder(options().bind(values)).hf_config() == once);
}
