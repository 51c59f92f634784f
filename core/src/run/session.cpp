#include "run/session.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <utility>

#include "checkpoint/names.h"
#include "data/sources/prefetch_source.h"
#include "data/sources/turns_source.h"
#include "hf/ignored_keys.h"
#include "launch/rank_place.h"
#include "optimizer/optimizers.h"
#include "optimizer/update_traits.h"
#include "quern/error.h"
#include "run/options/run_schemas.h"
#include "run/ranks/machines_communicator.h"
#include "run/ranks/split_communicator.h"
#include "transform/train_groups.h"

namespace quern {

namespace {

// Checks of a plugin that join several options do not know where those stand.
template <class Interface>
std::unique_ptr<Interface> make(const ResolvedConfig& config, PluginHost& host, const char* section) {
  try {
    return host.create<Interface>(config.id(section), config.factory_values(section));
  } catch (const Error& error) {
    if (error.code() != ErrorCode::config) throw;
    ErrorDetail detail = error.detail();
    const std::string table = std::string(section) + ".", options = table + config.id(section) + ".";
    const std::size_t key = detail.where.rfind(options);  // "data.tokens.train", when the fault is one option's
    detail.where = key == std::string::npos ? config.where(section, "id") + ": " + detail.where
                                            : config.where(section, detail.where.substr(key + table.size()));
    const OptionValue* file = config.section(section).find("config");
    if (file && !std::get<std::string>(*file).empty() && detail.next.empty())
      detail.next = "correct them in " + std::get<std::string>(*file) + ", or in the table of the plugin";
    throw Error(error.code(), std::move(detail));
  }
}

/// Null: none.
std::unique_ptr<Communicator> make_communicator(const ResolvedConfig& config, PluginHost& host,
                                                const ParallelOptions& parallel) {
  if (parallel.communicator == "none") return nullptr;
  auto make = [&](const std::string& id) {
    return host.create<Communicator>(id, config.factory_values("parallel", id));
  };
  std::vector<std::string> ids = {parallel.communicator};
  std::vector<std::unique_ptr<Communicator>> parts;
  parts.push_back(make(ids[0]));
  auto number = [&](const std::string& id) {
    if (id == "none") return std::size_t{0};
    const auto known = std::find(ids.begin(), ids.end(), id);
    const auto at = static_cast<std::size_t>(known - ids.begin());
    if (known == ids.end()) ids.push_back(id), parts.push_back(make(id));
    return at;
  };
  const SplitCommunicator::Choice choice{.all_gather = number(parallel.all_gather),
                                         .reduce_scatter = number(parallel.reduce_scatter),
                                         .all_reduce = number(parallel.all_reduce)};
  std::unique_ptr<Communicator> communicator;
  if (parts.size() == 1)
    communicator = std::move(parts[0]);
  else
    communicator = std::make_unique<SplitCommunicator>(std::move(parts), choice);
  if (parallel.machines == 1) return communicator;
  return std::make_unique<MachinesCommunicator>(
      std::move(communicator), make(parallel.across == "none" ? parallel.communicator : parallel.across),
      static_cast<int>(parallel.ranks), static_cast<int>(parallel.machines));
}

}  // namespace

Session::Session(const ResolvedConfig& resolved, PluginHost& host)
    : config(resolved),
      data(data_options().bind(config.section("data"))),
      train(train_options().bind(config.section("train"))),
      adapter(adapter_options().bind(config.section("adapter"))),
      optimizer_options(quern::optimizer_options().bind(config.section("optimizer"))),
      parallel(parallel_options().bind(config.section("parallel"))),
      precision_options(quern::precision_options().bind(config.section("precision"))),
      memory(memory_options().bind(config.section("memory"))),
      device_options(quern::device_options().bind(config.section("device"))),
      log(log_options().bind(config.section("log"))),
      sample(sample_options().bind(config.section("sample"))),
      guard(guard_options().bind(config.section("guard"))),
      checkpoint(checkpoint_options().bind(config.section("checkpoint"))) {
  device = make<Device>(config, host, "device");
  if (parallel.ranks == 0) parallel.ranks = device->traits().units;
  communicator = make_communicator(config, host, parallel);
  for (const std::string& id : config.ids("memory"))
    stores.push_back(host.create<OffloadStore>(id, config.factory_values("memory", id)));
  custom_ops = host.ops();
  model = make<Model>(config, host, "model");
  if (const OptionValue* file = config.section("model").find("config")) note_ignored(std::get<std::string>(*file));
  precision = make<PrecisionBackend>(config, host, "precision");
  if (precision_options.first_layers > 0 || precision_options.last_layers > 0 ||
      !precision_options.outer_parameters.empty()) {
    const Factory& factory = host.require(kPluginKind<PrecisionBackend>, precision_options.outer);
    outer_precision = host.create<PrecisionBackend>(precision_options.outer, default_values(factory.options));
  }
  make_precision_forms(host);
  make_optimizer(host);
  schedule = make<Schedule>(config, host, "schedule");
  dataset = make<Dataset>(config, host, "data");
  transform_model();
  for (const CustomKernel& kernel : host.kernels())
    if (kernel.device == config.id("device")) device->add_kernel(kernel);
  if (train.accumulation < parallel.ranks)
    throw Error(ErrorCode::config, {.where = config.where("train", "accumulation"),
                                    .what = "fewer micro-batches a step than ranks",
                                    .found = std::to_string(train.accumulation),
                                    .expected = "at least " + std::to_string(parallel.ranks) + ", parallel.ranks",
                                    .next = "raise it, with a smaller micro_batch for the same step"});
  check_reduction();
  if (model->traits().whole_rows && train.sequence < model->traits().max_positions)
    throw Error(ErrorCode::config, {.where = config.where("train", "sequence"),
                                    .what = "fewer tokens than each sequence of the model has",
                                    .found = std::to_string(train.sequence),
                                    .expected = std::to_string(model->traits().max_positions)});
  if (train.sequence > model->traits().max_positions)
    throw Error(ErrorCode::config, {.where = config.where("train", "sequence"),
                                    .what = "longer than the model's positions",
                                    .found = std::to_string(train.sequence),
                                    .expected = "at most " + std::to_string(model->traits().max_positions),
                                    .next = "shorten it, or train a model with more positions"});
}

PeftConfig Session::peft_config() const {
  return {.rank = adapter.rank,
          .alpha = adapter.alpha,
          .rslora = adapter.rslora,
          .dropout = adapter.dropout,
          .base = train.from};
}

// Adapters first: groups may name their parameters.
void Session::transform_model() {
  OpSet ops = builtin_ops();
  for (const OpSpec& spec : custom_ops) ops.add(spec);
  if (adapter.id == "lora") {
    if (!adapter.from.empty()) check_peft_folder(adapter.from, peft_config());
    const auto rank = static_cast<double>(adapter.rank);
    auto adapted =
        std::make_unique<LoraModel>(std::move(model), ops,
                                    LoraOptions{.where = config.where("adapter", "targets"),
                                                .rank = adapter.rank,
                                                .factor = adapter.alpha / (adapter.rslora ? std::sqrt(rank) : rank),
                                                .dropout = adapter.dropout,
                                                .targets = adapter.targets});
    lora = adapted.get();
    model = std::move(adapted);
  } else {
    std::vector<std::string> keys;
    const OptionTable<AdapterOptions> table = adapter_options();
    for (const OptionSpec& spec : table.specs())
      if (*config.section("adapter").find(spec.key) != spec.default_value) keys.push_back("adapter." + spec.key);
    if (!keys.empty()) notes.push_back("adapter.id is none, so that without effect are " + list_names(keys));
  }
  std::vector<TrainRule> rules;
  for (const OptionValues& group : config.list("train", "groups")) {
    const std::string key = "groups." + std::to_string(rules.size() + 1);
    TrainRule& rule = rules.emplace_back();
    rule.where = config.where("train", key + ".match");
    rule.match = group.get<std::vector<std::string>>("match");
    if (group.find("trainable")) rule.trainable = group.get<bool>("trainable");
    if (group.find("rate")) rule.rate = group.get<double>("rate");
    if (group.find("decay")) rule.decay = group.get<bool>("decay");
    if (group.find("optimizer")) rule.optimizer = group.get<std::string>("optimizer");
    if (group.find("deviation")) rule.deviation = group.get<double>("deviation");
  }
  model = with_rules(std::move(model), rules);
  std::vector<std::string> beside;
  for (const ParameterSpec& spec : model->parameters())
    if (lora && spec.trainable && !is_adapter(spec)) beside.push_back(spec.name);
  if (!beside.empty())
    notes.push_back("train.groups: the adapter's folder lacks the parameters that train beside it (" +
                    list_names(beside) + "); the merged export has them" +
                    (adapter.merge ? "" : ", but adapter.merge is false"));
  check_optimizer();
  for (ParameterSpec spec : model->parameters()) {
    if (spec.rate == 1 || !spec.trainable) continue;
    const std::vector<Op> own = update_traits(*optimizer, spec, ops).ops;
    spec.rate = 1;
    if (own == update_traits(*optimizer, spec, ops).ops)
      throw Error(ErrorCode::config, {.where = config.where("optimizer", "id"),
                                      .what = "has one learning rate for all parameters",
                                      .found = "a rate for `" + spec.name + "` in train.groups",
                                      .expected = "no rate, or another optimizer"});
  }
}

// The run's, by optimizer.id, and the optimizers that groups name.
void Session::make_optimizer(PluginHost& host) {
  std::vector<std::pair<std::string, std::unique_ptr<Optimizer>>> others;
  for (const std::string& id : config.ids("optimizer"))
    if (id != config.id("optimizer"))
      others.emplace_back(id, host.create<Optimizer>(id, config.factory_values("optimizer", id)));
  optimizer = by_groups(config.id("optimizer"), make<Optimizer>(config, host, "optimizer"), std::move(others));
}

void Session::check_optimizer() const {
  std::vector<ParameterSpec> trained = model->parameters();
  std::erase_if(trained, [](const ParameterSpec& spec) { return !spec.trainable; });
  with_config_places([&] { optimizer->check(trained); });
}

void Session::note_ignored(const std::string& model_config) {
  if (model_config.empty()) return;
  const std::vector<std::string> keys = ignored_hf_keys(model_config, model->hf_config());
  if (!keys.empty())
    notes.push_back(model_config + ": ignored, since it changes nothing in the model: " + list_names(keys));
}

// One for each combination of the values of options that are "auto", which is none of those.
void Session::make_precision_forms(PluginHost& host) {
  const std::string& id = config.id("precision");
  struct Way {
    PrecisionForm form;
    OptionValues values;
  };
  std::vector<Way> ways{{{}, config.factory_values("precision")}};
  for (const OptionSpec& spec : host.require(kPluginKind<PrecisionBackend>, id).options) {
    const OptionValue* value = ways[0].values.find(spec.key);
    if (!value || *value != OptionValue(std::string(kAuto))) continue;
    std::vector<Way> more;
    for (const Way& way : ways)
      for (const std::string& choice : spec.choices) {
        if (choice == kAuto) continue;
        Way& one = more.emplace_back(way);
        one.values.set(spec.key, choice);
        one.form.values.emplace_back("precision." + id + "." + spec.key, choice);
      }
    ways = std::move(more);
  }
  if (ways.size() == 1) return;
  for (Way& way : ways) {
    backends_of_forms_.push_back(host.create<PrecisionBackend>(id, way.values));
    way.form.backend = backends_of_forms_.back().get();
    precision_forms.push_back(std::move(way.form));
  }
}

PlanParts Session::parts() const {
  PlanParts parts{*model, *precision, *device, *optimizer, custom_ops, outer_precision.get()};
  parts.forms = precision_forms;
  for (const std::unique_ptr<OffloadStore>& store : stores) {
    parts.stores.push_back(store->traits());
    OffloadTraits& traits = parts.stores.back();  // of what all ranks of the machine share
    traits.capacity = static_cast<std::size_t>(share_of_machine(static_cast<std::int64_t>(traits.capacity)));
    if (!traits.in_host_memory)
      for (double* rate : {&traits.put_rate, &traits.get_rate}) *rate /= static_cast<double>(ranks_of_machine());
  }
  if (communicator) {
    const CommunicatorTraits& traits = communicator->traits();
    parts.communicator_bytes =
        static_cast<std::int64_t>(traits.own_bytes) + parallel.ranks * static_cast<std::int64_t>(traits.peer_bytes);
  }
  return parts;
}

std::int64_t Session::turn() const {
  if (parallel.reduction == "fast") return 1;
  StatePlacement state;
  state.ranks = static_cast<int>(parallel.ranks);
  state.in_tree = train.accumulation;
  return block_of(state);
}

// Ranks have blocks of a power of two of micro-batches, and pieces of matrices that are alike for any number of ranks.
void Session::check_reduction() const {
  if (parallel.reduction == "fast") return;
  auto refuse = [&](const char* section, const char* key, const char* what, std::int64_t found, std::string expected) {
    throw Error(ErrorCode::config, {.where = config.where(section, key),
                                    .what = what,
                                    .found = std::to_string(found),
                                    .expected = std::move(expected),
                                    .next = "or set parallel.reduction = \"fast\""});
  };
  if (turn() * (parallel.ranks - 1) >= train.accumulation)
    refuse("train", "accumulation", "reproducible sums would leave a rank without micro-batches", train.accumulation,
           "such as " + std::to_string(turn() * parallel.ranks) + ", parallel.ranks times a power of two");
  if (parallel.shard_optimizer == "ranks" && kPieces % parallel.ranks != 0)
    refuse("parallel", "ranks", "reproducible sums of a sharded optimizer need another number of ranks", parallel.ranks,
           "1, 2, 4 or 8, or shard_optimizer = \"none\"");
  if (parallel.shard_weights == "ranks" && turn() * parallel.ranks != train.accumulation)
    refuse("train", "accumulation", "reproducible sums with sharded weights need as many micro-batches on each rank",
           train.accumulation, "such as " + std::to_string(turn() * parallel.ranks) + ", or shard_weights = \"none\"");
}

bool Session::leaves_sharding() const {
  constexpr const char* kKeys[] = {"zero", "shard_optimizer", "shard_gradients", "shard_weights"};
  return parallel.ranks > 1 && std::none_of(std::begin(kKeys), std::end(kKeys),
                                            [&](const char* key) { return config.sets("parallel", key); });
}

// What a launcher does not say, parallel.machines does.
std::int64_t Session::ranks_of_machine() const {
  const std::optional<RankPlace> place = rank_place();
  return place && place->local_size > 0 ? place->local_size : parallel.ranks / parallel.machines;
}

std::int64_t Session::share_of_machine(std::int64_t bytes) const {
  return bytes == 0 ? 0 : std::max<std::int64_t>(bytes / ranks_of_machine(), 1);
}

PlanOptions Session::plan_options() const {
  PlanOptions options;
  options.geometry = {train.micro_batch, train.sequence};
  options.masters = optimizer_options.master != "none";
  options.master = options.masters ? *dtype_named(optimizer_options.master) : DType::f32;
  options.gradient = *dtype_named(optimizer_options.gradient);
  options.first_layers = precision_options.first_layers;
  options.last_layers = precision_options.last_layers;
  options.outer_parameters = precision_options.outer_parameters;
  options.recompute = memory.recompute;
  options.device_budget = *size_in_bytes(memory.device_budget);
  options.host_budget = share_of_machine(*size_in_bytes(memory.host_budget));
  options.disk_budget = share_of_machine(*size_in_bytes(memory.disk_budget));
  options.stores = memory.stores;
  auto placed = [&](const std::string& text, const std::string& shards = "none") {
    Placement placement = placement_named(text).value();
    if (shards == "ranks" && parallel.ranks > 1) placement.sharding = Sharding::ranks;
    return placement;
  };
  options.state = {.ranks = static_cast<int>(parallel.ranks / parallel.machines),
                   .machines = static_cast<int>(parallel.machines),
                   .meet = communicator != nullptr,
                   .in_tree = parallel.reduction == "reproducible" ? train.accumulation : 0,
                   .master = placed(memory.master, parallel.shard_optimizer),
                   .moments = placed(memory.moments, parallel.shard_optimizer),
                   .gradients = placed(memory.gradients, parallel.shard_gradients),
                   .weights = placed(memory.weights, parallel.shard_weights),
                   .activations = placed(memory.activations)};
  options.documents = data.documents == "masked";
  options.z_loss = train.z_loss;
  options.loss_chunk = train.loss_chunk;
  options.next_logits = sample.every > 0;
  options.observe = log.scales_every > 0;
  options.snapshot = checkpoint.background && checkpoint.every > 0;
  options.accumulation = (train.accumulation + parallel.ranks - 1) / parallel.ranks;
  options.uneven = train.accumulation % parallel.ranks != 0;
  options.uploads = uploads_for(train.accumulation);
  return options;
}

std::vector<OffloadStore*> Session::open_stores(const Plan& plan) {
  std::vector<OffloadStore*> opened;
  for (const StorePlan& wanted : plan.stores)
    for (const std::unique_ptr<OffloadStore>& store : stores)
      if (store->traits().id == wanted.id) {
        store->open(*device, {.folder = log.directory});
        opened.push_back(store.get());
      }
  return opened;
}

std::unique_ptr<DataSource> Session::open_data(const Dataset& from, Split split) const {
  DataRequest request;
  request.split = split;
  request.geometry = {train.micro_batch, train.sequence};
  request.seed = static_cast<std::uint64_t>(data.seed < 0 ? train.seed : data.seed);
  request.documents = data.documents == "masked";
  request.vocabulary = model->traits().vocabulary;
  std::unique_ptr<DataSource> source = from.open(request);
  if (!source)
    throw Error(ErrorCode::internal, {.where = "data \"" + config.id("data") + "\"",
                                      .what = split == Split::train ? "its training split opened as nothing"
                                                                    : "its validation split opened as nothing",
                                      .found = {},
                                      .expected = {},
                                      .next = "this is a fault in the plugin; please report it to its author"});
  return source;
}

std::unique_ptr<DataSource> Session::open_training_data(int rank) const {
  std::unique_ptr<DataSource> source = open_data(Split::train);
  if (parallel.ranks > 1)
    source = std::make_unique<TurnsSource>(std::move(source), rank, static_cast<int>(parallel.ranks), turn(),
                                           train.accumulation);
  return std::make_unique<PrefetchSource>(std::move(source));
}

void Session::set_steps_of_epochs() {
  if (train.epochs == 0) return;
  constexpr std::int64_t kMostSteps = 0x7fffffff;
  const double tokens = train.epochs * static_cast<double>(open_data(Split::train)->epoch_tokens());
  const double steps = std::max(1.0, std::ceil(tokens / static_cast<double>(tokens_per_step())));
  if (steps > static_cast<double>(kMostSteps))
    throw Error(ErrorCode::config, {.where = config.where("train", "epochs"),
                                    .what = "more steps than a run can have",
                                    .found = std::to_string(steps),
                                    .expected = "at most " + std::to_string(kMostSteps),
                                    .next = "train fewer epochs, or more tokens a step"});
  train.steps = static_cast<std::int64_t>(steps);
}

void Session::check_vocabulary(const DataSource& source) const {
  const std::int64_t vocabulary = model->traits().vocabulary;
  if (source.vocabulary() <= vocabulary) return;
  const bool has_weights = !train.from.empty();  // their rows are as many as they are
  throw Error(ErrorCode::config, {.where = config.where("model", "id"),
                                  .what = "the data have tokens that the model does not",
                                  .found = "a vocabulary of " + std::to_string(vocabulary),
                                  .expected = "at least " + std::to_string(source.vocabulary()),
                                  .next = vocabulary == 0 ? "use data that give the inputs of this model"
                                          : has_weights   ? "prepare the data with the tokenizer of " + train.from
                                                          : "set vocab_size to the tokenizer's"});
}

ConfiguredRun::ConfiguredRun(const ConfigDocument& document, const Manifest& components)
    : host(run_host(components)), config(resolve(document, run_schemas(), host)), session(config, host) {}

}  // namespace quern
