// One function a section that selects a plugin; the others are section_of(name, help, OptionTable).
#include "run/options/run_schemas.h"

#include <algorithm>
#include <iterator>
#include <limits>

#include "base/shorten.h"
#include "data/token_dataset.h"
#include "log/log_sinks.h"
#include "optimizer/optimizers.h"
#include "optimizer/schedules.h"
#include "plan/placement.h"
#include "program/passes/choose_saved.h"
#include "run/options/run_options.h"

namespace quern {

namespace {

struct NoOptions {};

struct ModelOptions {
  std::string config;
};

SectionSchema selecting(SectionSchema schema, std::string kind, std::string default_id) {
  schema.plugin_kind = std::move(kind);
  schema.default_id = std::move(default_id);
  return schema;
}

SectionSchema model_section() {
  OptionTable<ModelOptions> table;
  table.add("config", &ModelOptions::config,
            "a Hugging Face config.json or its folder; keys of [model.<id>] override it; empty: none");
  SectionSchema schema = selecting(section_of("model", "The network to train.", table), "model", "");
  schema.options_file_key = "config";
  return schema;
}

std::string unknown_activation(const std::string& name) {
  std::string text = "unknown activation, found " + shortened(to_string(OptionValue(name))) + ", expected any of ",
              near;
  for (const std::string& known : kRecomputeNames) text += (known == kRecomputeNames[0] ? "" : ", ") + known;
  near = nearest_name(name, kRecomputeNames);
  return near.empty() ? text : text + "; nearest name `" + near + "`";
}

constexpr const char* kPlaced[] = {"master", "moments", "gradients", "weights", "activations"};

bool names_store(const std::string& text) {
  const std::optional<Placement> placement = placement_named(text);
  return placement && !text.empty() && placement->device_percent == 0 && text != kOnDevice && text != kAuto;
}

SectionSchema memory_section() {
  SectionSchema schema = section_of("memory", "What is kept, and where.", memory_options());
  schema.plugin_kind = "offload";
  schema.plugin_keys.assign(std::begin(kPlaced), std::end(kPlaced));
  schema.plugin_keys.emplace_back("stores");
  schema.id_in = [](const std::string& text) { return placement_named(text).value_or(Placement{}).memory; };
  schema.no_plugin = {std::string(kOnDevice), std::string(kAuto)};
  schema.selects = [](const OptionValues& values, const std::string& key) {
    return key != "stores" || chooses(memory_options().bind(values));
  };
  schema.check = [](const OptionValues& values) {
    SectionFindings findings;
    for (const std::string& name : values.get<std::vector<std::string>>("recompute"))
      if (std::find(kRecomputeNames.begin(), kRecomputeNames.end(), name) == kRecomputeNames.end())
        findings.emplace_back("recompute", unknown_activation(name));
    for (const std::string& id : values.get<std::vector<std::string>>("stores"))
      if (!names_store(id))
        findings.emplace_back("stores", "not a store, found " + shortened(to_string(OptionValue(id))) +
                                            ", expected ids of offload stores, such as \"host\"; for none use []");
    for (const char* key : kPlaced)
      if (const auto text = values.get<std::string>(key); !placement_named(text))
        findings.emplace_back(key, "not a share, found " + shortened(to_string(OptionValue(text))) +
                                       ", expected such as \"device:40%,host\": 1 to 99 percent of the layers, and the "
                                       "store of the others; for all or none of them name the device or the store");
    return findings;
  };
  return schema;
}

SectionSchema sample_section() {
  SectionSchema schema = section_of(
      "sample", "Continuations of prompts, logged during training. They do not change the training.", sample_options());
  schema.check = [](const OptionValues& values) {
    SectionFindings findings;
    const auto every = values.get<std::int64_t>("every");
    if (every > 0 && values.get<std::vector<std::string>>("prompts").empty())
      findings.emplace_back("prompts", "found none with sample.every = " + std::to_string(every) +
                                           ", expected token numbers or a .jsonl file");
    return findings;
  };
  return schema;
}

SectionSchema train_section() {
  SectionSchema schema = section_of("train", "Sizes and length of the run.", train_options());
  schema.lists = {{"groups", "What holds for some parameters; of several that match, the last decides a key.",
                   train_group_options().specs()}};
  schema.check = [](const OptionValues& values) {
    SectionFindings findings;
    auto number = [&](const char* key) { return values.get<std::int64_t>(key); };
    constexpr std::int64_t kMost = std::numeric_limits<std::int32_t>::max();  // devices count tokens in 32 bits
    const std::int64_t tokens = number("micro_batch") * number("sequence");
    if (tokens > kMost)
      findings.emplace_back("micro_batch", "found " + std::to_string(number("micro_batch")) + " x " +
                                               std::to_string(number("sequence")) + " = " + std::to_string(tokens) +
                                               " tokens with sequence, expected at most " + std::to_string(kMost));
    std::int64_t all = 0;
    if (findings.empty() && __builtin_mul_overflow(tokens * number("accumulation"), number("steps"), &all))
      findings.emplace_back("steps", "found more tokens in " + std::to_string(number("steps")) + " steps of " +
                                         std::to_string(number("accumulation")) + " x " + std::to_string(tokens) +
                                         " tokens than 64-bit numbers hold, expected fewer");
    return findings;
  };
  return schema;
}

SectionSchema adapter_section() {
  SectionSchema schema =
      section_of("adapter", "Low-rank matrices that train in place of the model.", adapter_options());
  schema.check = [](const OptionValues& values) {
    SectionFindings findings;
    if (values.get<std::vector<std::string>>("targets").empty())
      findings.emplace_back("targets", "found none, expected modules such as \"q_proj\", or \"all-linear\"");
    return findings;
  };
  return schema;
}

SectionSchema log_section() {
  SectionSchema schema = section_of("log", "What is logged, and where.", log_options());
  schema.plugin_kind = "log";
  schema.plugin_keys = {"sinks"};
  schema.check = [](const OptionValues& values) {
    SectionFindings findings;
    if (values.get<std::string>("directory").empty())
      findings.emplace_back("directory", "found \"\", expected the directory of the run");
    return findings;
  };
  return schema;
}

/// What each value of parallel.zero sets.
std::vector<std::map<std::string, std::string>> stages_of_zero() {
  std::vector<std::map<std::string, std::string>> stages(1);
  for (const char* key : {"shard_optimizer", "shard_gradients", "shard_weights"}) {
    stages.push_back(stages.back());
    stages.back()[key] = "ranks";
  }
  return stages;
}

SectionSchema parallel_section() {
  SectionSchema schema =
      section_of("parallel", "How many devices a run uses, and which state is sharded over them.", parallel_options());
  schema.plugin_kind = "communicator";
  schema.plugin_keys = {"communicator", "collectives.all_gather", "collectives.reduce_scatter",
                        "collectives.all_reduce", "across"};
  schema.no_plugin = {"none"};
  schema.preset_key = "zero";
  schema.presets = stages_of_zero();
  schema.moved = {
      {"unhidden_steps", "the time that transfers add to a step is measured by `quern bench transfers FILE`"}};
  schema.check = [](const OptionValues& values) {
    SectionFindings findings;
    const auto ranks = values.get<std::int64_t>("ranks");
    const auto& communicator = values.get<std::string>("communicator");
    if (ranks != 1 && communicator == "none")
      findings.emplace_back("communicator", "found \"none\" with " +
                                                (ranks > 0 ? std::to_string(ranks) : "all devices'") +
                                                " ranks, expected the id of a communicator, or parallel.ranks = 1");
    const auto machines = values.get<std::int64_t>("machines");
    if (machines > 1 && (ranks == 0 || ranks % machines != 0 || ranks == machines))
      findings.emplace_back("machines",
                            "found " + std::to_string(machines) + " with " + std::to_string(ranks) +
                                " ranks, expected a divisor of parallel.ranks, with two ranks or more each");
    if (machines > 1 && values.get<std::string>("reduction") != "fast")
      findings.emplace_back("machines", "found " + std::to_string(machines) +
                                            " with reduction = \"reproducible\", expected 1, or parallel.reduction = "
                                            "\"fast\"");
    if (machines == 1 && values.get<std::string>("across") != "none")
      findings.emplace_back("across", "found " + shortened(to_string(OptionValue(values.get<std::string>("across")))) +
                                          " with machines = 1, expected \"none\", or parallel.machines of 2 or more");
    const auto zero = static_cast<std::size_t>(values.get<std::int64_t>("zero"));
    auto found = [&](const char* key) {
      const bool by_preset = stages_of_zero()[zero].contains(key);
      return "\"ranks\"" + (by_preset ? " (by zero = " + std::to_string(zero) + ")" : std::string());
    };
    for (const char* key : {"shard_weights", "shard_gradients"})
      if (values.get<std::string>(key) != "none" && values.get<std::string>("shard_optimizer") == "none")
        findings.emplace_back(key, "found " + found(key) +
                                       " with shard_optimizer = \"none\", expected \"none\", or "
                                       "parallel.shard_optimizer = \"ranks\"");
    if (values.get<std::string>("shard_gradients") != "none" && values.get<std::string>("reduction") != "fast")
      findings.emplace_back("shard_gradients", "found " + found("shard_gradients") +
                                                   " with reduction = \"reproducible\", expected \"none\", or "
                                                   "parallel.reduction = \"fast\"");
    for (const char* key : {"collectives.all_gather", "collectives.reduce_scatter", "collectives.all_reduce"})
      if (const auto& id = values.get<std::string>(key); id != "none" && communicator == "none")
        findings.emplace_back(
            key, "found " + shortened(to_string(OptionValue(id))) + " without a communicator, expected \"none\"");
    return findings;
  };
  return schema;
}

SectionSchema optimizer_section() {
  SectionSchema schema =
      selecting(section_of("optimizer", "How weights move.", optimizer_options()), "optimizer", "adamw");
  schema.plugins_in_list = {"train", "groups", "optimizer"};
  return schema;
}

SectionSchema checkpoint_section() {
  SectionSchema schema = section_of("checkpoint", "What is saved, and when.", checkpoint_options());
  schema.check = [](const OptionValues& values) {
    SectionFindings findings;
    const auto every = values.get<std::int64_t>("every"), keep_every = values.get<std::int64_t>("keep_every");
    if (keep_every > 0 && (every == 0 || keep_every % every != 0))
      findings.emplace_back("keep_every", "found " + std::to_string(keep_every) + " with every = " +
                                              std::to_string(every) + ", expected a multiple of every, or 0");
    return findings;
  };
  return schema;
}

}  // namespace

std::vector<SectionSchema> run_schemas() {
  return {
      model_section(),
      selecting(section_of("data", "Where tokens come from.", data_options()), "data", "tokens"),
      train_section(),
      adapter_section(),
      optimizer_section(),
      selecting(section_of("schedule", "How the learning rate moves.", OptionTable<NoOptions>()), "schedule", "cosine"),
      selecting(section_of("precision", "Formats and scales of matmuls.", precision_options()), "precision", "fp32"),
      parallel_section(),
      memory_section(),
      selecting(section_of("device", "Where programs run.", device_options()), "device", "cpu"),
      section_of("guard", "What to do about numbers that are not finite, or stand out.", guard_options()),
      log_section(),
      sample_section(),
      checkpoint_section(),
  };
}

PluginHost run_host(const Manifest& components) {
  PluginHost host(PluginHost::standard_folders());
  Manifest data;
  add_token_dataset(data);
  host.add_builtins(std::move(data));
  for (auto factories : {optimizer_factories(), schedule_factories(), log_sink_factories()})
    for (Factory& factory : factories) host.add_builtin(std::move(factory));
  host.add_builtins(components);
  return host;
}

ConfigDocument document_of(const RunConfig& config) {
  ConfigDocument document =
      config.text ? ConfigDocument::parse(*config.text, config.file) : ConfigDocument::read(config.file);
  for (const std::string& assignment : config.overrides) document.set(assignment);
  return document;
}

}  // namespace quern
