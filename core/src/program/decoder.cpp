#include "quern/decoder.h"

#include <algorithm>
#include <vector>

#include "quern/error.h"

namespace quern {

namespace {

struct RopeField {
  const char* name;
  double DecoderOptions::*member;
  std::vector<const char*> types;  // that use it
};

const std::vector<RopeField>& rope_fields() {
  static const std::vector<RopeField> fields = {
      {"factor", &DecoderOptions::factor, {"linear", "llama3", "yarn"}},
      {"low_freq_factor", &DecoderOptions::low_freq_factor, {"llama3"}},
      {"high_freq_factor", &DecoderOptions::high_freq_factor, {"llama3"}},
      {"beta_fast", &DecoderOptions::beta_fast, {"yarn"}},
      {"beta_slow", &DecoderOptions::beta_slow, {"yarn"}},
      {"attention_factor", &DecoderOptions::attention_factor, {"yarn"}},
  };
  return fields;
}

bool uses(const RopeField& field, const std::string& type) {
  return std::find(field.types.begin(), field.types.end(), type) != field.types.end();
}
bool has_original_length(const std::string& type) { return type == "llama3" || type == "yarn"; }

}  // namespace

HeadLayout DecoderOptions::heads() const {
  return {.heads = num_attention_heads,
          .kv_heads = num_key_value_heads > 0 ? num_key_value_heads : num_attention_heads,
          .head_dim = head_dim > 0 ? head_dim : hidden_size / num_attention_heads};
}

RopeConfig DecoderOptions::rope() const {
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

void check_decoder(const DecoderOptions& options, const std::string& model) {
  std::vector<std::string> problems;
  auto number = [](std::int64_t value) { return std::to_string(value); };
  const HeadLayout heads = options.heads();
  const bool derived = options.head_dim == 0;
  if (derived && options.hidden_size % heads.heads != 0)
    problems.push_back("hidden_size: found " + number(options.hidden_size) +
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
  for (const std::string& problem : rope_problems(options.rope(), kAnyHead)) problems.push_back(problem);
  const DecoderOptions defaults;
  const std::string unused = ": given, but rope_type " + options.rope_type + " does not use it";
  for (const RopeField& field : rope_fields())
    if (!uses(field, options.rope_type) && options.*field.member != defaults.*field.member)
      problems.push_back(std::string("rope_scaling.") + field.name + unused);
  if (!has_original_length(options.rope_type) && options.original_max_position_embeddings != 0)
    problems.push_back("rope_scaling.original_max_position_embeddings" + unused);
  if (problems.empty()) return;
  std::string what = "sizes that cannot be used:";
  for (const std::string& problem : problems) what += "\n  " + problem;
  throw Error(ErrorCode::config, {.where = "model." + model, .what = what});
}

OptionValues decoder_fields(const DecoderOptions& options) {
  const HeadLayout heads = options.heads();
  OptionValues fields;
  fields.set("vocab_size", options.vocab_size);
  fields.set("hidden_size", options.hidden_size);
  fields.set("intermediate_size", options.intermediate_size);
  fields.set("num_hidden_layers", options.num_hidden_layers);
  fields.set("num_attention_heads", heads.heads);
  fields.set("num_key_value_heads", heads.kv_heads);
  fields.set("head_dim", heads.head_dim);
  fields.set("max_position_embeddings", options.max_position_embeddings);
  fields.set("rms_norm_eps", options.rms_norm_eps);
  fields.set("initializer_range", options.initializer_range);
  fields.set("tie_word_embeddings", options.tie_word_embeddings);
  fields.set("hidden_act", options.hidden_act);
  fields.set("rope_theta", options.rope_theta);
  if (options.rope_type == "default") return fields;
  fields.set("rope_scaling.rope_type", options.rope_type);
  for (const RopeField& field : rope_fields()) {
    bool left_to_formula = field.member == &DecoderOptions::attention_factor && options.attention_factor == 0;
    if (uses(field, options.rope_type) && !left_to_formula)
      fields.set(std::string("rope_scaling.") + field.name, options.*field.member);
  }
  if (options.original_max_position_embeddings != 0)
    fields.set("rope_scaling.original_max_position_embeddings", options.original_max_position_embeddings);
  return fields;
}

}  // namespace quern
