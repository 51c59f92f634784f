#include "conformance/subject.h"

#include "conformance/report.h"

namespace quern::conformance {

std::vector<OptionValue> other_values(const OptionSpec& spec, const OptionValue& now) {
  std::vector<OptionValue> values;
  for (const std::string& choice : spec.choices) values.emplace_back(choice);
  if (const auto* flag = std::get_if<bool>(&now)) values.emplace_back(!*flag);
  if (const auto* integer = std::get_if<std::int64_t>(&now))
    for (std::int64_t other : {*integer * 2, *integer + 1, *integer / 2, *integer + 100}) values.emplace_back(other);
  if (const auto* real = std::get_if<double>(&now))
    for (double other : {*real * 1.5, *real + 0.25, *real / 2, *real / 20}) values.emplace_back(other);
  std::erase_if(values, [&](OptionValue value) { return value == now || check_option(spec, value).has_value(); });
  return values;
}

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
