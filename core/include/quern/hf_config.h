#pragma once
// A Hugging Face config.json as options of a model, and back. A field of the file is an option that the model honours,
// or changes nothing, or is refused by name: a model is never trained as something else than its config says. A field
// that nothing knows is refused if it is spelled almost as an option, or its name speaks of the model's arithmetic
// ("attn", "rope", "experts") and its value is not off (null, false, 0, empty); any other is bookkeeping, and ignored.

#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

#include "quern/options.h"

namespace quern {

/// A field that is ignored if it has one of the values that change nothing.
struct HfNeutral {
  std::string key;
  std::vector<OptionValue> accepted = {};  ///< empty: any; a list in the file must consist of accepted values
  std::string because = {};                ///< why other values are refused: "quern does not apply dropout"
};

/// A model plugin's description of its config.json.
struct HfModel {
  std::string model_type;                       ///< "llama"
  std::string architecture;                     ///< "LlamaForCausalLM"
  std::vector<OptionSpec> options = {};         ///< the fields it supports, by their Hugging Face names; dots nest
  std::vector<HfNeutral> neutral = {};          ///< of this model, beside the fields common to all models
  std::vector<std::string> null_when_off = {};  ///< fields that are written as null where they are 0 or empty
};

/// The options that `text` sets, checked. null is absent. Old and new spellings are one: `rope_parameters` is
/// `rope_scaling` with `rope_theta`, `rope_scaling.type` is `rope_scaling.rope_type`. `where` names the file in
/// messages. All faults are one input error, one line per field.
OptionValues parse_hf_config(std::string_view text, const std::string& where, const HfModel& model);
/// The same from a file, or from config.json in a folder; at most 1 MiB is read.
OptionValues read_hf_config(const std::filesystem::path& path, const HfModel& model);

/// All options of a model, as its factory needs them: `given` (TOML keys that the user set, and "config", the path of a
/// config.json, may be empty) over the fields of that config.json over the defaults. A required option that neither
/// gives, or a bad value, is a config error.
OptionValues model_options(const OptionValues& given, const HfModel& model);

/// config.json with these fields, for transformers 4 and 5. Token ids are null and the dtype is absent: the export of
/// weights sets them.
std::string write_hf_config(const HfModel& model, const OptionValues& fields);

}  // namespace quern
