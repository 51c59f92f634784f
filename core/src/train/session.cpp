#include "train/session.h"

#include "quern/error.h"

namespace quern {

Session::Session(const ResolvedConfig& resolved, PluginHost& host)
    : config(resolved),
      data(data_options().bind(config.section("data"))),
      train(train_options().bind(config.section("train"))),
      optimizer_options(quern::optimizer_options().bind(config.section("optimizer"))),
      parallel(parallel_options().bind(config.section("parallel"))),
      precision_options(quern::precision_options().bind(config.section("precision"))),
      memory(memory_options().bind(config.section("memory"))),
      device_options(quern::device_options().bind(config.section("device"))),
      log(log_options().bind(config.section("log"))),
      sample(sample_options().bind(config.section("sample"))),
      guard(guard_options().bind(config.section("guard"))),
      checkpoint(checkpoint_options().bind(config.section("checkpoint"))) {
  device = host.create<Device>(config.id("device"), config.factory_values("device"));
  model = host.create<Model>(config.id("model"), config.factory_values("model"));
  precision = host.create<PrecisionBackend>(config.id("precision"), config.factory_values("precision"));
  if (precision_options.first_layers + precision_options.last_layers > 0) {
    const Factory& factory = host.require(kPluginKind<PrecisionBackend>, precision_options.outer);
    outer_precision = host.create<PrecisionBackend>(precision_options.outer, default_values(factory.options));
  }
  optimizer = host.create<Optimizer>(config.id("optimizer"), config.factory_values("optimizer"));
  schedule = host.create<Schedule>(config.id("schedule"), config.factory_values("schedule"));
  dataset = host.create<Dataset>(config.id("data"), config.factory_values("data"));
  custom_ops = host.ops();
  for (const CustomKernel& kernel : host.kernels())
    if (kernel.device == config.id("device")) device->add_kernel(kernel.op, kernel.factory);
  if (train.sequence > model->traits().max_positions)
    throw Error(ErrorCode::config, {.where = config.where("train", "sequence"),
                                    .what = "longer than the model's positions",
                                    .found = std::to_string(train.sequence),
                                    .expected = "at most " + std::to_string(model->traits().max_positions)});
}

PlanOptions Session::plan_options() const {
  PlanOptions options;
  options.geometry = {train.micro_batch, train.sequence};
  options.master = *dtype_named(optimizer_options.master);
  options.gradient = *dtype_named(optimizer_options.gradient);
  options.first_layers = precision_options.first_layers;
  options.last_layers = precision_options.last_layers;
  options.recompute = memory.recompute;
  options.device_budget = *size_in_bytes(memory.device_budget);
  auto sharding = [](const std::string& name) { return name == "ranks" ? Sharding::ranks : Sharding::none; };
  options.state = {.ranks = static_cast<int>(parallel.ranks),
                   .master = {memory.master, sharding(parallel.shard_optimizer)},
                   .moments = {memory.moments, sharding(parallel.shard_optimizer)},
                   .gradients = {memory.gradients, sharding(parallel.shard_gradients)},
                   .weights = {memory.weights, sharding(parallel.shard_weights)},
                   .activations = {memory.activations, Sharding::none}};
  options.documents = data.documents == "masked";
  options.z_loss = train.z_loss;
  options.next_logits = sample.every > 0;
  options.uploads = static_cast<int>(train.accumulation) + 1;
  return options;
}

std::unique_ptr<DataSource> Session::open_data(Split split) const {
  DataRequest request;
  request.split = split;
  request.geometry = {train.micro_batch, train.sequence};
  request.seed = static_cast<std::uint64_t>(train.seed);
  request.documents = data.documents == "masked";
  request.vocabulary = model->traits().vocabulary;
  return dataset->open(request);
}

}  // namespace quern
