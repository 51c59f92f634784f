#include "conformance/subject.h"

#include "conformance/report.h"

namespace quern::conformance {

std::unique_ptr<Device> fresh_device(PluginHost& host, const std::string& id) {
  const Factory& factory = host.require(kPluginKind<Device>, id);
  OptionValues values = default_values(factory.options);
  if (values.find("threads")) values.set("threads", std::int64_t{1});  // what runs here is small
  auto device = host.create<Device>(id, values);
  for (const CustomKernel& kernel : host.kernels())
    if (kernel.device == id) device->add_kernel(kernel);
  return device;
}

std::unique_ptr<Device> oracle(PluginHost& host) {
  auto device = fresh_device(host, "cpu");
  device->open(0);
  return device;
}

std::unique_ptr<Device> open_device(PluginHost& host, const CheckOptions& options) {
  auto device = fresh_device(host, options.device);
  try {
    device->open(options.ordinal);
  } catch (const Error& error) {
    if (error.code() == ErrorCode::resources) throw Skipped{error.what()};
    throw;
  }
  return device;
}

std::string settings_text(const Subject& subject) {
  const OptionValues defaults = default_values(subject.factory.options);
  std::string text;
  for (const auto& [key, value] : subject.values.all()) {
    const OptionValue* usual = defaults.find(key);
    if (!usual || *usual != value) text += (text.empty() ? "" : ", ") + key + " = " + to_string(value);
  }
  return text;
}

}  // namespace quern::conformance
