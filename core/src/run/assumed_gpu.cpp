#include "run/assumed_gpu.h"

#include <algorithm>
#include <cctype>

#include <fmt/format.h>

#include "base/format.h"
#include "config/resolve.h"
#include "plan/choice/choose.h"
#include "quern/error.h"
#include "run/options/run_schemas.h"
#include "run/session.h"

namespace quern {

namespace {

constexpr const char* kOption = "assume";

/// Letters and digits alone, lower case.
std::string plain(const std::string& name) {
  std::string text;
  for (const char c : name)
    if (std::isalnum(static_cast<unsigned char>(c)))
      text += static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  return text;
}

std::string row(const std::string& file, const std::vector<std::string>& overrides) {
  const ConfiguredRun planned(ConfigDocument::read(file, overrides));
  const DeviceTraits& device = planned.session.device->traits();
  const std::string name = fmt::format("{:<28}", device.name);
  Choice choice;
  try {
    choice = choose_with_micro_batch(planned.session.parts(), planned.session.plan_options());
  } catch (const Error& error) {
    if (error.code() != ErrorCode::resources) throw;
    return name + "its kernels do not take this precision or model\n";
  }
  const Plan& plan = choice.plan;
  auto sized = [](std::int64_t bytes) { return format_bytes(static_cast<double>(bytes)); };
  const std::string memory = fmt::format("{:>10}{:>10}", sized(plan.device_total()), sized(plan.host_bytes()));
  if (!choice.fits) return name + fmt::format("{:>6}{:>6}{}  does not fit\n", "-", "-", memory);
  std::vector<std::string> away;
  for (const auto& [key, placement] : kPlacedKeys)
    if ((plan.options.state.*placement).memory != kOnDevice)
      away.push_back(std::string(key).substr(std::string("memory.").size()));
  return name + fmt::format("{:>6}{:>6}{}  {}\n", format_count(plan.tokens_per_second()), plan.options.geometry.batch,
                            memory, format_list(away, "nothing"));
}

}  // namespace

std::vector<std::string> assumable_gpus(const std::string& config_file, const std::vector<std::string>& overrides) {
  PluginHost host = run_host();
  const ResolvedConfig config = resolve(ConfigDocument::read(config_file, overrides), run_schemas(), host);
  const std::string& device = config.id("device");
  for (const OptionSpec& spec : host.require(kPluginKind<Device>, device).options)
    if (spec.key == kOption) {
      std::vector<std::string> ids = spec.choices;
      std::erase(ids, "auto");
      return ids;
    }
  throw Error(ErrorCode::config, {.where = config.where("device", "id"),
                                  .what = "plans for no other hardware",
                                  .found = device,
                                  .expected = std::string("a device with the option ") + kOption,
                                  .next = "choose one with --set device.id=..."});
}

std::string gpu_named(const std::string& name, const std::vector<std::string>& ids) {
  const std::string wanted = plain(name);
  std::vector<std::string> part_of_it, has_it;
  for (const std::string& id : ids) {
    const std::string known = plain(id);
    if (known == wanted) return id;
    if (wanted.find(known) != std::string::npos) part_of_it.push_back(id);
    if (!wanted.empty() && known.find(wanted) != std::string::npos) has_it.push_back(id);
  }
  auto shorter = [](const std::string& a, const std::string& b) { return plain(a).size() < plain(b).size(); };
  if (!part_of_it.empty()) return *std::max_element(part_of_it.begin(), part_of_it.end(), shorter);
  for (const std::string& id : has_it)
    if (has_it.size() == 1 || plain(id).ends_with(wanted)) return id;
  throw Error(ErrorCode::config,
              {.where = "--gpu",
               .what = has_it.empty() ? "no GPU that is known" : "several GPUs have that in their name",
               .found = "\"" + name + "\"",
               .expected = "one of " + format_list(has_it.empty() ? ids : has_it)});
}

std::vector<std::string> assuming(const std::string& config_file, std::vector<std::string> overrides,
                                  const std::string& gpu, const std::string& host_memory) {
  if (!host_memory.empty()) overrides.push_back("memory.host_budget=" + host_memory);
  if (!gpu.empty()) {
    PluginHost host = run_host();
    const ResolvedConfig config = resolve(ConfigDocument::read(config_file, overrides), run_schemas(), host);
    overrides.push_back("device." + config.id("device") + "." + kOption + "=" + gpu);
  }
  const ConfiguredRun planned(ConfigDocument::read(config_file, overrides));
  if (!gpu.empty() && !chooses(planned.session.memory)) {
    const Limits limits = limits_of(planned.session.parts(), planned.session.plan_options());
    overrides.push_back("memory.device_budget=" + std::to_string(limits.device));
  }
  return overrides;
}

std::string fit_table(const std::string& config_file, const std::vector<std::vector<std::string>>& overrides) {
  std::string text =
      fmt::format("{:<28}{:>6}{:>6}{:>10}{:>10}  {}\n", "", "tok/s", "batch", "device", "host", "in a store");
  for (const std::vector<std::string>& one : overrides) text += row(config_file, one);
  return text;
}

}  // namespace quern
