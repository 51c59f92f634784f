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
      {"attention_factor", &Fields::attention_factor, {"yarn", "longrope"}},
  };
  return list;
}

bool is_long(const std::string& type) { return type == kLongRope; }

bool uses(const RopeField& field, const std::string& type) {
  return std::find(field.types.begin(), field.types.end(), type) != field.types.end();
}
bool has_original_length(const std::string& type) { return type == "llama3" || type == "yarn" || is_long(type); }

}  // namespace

HeadLayout Fields::heads() const {
  return {.heads = num_attention_heads,
          .kv_heads = num_key_value_heads > 0 ? num_key_value_heads : num_attention_heads,
          .head_dim = head_dim > 0 ? head_dim : hidden_size / num_attention_heads};
}

RopeConfig Fields::rope() const {
  std::int64_t original = original_max_position_embeddings;
  if (original == 0 && rope_type == "yarn") original = max_position_embeddings;
  return {.type = is_long(rope_type) ? "default" : rope_type,
          .theta = rope_theta,
          .factor = factor,
          .low_freq_factor = low_freq_factor,
          .high_freq_factor = high_freq_factor,
          .original_max_position_embeddings = original,
          .beta_fast = beta_fast,
          .beta_slow = beta_slow,
          .attention_factor = attention_factor};
}

std::int64_t Fields::original_length() const {
  for (const std::int64_t given : {original_max_position_embeddings, original_positions})
    if (given != 0) return given;
  return max_position_embeddings;
}

std::int64_t Fields::rotated() const {
  return static_cast<std::int64_t>(static_cast<double>(heads().head_dim) * partial_rotary_factor);
}

bool Fields::has_window(std::int64_t layer, bool otherwise) const {
  return layer_types.empty() ? otherwise : layer_types[static_cast<std::size_t>(layer)] == kSlidingAttention;
}

namespace {

/// Lists with an entry for each layer.
void check_layers(const Fields& fields, std::vector<std::string>& problems) {
  const auto layers = static_cast<std::size_t>(fields.num_hidden_layers);
  for (auto [name, size] :
       {std::pair("layer_types", fields.layer_types.size()), std::pair("no_rope_layers", fields.no_rope_layers.size())})
    if (size != 0 && size != layers)
      problems.push_back(std::string(name) + ": found " + std::to_string(size) + " entries, expected " +
                         std::to_string(layers) + ", num_hidden_layers");
  bool windows = false;
  for (const std::string& type : fields.layer_types) {
    windows = windows || type == kSlidingAttention;
    if (type != kFullAttention && type != kSlidingAttention)
      problems.push_back("layer_types: found \"" + type.substr(0, 40) + "\", expected " + kFullAttention + " or " +
                         kSlidingAttention);
  }
  if (windows && fields.sliding_window == 0)
    problems.push_back(std::string("layer_types: found ") + kSlidingAttention + ", but no sliding_window");
}

/// longrope's: a factor for each pair, and the length up to which the short ones hold.
void check_longrope(const Fields& f, std::vector<std::string>& problems) {
  const auto pairs = static_cast<std::size_t>(is_long(f.rope_type) ? f.rotated() / 2 : 0);
  for (const auto& [name, list] :
       {std::pair("short_factor", &f.short_factor), std::pair("long_factor", &f.long_factor)})
    if (list->size() != pairs || std::any_of(list->begin(), list->end(), [](double factor) { return !(factor > 0); }))
      problems.push_back(std::string("rope_scaling.") + name + ": found " + std::to_string(list->size()) +
                         " numbers, expected " + std::to_string(pairs) + " above 0" +
                         (pairs == 0 ? ", since rope_type is " + f.rope_type : ", one for each pair that rotates"));
  if (!is_long(f.rope_type)) {
    if (f.original_positions != 0 && f.original_positions != f.max_position_embeddings)
      problems.push_back("original_max_position_embeddings: found " + std::to_string(f.original_positions) +
                         ", expected max_position_embeddings, which is " +
                         std::to_string(f.max_position_embeddings) + ", or rope_type longrope");
    return;
  }
  if (f.original_max_position_embeddings != 0 && f.original_positions != 0 &&
      f.original_max_position_embeddings != f.original_positions)
    problems.push_back("rope_scaling.original_max_position_embeddings: found " +
                       std::to_string(f.original_max_position_embeddings) +
                       ", but original_max_position_embeddings is " + std::to_string(f.original_positions));
  if (f.original_length() < 2)
    problems.push_back("original_max_position_embeddings: found " + std::to_string(f.original_length()) +
                       ", expected at least 2 (longrope needs it)");
}

}  // namespace

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
  else if (fields.rotated() < 2 || fields.rotated() % 2 != 0)
    problems.push_back("partial_rotary_factor: " + number(fields.rotated()) + " of " + number(heads.head_dim) +
                       " elements of a head, expected an even number");
  if (heads.heads % heads.kv_heads != 0)
    problems.push_back("num_key_value_heads: found " + number(heads.kv_heads) +
                       ", expected a divisor of num_attention_heads, which is " + number(heads.heads));
  check_layers(fields, problems);
  constexpr std::int64_t kAnyHead = 2;  // the head size is judged above
  for (const std::string& problem : rope_problems(fields.rope(), kAnyHead)) problems.push_back(problem);
  check_longrope(fields, problems);
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
      .one_of({"default", "linear", "llama3", "yarn", kLongRope});
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
  t.add("n_inner", &Fields::n_inner, "width of the feed-forward layer; 0: four times n_embd")
      .at_least(0)
      .at_most(1 << 22);
  t.add("partial_rotary_factor", &Fields::partial_rotary_factor, "part of a head that rotates").above(0).at_most(1);
  t.add("original_max_position_embeddings", &Fields::original_positions,
        "longrope: longest sequence that has the short factors, in tokens; 0: max_position_embeddings")
      .at_least(0)
      .at_most(1 << 30);
  t.add("rope_scaling.short_factor", &Fields::short_factor,
        "longrope: wavelengths of each pair are multiplied by these");
  t.add("rope_scaling.long_factor", &Fields::long_factor, "longrope: the same of runs of longer sequences");
  t.add("use_sliding_window", &Fields::use_sliding_window, "layers from max_window_layers on look at a window");
  t.add("sliding_window", &Fields::sliding_window, "tokens that a window has, the query's own included; 0: no windows")
      .at_least(0)
      .at_most(1 << 30);
  t.add("max_window_layers", &Fields::max_window_layers, "first layers that look at all tokens").at_least(0);
  t.add("sliding_window_pattern", &Fields::sliding_window_pattern,
        "every so many layers one looks at all tokens, the others at a window")
      .at_least(1);
  t.add("layer_types", &Fields::layer_types,
        "full_attention or sliding_attention of each layer; empty: as the family's other fields say");
  t.add("no_rope_layers", &Fields::no_rope_layers,
        "of each layer 1, or 0 where nothing rotates; empty: as no_rope_layer_interval says");
  t.add("no_rope_layer_interval", &Fields::no_rope_layer_interval, "every so many layers one does not rotate")
      .at_least(1);
  t.add("rope_local_base_freq", &Fields::rope_local_base_freq, "rope_theta of layers that look at a window").above(1);
  t.add("query_pre_attn_scalar", &Fields::query_pre_attn_scalar, "scores are divided by its square root")
      .at_least(1)
      .at_most(1 << 20);
  t.add("attn_logit_softcapping", &Fields::attn_logit_softcapping, "soft cap of attention scores; 0: none").at_least(0);
  t.add("final_logit_softcapping", &Fields::final_logit_softcapping, "soft cap of logits; 0: none").at_least(0);
  return t;
}

