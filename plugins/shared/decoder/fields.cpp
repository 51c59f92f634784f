#include "shared/decoder/fields.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "quern/error.h"

namespace quern::decoder {

namespace {

struct RopeField {
  const char* name;
  double Fields::*member;
  std::vector<const char*> types;  // that use it
};

const std::vector<RopeField>& rope_fields() {
  static const std::vector<RopeField> list = {
      {"factor", &Fields::factor, {"linear", "llama3", "yarn"}},
      {"low_freq_factor", &Fields::low_freq_factor, {"llama3"}},
      {"high_freq_factor", &Fields::high_freq_factor, {"llama3"}},
      {"beta_fast", &Fields::beta_fast, {"yarn"}},
      {"beta_slow", &Fields::beta_slow, {"yarn"}},
      {"attention_factor", &Fields::attention_factor, {"yarn"}},
  };
  return list;
}

bool uses(const RopeField& field, const std::string& type) {
  return std::find(field.types.begin(), field.types.end(), type) != field.types.end();
}
bool has_original_length(const std::string& type) { return type == "llama3" || type == "yarn"; }

}  // namespace

HeadLayout Fields::heads() const {
  return {.heads = num_attention_heads,
          .kv_heads = num_key_value_heads > 0 ? num_key_value_heads : num_attention_heads,
          .head_dim = head_dim > 0 ? head_dim : hidden_size / num_attention_heads};
}

RopeConfig Fields::rope() const {
  std::int64_t original = original_max_position_embeddings;
  if (original == 0 && rope_type == "yarn") original = max_position_embeddings;
  return {.type = rope_type,
          .theta = rope_theta,
          .factor = factor,
          .low_freq_factor = low_freq_factor,
          .high_freq_factor = high_freq_factor,
          .original_max_position_embeddings = original,
          .beta_fast = beta_fast,
          .beta_slow = beta_slow,
          .attention_factor = attention_factor};
}

void check_fields(const Fields& fields, const std::string& model) {
  std::vector<std::string> problems;
  auto number = [](std::int64_t value) { return std::to_string(value); };
  const HeadLayout heads = fields.heads();
  const bool derived = fields.head_dim == 0;
  if (derived && fields.hidden_size % heads.heads != 0)
    problems.push_back("hidden_size: found " + number(fields.hidden_size) +
                       ", expected a multiple of num_attention_heads, which is " + number(heads.heads) +
                       ", or a head_dim");
  else if (heads.head_dim % 2 != 0 || heads.head_dim > 256)
    problems.push_back("head_dim: found " + number(heads.head_dim) +
                       (derived ? " (hidden_size / num_attention_heads)" : "") +
                       ", expected an even number of at most 256");
  if (heads.heads % heads.kv_heads != 0)
    problems.push_back("num_key_value_heads: found " + number(heads.kv_heads) +
                       ", expected a divisor of num_attention_heads, which is " + number(heads.heads));
  constexpr std::int64_t kAnyHead = 2;  // the head size is judged above
  for (const std::string& problem : rope_problems(fields.rope(), kAnyHead)) problems.push_back(problem);
  const Fields defaults;
  const std::string unused = ": given, but rope_type " + fields.rope_type + " does not use it";
  for (const RopeField& field : rope_fields())
    if (!uses(field, fields.rope_type) && fields.*field.member != defaults.*field.member)
      problems.push_back(std::string("rope_scaling.") + field.name + unused);
  if (!has_original_length(fields.rope_type) && fields.original_max_position_embeddings != 0)
    problems.push_back("rope_scaling.original_max_position_embeddings" + unused);
  if (problems.empty()) return;
  std::string what = "sizes that cannot be used:";
  for (const std::string& problem : problems) what += "\n  " + problem;
  throw Error(ErrorCode::config, {.where = "model." + model, .what = what});
}

OptionTable<Fields> general_fields() {
  OptionTable<Fields> t;
  t.add("vocab_size", &Fields::vocab_size, "number of tokens in the vocabulary")
      .required()
      .at_least(2)
      .at_most(1 << 30);
  t.add("hidden_size", &Fields::hidden_size, "width of the residual stream").required().at_least(2).at_most(1 << 20);
  t.add("intermediate_size", &Fields::intermediate_size, "width of the feed-forward layer")
      .required()
      .at_least(2)
      .at_most(1 << 22);
  t.add("num_hidden_layers", &Fields::num_hidden_layers, "number of blocks").required().at_least(1).at_most(10000);
  t.add("num_attention_heads", &Fields::num_attention_heads, "query heads").required().at_least(1).at_most(1 << 16);
  t.add("num_key_value_heads", &Fields::num_key_value_heads, "key and value heads; 0: as many as query heads")
      .at_least(0)
      .at_most(1 << 16);
  t.add("head_dim", &Fields::head_dim, "width of a head; 0: hidden_size / num_attention_heads")
      .at_least(0)
      .at_most(256);
  t.add("max_position_embeddings", &Fields::max_position_embeddings, "longest sequence, in tokens")
      .at_least(1)
      .at_most(1 << 30);
  t.add("rms_norm_eps", &Fields::rms_norm_eps, "added to the mean square in norms").at_least(0).at_most(1);
  t.add("initializer_range", &Fields::initializer_range, "standard deviation of initial weights")
      .at_least(0)
      .at_most(10);
  t.add("tie_word_embeddings", &Fields::tie_word_embeddings, "the LM head is the embedding");
  t.add("hidden_act", &Fields::hidden_act, "activation of the gate").one_of({"silu"});
  t.add("rope_theta", &Fields::rope_theta, "base of the rotary wavelengths").above(1);
  t.add("rope_scaling.rope_type", &Fields::rope_type, "how rotary frequencies are scaled")
      .one_of({"default", "linear", "llama3", "yarn"});
  t.add("rope_scaling.factor", &Fields::factor, "linear, llama3, yarn: by how much the context grows; 0: not given")
      .at_least(0);
  t.add("rope_scaling.low_freq_factor", &Fields::low_freq_factor, "llama3: turns below which a frequency is divided")
      .above(0);
  t.add("rope_scaling.high_freq_factor", &Fields::high_freq_factor, "llama3: turns above which a frequency is kept")
      .above(0);
  t.add("rope_scaling.original_max_position_embeddings", &Fields::original_max_position_embeddings,
        "llama3, yarn: context before scaling, in tokens; yarn: 0 is max_position_embeddings")
      .at_least(0)
      .at_most(1 << 30);
  t.add("rope_scaling.beta_fast", &Fields::beta_fast, "yarn: turns above which a frequency is kept").above(0);
  t.add("rope_scaling.beta_slow", &Fields::beta_slow, "yarn: turns below which a frequency is divided").above(0);
  t.add("rope_scaling.attention_factor", &Fields::attention_factor, "yarn: scale of cos and sin; 0: 0.1 ln(factor) + 1")
      .at_least(0);
  return t;
}

OptionTable<Fields> all_fields() {
  OptionTable<Fields> t = general_fields();
  t.add("attention_bias", &Fields::attention_bias, "biases on the query, key, value and output projections");
  t.add("mlp_bias", &Fields::mlp_bias, "biases on the gate, up and down projections");
  return t;
}

OptionValues written_fields(const OptionValues& values, const Fields& fields) {
  const HeadLayout heads = fields.heads();
  OptionValues written;
  for (const auto& [key, value] : values.all()) {
    if (!key.starts_with("rope_scaling.")) written.set(key, value);
  }
  written.set("num_key_value_heads", heads.kv_heads);
  written.set("head_dim", heads.head_dim);
  if (fields.rope_type == "default") return written;
  written.set("rope_scaling.rope_type", fields.rope_type);
  for (const RopeField& field : rope_fields()) {
    const bool left_to_formula = field.member == &Fields::attention_factor && fields.attention_factor == 0;
    if (uses(field, fields.rope_type) && !left_to_formula)
      written.set(std::string("rope_scaling.") + field.name, fields.*field.member);
  }
  if (fields.original_max_position_embeddings != 0)
    written.set("rope_scaling.original_max_position_embeddings", fields.original_max_position_embeddings);
  return written;
}

Description llama_shape(const Fields& f) {
  Description d;
  d.vocabulary = f.vocab_size, d.width = f.hidden_size, d.ffn = f.intermediate_size, d.layers = f.num_hidden_layers;
  d.max_positions = f.max_position_embeddings;
  d.heads = f.heads();
  d.eps = f.rms_norm_eps;
  d.rope = rope_frequencies(f.rope(), d.heads.head_dim);
  d.attention_scale = 1 / std::sqrt(static_cast<double>(d.heads.head_dim));
  d.tied = f.tie_word_embeddings;
  d.init_deviation = f.initializer_range;
  return d;
}

}  // namespace quern::decoder
