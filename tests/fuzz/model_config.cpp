// config.json of a model: what a model plugin accepts is a sound model, whose own config.json gives it again.
#include "fuzz.h"
#include "plugin/plugin_host.h"
#include "quern/model.h"
#include "quern/testkit/model_conformance.h"

using namespace quern;

namespace {

void read(PluginHost& host, const std::string& id, std::string_view config) {
  OptionValues values;
  values.set("config", fuzz::file("config.json", config));
  std::unique_ptr<Model> model;
  // Sizes that do not fit together are a config error, since the TOML may have set them.
  if (!fuzz::accepted({ErrorCode::input, ErrorCode::config}, [&] { model = host.create<Model>(id, values); })) return;
  for (const std::string& fault : testkit::model_faults(*model)) fuzz::fail("an unsound model", fault);
  if (testkit::parameter_count(*model) <= 0) fuzz::fail("a model without parameters", "");
  const std::string written = model->hf_config();
  values.set("config", fuzz::file("written.json", written));
  if (!fuzz::accepted({}, [&] { model = host.create<Model>(id, values); })) return;
  if (model->hf_config() != written) fuzz::fail("config.json does not come back", written);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static PluginHost host(PluginHost::standard_folders());
  for (const char* id : {"llama", "qwen2"}) read(host, id, fuzz::text(data, size));
  return 0;
}