OptionValues written_fields(const OptionValues& values, const Fields& fields) {
  const HeadLayout heads = fields.heads();
  OptionValues written;
  for (const auto& [key, value] : values.all()) {
    if (!key.starts_with("rope_scaling.")) written.set(key, value);
  }
  if (values.find("num_key_value_heads")) written.set("num_key_value_heads", heads.kv_heads);
  if (values.find("head_dim")) written.set("head_dim", heads.head_dim);
  if (values.find("original_max_position_embeddings"))
    written.set("original_max_position_embeddings", fields.original_length());
  if (fields.rope_type == "default") return written;
  written.set("rope_scaling.rope_type", fields.rope_type);
  for (const RopeField& field : rope_fields()) {
    const bool left_to_formula = field.member == &Fields::attention_factor && fields.attention_factor == 0;
    if (uses(field, fields.rope_type) && !left_to_formula)
      written.set(std::string("rope_scaling.") + field.name, fields.*field.member);
  }
  if (is_long(fields.rope_type)) {
    written.set("rope_scaling.short_factor", fields.short_factor);
    written.set("rope_scaling.long_factor", fields.long_factor);
  }
  if (fields.original_max_position_embeddings != 0)
    written.set("rope_scaling.original_max_position_embeddings", fields.original_max_position_embeddings);
  return written;
}

void set_forms(Description& d, const Fields& f, const LayerForm& full, const LayerForm& windowed,
               const std::function<bool(std::int64_t)>& otherwise) {
  d.forms = {full, windowed};
  for (std::int64_t layer = 0; layer < f.num_hidden_layers; ++layer)
    d.form_of_layer.push_back(f.sliding_window > 0 && f.has_window(layer, otherwise(layer)) ? 1 : 0);
}

namespace {

/// Rope of all layers. longrope is Ding et al., "LongRoPE" (2024), as transformers has it: pairs have factors of their
/// own, and cosines and sines grow with the logarithm of the length.
LayerForm rotating(const Fields& f) {
  LayerForm form{.rope = rope_frequencies(f.rope(), f.rotated())};
  if (!is_long(f.rope_type)) return form;
  form.long_inverse = form.rope->inverse;
  for (std::size_t i = 0; i < form.long_inverse.size(); ++i) {
    form.rope->inverse[i] /= f.short_factor[i];
    form.long_inverse[i] /= f.long_factor[i];
  }
  form.long_beyond = f.original_length();
  const auto original = static_cast<double>(form.long_beyond);
  const double longer = static_cast<double>(f.max_position_embeddings) / original;
  if (f.attention_factor > 0)
    form.rope->magnitude = f.attention_factor;
  else if (longer > 1)
    form.rope->magnitude = std::sqrt(1 + std::log(longer) / std::log(original));
  return form;
}

}  // namespace

Description llama_shape(const Fields& f) {
  Description d;
  d.vocabulary = f.vocab_size, d.width = f.hidden_size, d.ffn = f.intermediate_size, d.layers = f.num_hidden_layers;
  d.max_positions = f.max_position_embeddings;
  d.heads = f.heads();
  d.eps = f.rms_norm_eps;
  d.forms = {rotating(f)};
  d.attention_scale = 1 / std::sqrt(static_cast<double>(d.heads.head_dim));
  d.tied = f.tie_word_embeddings;
  d.init_deviation = f.initializer_range;
  return d;
}

}  // namespace quern::decoder
