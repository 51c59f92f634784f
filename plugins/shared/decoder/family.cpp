#include "shared/decoder/family.h"

#include <algorithm>

namespace quern::decoder {

namespace {

const std::string& name_in(const Family& family, const std::string& key) {
  const auto own = family.renamed.find(key);
  return own == family.renamed.end() ? key : own->second;
}

/// The fields by their names in the table.
Fields fields_of(const Family& family, const OptionValues& values) {
  OptionValues named;
  const OptionTable<Fields> table = all_fields();
  for (const OptionSpec& spec : table.specs())
    if (const OptionValue* value = values.find(name_in(family, spec.key))) named.set(spec.key, *value);
  return table.bind(named);
}

Description checked(const Family& family, const Fields& fields) {
  check_fields(fields, family.model_type);
  return family.describe(fields);
}

/// The decoder with its config.json.
class FamilyModel final : public Decoder {
 public:
  FamilyModel(const Family& family, const OptionValues& values, const Fields& fields)
      : Decoder(checked(family, fields)), hf_(hf_model_of(family)), written_(written_fields(values, fields)) {}

  std::string hf_config() const override { return write_hf_config(hf_, written_); }

 private:
  HfModel hf_;
  OptionValues written_;
};

}  // namespace

std::vector<OptionSpec> options_of(const Family& family) {
  std::vector<OptionSpec> options;
  const std::size_t general = general_fields().specs().size();
  const std::vector<OptionSpec> all = all_fields().specs();
  auto has = [&](const char* key) { return std::ranges::find(family.fields, key) != family.fields.end(); };
  for (std::size_t i = 0; i < all.size(); ++i) {
    OptionSpec spec = all[i];
    auto is_here = [&](const std::string& name) { return spec.key == name || spec.key.starts_with(name + "."); };
    const std::vector<std::string>& list = i < general ? family.without : family.fields;
    const bool listed = std::any_of(list.begin(), list.end(), is_here);
    if (listed == (i < general)) continue;
    if (spec.key == "hidden_act") spec.choices = family.hidden_act, spec.default_value = family.hidden_act.front();
    if (spec.key == "rope_scaling.rope_type" && !has("rope_scaling.long_factor")) std::erase(spec.choices, kLongRope);
    if (auto own = family.defaults.find(spec.key); own != family.defaults.end()) spec.default_value = own->second;
    spec.key = name_in(family, spec.key);
    options.push_back(std::move(spec));
  }
  return options;
}

HfModel hf_model_of(const Family& family) {
  return {.model_type = family.model_type,
          .architecture = family.architecture,
          .options = options_of(family),
          .neutral = family.neutral,
          .null_when_off = {"sliding_window", "layer_types", "no_rope_layers", "attn_logit_softcapping",
                            "final_logit_softcapping", "n_inner"}};
}

std::unique_ptr<Model> make_model(const Family& family, const OptionValues& values) {
  return std::make_unique<FamilyModel>(family, values, fields_of(family, values));
}

void add_family(Manifest& manifest, const Family& family) {
  manifest.version = "0.1.0";
  manifest.licence = "Apache-2.0";
  manifest.add<Model>(family.model_type, family.summary, options_of(family), [family](const OptionValues& given) {
    return make_model(family, model_options(given, hf_model_of(family)));
  });
}

}  // namespace quern::decoder
