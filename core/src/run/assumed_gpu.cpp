#include "run/assumed_gpu.h"

#include <algorithm>
#include <cctype>
#include <charconv>
#include <ostream>
#include <utility>

#include <fmt/format.h>

#include "base/format.h"
#include "config/resolve.h"
#include "launch/rank_place.h"
#include "plan/choice/choose.h"
#include "quern/error.h"
#include "run/options/run_schemas.h"
#include "run/session.h"

namespace quern {

namespace {

constexpr const char* kOption = "assume";

/// Runs of letters and digits, lower case.
std::vector<std::string> words_of(const std::string& name) {
  std::vector<std::string> words;
  bool begins = true;
  for (const char c : name) {
    const auto letter = static_cast<unsigned char>(c);
    if (std::isalnum(letter) && std::exchange(begins, false)) words.emplace_back();
    if (std::isalnum(letter))
      words.back() += static_cast<char>(std::tolower(letter));
    else
      begins = true;
  }
  return words;
}

bool has_digit(const std::string& word) { return word.find_first_of("0123456789") != std::string::npos; }

/// The `ids` that have all of these words, one behind the other.
std::vector<std::string> having(const std::vector<std::string>& words, const std::vector<std::string>& ids) {
  std::vector<std::string> found;
  for (const std::string& id : ids) {
    const std::vector<std::string> known = words_of(id);
    if (std::search(known.begin(), known.end(), words.begin(), words.end()) != known.end()) found.push_back(id);
  }
  return found;
}

/// The one of which all others are variants: it is how their names begin. Empty: none is.
std::string common(const std::vector<std::string>& ids) {
  for (const std::string& id : ids)
    if (std::all_of(ids.begin(), ids.end(),
                    [&](const std::string& other) { return other == id || other.starts_with(id + "-"); }))
      return id;
  return {};
}

/// A name without its last words is another card's: "RTX 4070 Ti" is no RTX-4070-Ti-Super.
bool ends_with(const std::vector<std::string>& words, const std::vector<std::string>& end) {
  return words.size() >= end.size() && std::equal(end.rbegin(), end.rend(), words.rbegin());
}

/// For a message: those that share a word with a digit.
std::vector<std::string> near(const std::vector<std::string>& words, const std::vector<std::string>& ids) {
  std::vector<std::string> found;
  for (const std::string& word : words) {
    if (!has_digit(word)) continue;
    for (const std::string& id : having({word}, ids))
      if (std::find(found.begin(), found.end(), id) == found.end()) found.push_back(id);
  }
  return found;
}

std::string row(const std::string& file, const std::vector<std::string>& overrides) {
  const ConfiguredRun planned(ConfigDocument::read(file, overrides));
  const DeviceTraits& device = planned.session.device->traits();
  const std::int64_t ranks = planned.session.parallel.ranks;
  const std::string name =
      fmt::format("{:<32}", (ranks > 1 ? std::to_string(ranks) + " x " : std::string()) + device.name);
  Choice choice;
  try {
    choice = planned.session.with_config_places([&] {
      return choose(planned.session.parts(), planned.session.plan_options(),
                    planned.session.leaves_sharding() ? Reach::sharding : Reach::micro_batch);
    });
  } catch (const Error& error) {
    if (error.code() != ErrorCode::resources) throw;
    return name + "its kernels do not take this precision or model\n";
  }
  const Plan& plan = choice.plan;
  const std::string memory =
      fmt::format("{:>10}{:>10}", format_bytes(plan.device_total()), format_bytes(plan.host_bytes() * ranks));
  if (!choice.fits) return name + fmt::format("{:>6}{:>6}{}  does not fit\n", "-", "-", memory);
  std::vector<std::string> away;
  for (const auto& [key, placement] : kPlacedKeys)
    if ((plan.options.state.*placement).memory != kOnDevice)
      away.push_back(std::string(key).substr(std::string("memory.").size()));
  std::vector<std::string> sharded;
  if (plan.options.state.master.sharding == Sharding::ranks) sharded = {"master", "moments"};
  if (plan.options.state.gradients.sharding == Sharding::ranks) sharded.emplace_back("gradients");
  if (plan.options.state.weights.sharding == Sharding::ranks) sharded.emplace_back("weights");
  return name + fmt::format("{:>6}{:>6}{}  {}{}\n", format_count(plan.tokens_per_second() * static_cast<double>(ranks)),
                            plan.options.geometry.batch, memory, format_list(away, "nothing"),
                            sharded.empty() ? "" : "; sharded: " + format_list(sharded));
}

}  // namespace

OptionSpec assumable_gpus(const std::string& config_file, const std::vector<std::string>& overrides) {
  PluginHost host = run_host();
  const ResolvedConfig config = resolve(ConfigDocument::read(config_file, overrides), run_schemas(), host);
  const std::string& device = config.id("device");
  for (OptionSpec spec : host.require(kPluginKind<Device>, device).options)
    if (spec.key == kOption) {
      std::erase(spec.choices, "auto");
      return spec;
    }
  throw Error(ErrorCode::config, {.where = config.where("device", "id"),
                                  .what = "plans for no other hardware",
                                  .found = device,
                                  .expected = std::string("a device with the option ") + kOption,
                                  .next = "choose one with --set device.id=..."});
}

std::string gpu_named(const std::string& where, const std::string& name, const OptionSpec& gpus) {
  std::vector<std::string> meant = choices_meant(gpus, name);
  const std::vector<std::string> words = words_of(name);
  if (meant.empty() && std::any_of(words.begin(), words.end(), has_digit)) {
    meant = having(words, gpus.choices);
    if (const std::string id = common(meant); !id.empty() && !ends_with(words_of(id), words)) meant.clear();
  }
  if (const std::string id = common(meant); !id.empty()) return id;
  std::vector<std::string> known = meant.empty() ? near(words, gpus.choices) : meant;
  if (known.empty()) known = gpus.choices;
  const std::string nearest = meant.empty() ? nearest_name(name, gpus.choices) : std::string();
  throw Error(ErrorCode::config, {.where = where,
                                  .what = meant.empty() ? "no GPU that is known" : "several GPUs have that name",
                                  .found = "\"" + name + "\"",
                                  .expected = "one of " + format_list(known),
                                  .next = nearest.empty() ? nearest : "nearest name `" + nearest + "`"});
}

AssumedGpus gpus_named(const std::string& where, const std::string& name, const OptionSpec& gpus) {
  AssumedGpus named;
  const auto [end, error] = std::from_chars(name.data(), name.data() + name.size(), named.count);
  std::string_view rest = name;
  rest.remove_prefix(static_cast<std::size_t>(end - name.data()));
  while (rest.starts_with(' ')) rest.remove_prefix(1);
  if (error != std::errc() || !rest.starts_with('x')) return {.id = gpu_named(where, name, gpus)};
  if (named.count < 1 || named.count > kMostRanks)
    throw Error(ErrorCode::config, {.where = where,
                                    .what = "number of GPUs",
                                    .found = "\"" + name + "\"",
                                    .expected = "1 to " + std::to_string(kMostRanks)});
  named.id = gpu_named(where, std::string(rest.substr(1)), gpus);
  return named;
}

std::vector<std::string> assuming(const std::string& config_file, std::vector<std::string> overrides,
                                  const AssumedGpus& gpu, const std::string& host_memory) {
  if (!host_memory.empty()) overrides.push_back("memory.host_budget=" + host_memory);
  if (gpu.id.empty()) return overrides;  // the file may be a pipe, which is read once
  PluginHost host = run_host();
  const ResolvedConfig config = resolve(ConfigDocument::read(config_file, overrides), run_schemas(), host);
  overrides.push_back("device." + config.id("device") + "." + kOption + "=" + gpu.id);
  if (gpu.count > 0) {
    const auto accumulation = config.section("train").get<std::int64_t>("accumulation");
    const std::int64_t of_rank = (accumulation + gpu.count - 1) / gpu.count;
    overrides.push_back("parallel.ranks=" + std::to_string(gpu.count));
    overrides.push_back("train.accumulation=" + std::to_string(of_rank * gpu.count));
    if (gpu.count > 1 && config.section("parallel").get<std::string>("communicator") == "none")
      overrides.emplace_back("parallel.communicator=memcpy");
  }
  const ConfiguredRun planned(ConfigDocument::read(config_file, overrides));
  if (!chooses(planned.session.memory)) {
    const Limits limits = limits_of(planned.session.parts(), planned.session.plan_options());
    overrides.push_back("memory.device_budget=" + std::to_string(limits.device));
  }
  return overrides;
}

void write_fit_table(std::ostream& out, const std::string& config_file,
                     const std::vector<std::vector<std::string>>& overrides) {
  out << fmt::format("{:<32}{:>6}{:>6}{:>10}{:>10}  {}\n", "", "tok/s", "batch", "device", "host", "in a store")
      << std::flush;
  for (const std::vector<std::string>& one : overrides) out << row(config_file, one) << std::flush;
}

}  // namespace quern
