#include "shared/decoder/fields.h"

#include <doctest/doctest.h>

#include "quern/testkit/refusal.h"

using namespace quern;
using namespace quern::decoder;
using testkit::check_holds;

namespace {

Fields small() {
  Fields o;
  o.vocab_size = 97, o.hidden_size = 48, o.intermediate_size = 40, o.num_hidden_layers = 2, o.num_attention_heads = 6;
  return o;
}

std::string refusal(const Fields& options) {
  return testkit::refusal(ErrorCode::config, [&] { check_fields(options, "tiny"); });
}

}  // namespace

TEST_CASE("zeros are filled in") {
  Fields o = small();
  CHECK(refusal(o) == "accepted");
  CHECK(o.heads().kv_heads == 6);
  CHECK(o.heads().head_dim == 8);
  o.num_key_value_heads = 2, o.head_dim = 16;
  CHECK(o.heads().packed() == (6 + 2 * 2) * 16);
  o.rope_type = "yarn", o.max_position_embeddings = 256;
  CHECK(o.rope().original_max_position_embeddings == 256);
  o.original_max_position_embeddings = 64;
  CHECK(o.rope().original_max_position_embeddings == 64);
}

TEST_CASE("sizes that do not fit together are refused, all at once") {
  Fields o = small();
  o.hidden_size = 50, o.num_key_value_heads = 4, o.rope_type = "linear";
  std::string text = refusal(o);
  check_holds(text, {"model.tiny", "hidden_size: found 50, expected a multiple of num_attention_heads, which is 6",
                     "num_key_value_heads: found 4, expected a divisor of num_attention_heads, which is 6",
                     "rope_scaling.factor: found 0"});
  o = small();
  o.num_attention_heads = 16;
  check_holds(refusal(o), {"head_dim: found 3 (hidden_size / num_attention_heads), expected an even number"});
  o.head_dim = 7;
  check_holds(refusal(o), {"head_dim: found 7, expected an even number"});
  o = small();
  o.hidden_size = 6 * 258;
  check_holds(refusal(o), {"head_dim: found 258"});
  o.hidden_size = 50, o.head_dim = 8;  // a given head_dim need not divide the width
  CHECK(refusal(o) == "accepted");
}

TEST_CASE("a rope field that its type does not use is refused") {
  Fields o = small();
  o.factor = 2;
  check_holds(refusal(o), {"rope_scaling.factor: given, but rope_type default does not use it"});
  o.rope_type = "linear", o.beta_fast = 8, o.original_max_position_embeddings = 64;
  std::string text = refusal(o);
  check_holds(text, {"rope_scaling.beta_fast: given, but rope_type linear does not use it",
                     "rope_scaling.original_max_position_embeddings: given"});
  CHECK(text.find("rope_scaling.factor") == std::string::npos);
}

TEST_CASE("fields hold what the rope type uses, and nothing else of it") {
  Fields o = small();
  auto keys = [&o] {
    std::string text;
    OptionValues given = default_values(general_fields().specs());
    given.set("rope_scaling.beta_fast", 16.0);  // the struct decides, not the option
    const OptionValues fields = written_fields(given, o);
    for (const auto& [key, value] : fields.all())
      if (key.starts_with("rope_scaling.")) text += key.substr(13) + " ";
    return text;
  };
  CHECK(keys() == "");
  o.rope_type = "linear", o.factor = 2;
  CHECK(keys() == "factor rope_type ");
  o.rope_type = "llama3", o.original_max_position_embeddings = 64;
  CHECK(keys() == "factor high_freq_factor low_freq_factor original_max_position_embeddings rope_type ");
  o.rope_type = "yarn", o.original_max_position_embeddings = 0;
  CHECK(keys() == "beta_fast beta_slow factor rope_type ");
  o.attention_factor = 1.5;
  CHECK(keys() == "attention_factor beta_fast beta_slow factor rope_type ");
}

TEST_CASE("lists of layers have an entry for each, and windows a size") {
  Fields o = small();
  o.layer_types = {"full_attention", "sliding_attention"}, o.no_rope_layers = {1, 0, 1};
  check_holds(refusal(o), {"layer_types: found sliding_attention, but no sliding_window",
                           "no_rope_layers: found 3 entries, expected 2, num_hidden_layers"});
  o.sliding_window = 3, o.no_rope_layers = {1, 0};
  CHECK(refusal(o) == "accepted");
  CHECK(!o.has_window(0, true));
  CHECK(o.has_window(1, false));
  o.layer_types = {"chunked_attention"};
  check_holds(refusal(o), {"layer_types: found 1 entries", "found \"chunked_attention\", expected full_attention"});
  o.layer_types = {};
  CHECK(o.has_window(0, true));
  o.partial_rotary_factor = 0.4;
  check_holds(refusal(o), {"partial_rotary_factor: 3 of 8 elements of a head, expected an even number"});
  o.partial_rotary_factor = 0.75;
  CHECK(refusal(o) == "accepted");
  CHECK(o.rotated() == 6);
}

TEST_CASE("the table's defaults are the struct's, and sizes are required") {
  const OptionTable<Fields> table = all_fields();
  for (const OptionSpec& spec : table.specs()) {
    CAPTURE(spec.key);
    OptionValue value = spec.default_value;
    if (!spec.required) CHECK(!check_option(spec, value));
    CHECK(!spec.help.empty());
  }
  OptionValues values = default_values(table.specs());
  values.set("hidden_size", std::int64_t{48});
  values.set("rope_scaling.beta_fast", 8.0);
  Fields bound = table.bind(values);
  CHECK(bound.hidden_size == 48);
  CHECK(bound.beta_fast == 8.0);
  CHECK(bound.rms_norm_eps == 1e-6);
  CHECK(bound.max_position_embeddings == 2048);
}
