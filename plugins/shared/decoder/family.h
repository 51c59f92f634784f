#pragma once
// A family of models as data: the fields that its config.json has, their defaults, and the decoder that follows from
// their values. A plugin of a family is a page that fills one:
//
//   Family family() { return {.model_type = "qwen3", .architecture = "Qwen3ForCausalLM", ..., .describe = describe}; }
//   QUERN_PLUGIN("model", "qwen3", manifest) { add_family(manifest, family()); }

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "quern/hf_config.h"
#include "quern/plugin.h"
#include "shared/decoder/decoder.h"
#include "shared/decoder/fields.h"

namespace quern::decoder {

struct Family {
  std::string model_type;                                ///< "qwen3": of config.json, and the plugin's id
  std::string architecture;                              ///< "Qwen3ForCausalLM"
  std::string summary;                                   ///< for people: "Qwen3 (dense)"
  std::vector<std::string> fields = {};                  ///< beside those that Llama has without biases
  std::map<std::string, OptionValue> defaults = {};      ///< other than the table's
  std::vector<std::string> without = {};                 ///< Llama's fields that it lacks; "rope_scaling" is all of it
  std::map<std::string, std::string> renamed = {};       ///< its names of the table's fields
  std::vector<std::string> hidden_act = {"silu"};        ///< activations that it takes, the first by default
  std::vector<HfNeutral> neutral = {};                   ///< fields that are ignored where they change nothing
  Description (*describe)(const Fields&) = llama_shape;  ///< of fields that are checked
};

/// The options of [model.<model_type>].
std::vector<OptionSpec> options_of(const Family& family);
HfModel hf_model_of(const Family& family);

/// `values` has all of the family's options. Throws a config error when they do not fit together.
std::unique_ptr<Model> make_model(const Family& family, const OptionValues& values);

/// The plugin's one implementation, with the version of quern's own plugins.
void add_family(Manifest& manifest, const Family& family);

}  // namespace quern::decoder
