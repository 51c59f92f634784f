// One line a section. A section whose options belong to a component is section_of(name, help, its OptionTable).
#include "config/run_schemas.h"

namespace quern {

namespace {

struct ModelSection {
  std::string config;
};

SectionSchema model_section() {
  OptionTable<ModelSection> t;
  t.add("config", &ModelSection::config,
        "a Hugging Face config.json or its folder; keys of [model.<id>] are laid over it; empty: none");
  SectionSchema schema = section_of("model", "The network to train.", t);
  schema.plugin_kind = "model";
  schema.options_file_key = "config";
  return schema;
}

struct DeviceSection {
  std::int64_t ordinal = 0;
};

SectionSchema device_section() {
  OptionTable<DeviceSection> t;
  t.add("ordinal", &DeviceSection::ordinal, "which unit of the device, from 0").at_least(0);
  SectionSchema schema = section_of("device", "Where programs run.", t);
  schema.plugin_kind = "device";
  schema.default_id = "cpu";
  return schema;
}

SectionSchema precision_section() {
  SectionSchema schema;
  schema.name = "precision";
  schema.help = "Formats and scales of the matrix products.";
  schema.plugin_kind = "precision";
  schema.default_id = "fp32";
  return schema;
}

}  // namespace

std::vector<SectionSchema> run_schemas() { return {model_section(), device_section(), precision_section()}; }

PluginHost run_host() { return PluginHost(PluginHost::standard_folders()); }

}  // namespace quern
