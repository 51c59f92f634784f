#include "shared/decoder/family.h"

#include <algorithm>

namespace quern::decoder {

namespace {

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
  for (std::size_t i = 0; i < all.size(); ++i) {
    OptionSpec spec = all[i];
    const bool listed = std::find(family.fields.begin(), family.fields.end(), spec.key) != family.fields.end();
    if (i >= general && !listed) continue;
    if (auto own = family.defaults.find(spec.key); own != family.defaults.end()) spec.default_value = own->second;
    options.push_back(std::move(spec));
  }
  return options;
}

HfModel hf_model_of(const Family& family) {
  return {.model_type = family.model_type,
          .architecture = family.architecture,
          .options = options_of(family),
          .neutral = family.neutral};
}

std::unique_ptr<Model> make_model(const Family& family, const OptionValues& values) {
  return std::make_unique<FamilyModel>(family, values, all_fields().bind(values));
}

void add_family(Manifest& manifest, const Family& family) {
  manifest.version = "0.1.0";
  manifest.licence = "Apache-2.0";
  manifest.add<Model>(family.model_type, family.summary, options_of(family), [family](const OptionValues& given) {
    return make_model(family, model_options(given, hf_model_of(family)));
  });
}

}  // namespace quern::decoder
