#include "train/session.h"

#include "quern/error.h"

namespace quern {

Session::Session(const ResolvedConfig& resolved, PluginHost& host)
    : config(resolved),
      data(data_options().bind(config.section("data"))),
      train(train_options().bind(config.section("train"))),
      optimizer_options(quern::optimizer_options().bind(config.section("optimizer"))),
      memory(memory_options().bind(config.section("memory"))),
      device_options(quern::device_options().bind(config.section("device"))),
      log(log_options().bind(config.section("log"))),
      checkpoint(checkpoint_options().bind(config.section("checkpoint"))) {
  device = host.create<Device>(config.id("device"), config.factory_values("device"));
  model = host.create<Model>(config.id("model"), config.factory_values("model"));
  precision = host.create<PrecisionBackend>(config.id("precision"), config.factory_values("precision"));
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
  options.recompute = memory.recompute;
  options.device_budget = parse_bytes(memory.device_budget, config.where("memory", "device_budget"));
  options.documents = data.documents == "masked";
  options.z_loss = train.z_loss;
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
