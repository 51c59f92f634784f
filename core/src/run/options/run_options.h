#pragma once
// Options of the sections that the training program itself owns. Plugins and optimizers declare theirs beside their
// code.

#include <cstdint>
#include <string>
#include <vector>

#include "quern/options.h"

namespace quern {

/// [data], beside its id
struct DataOptions {
  std::string documents = "joined";
  std::int64_t seed = -1;  ///< of the order; -1: train.seed
};
OptionTable<DataOptions> data_options();

/// [train]
struct TrainOptions {
  std::int64_t steps = 1000;
  double epochs = 0;
  std::int64_t micro_batch = 8;
  std::int64_t sequence = 256;
  std::int64_t accumulation = 1;
  std::int64_t seed = 1;
  double z_loss = 0.0;
  std::int64_t loss_chunk = 0;
  std::int64_t eval_every = 100;
  std::int64_t eval_batches = 0;
  std::string from = "";
};
OptionTable<TrainOptions> train_options();

/// [[train.groups]]
struct TrainGroup {
  std::vector<std::string> match = {};
  bool trainable = true;
  double rate = 1;
  bool decay = true;
  std::string optimizer = {};
  double deviation = 0.02;
};
OptionTable<TrainGroup> train_group_options();

/// [adapter]
struct AdapterOptions {
  std::string id = "none";
  std::int64_t rank = 8;
  double alpha = 16;
  std::vector<std::string> targets = {"all-linear"};
  bool rslora = false;
  double dropout = 0;
  std::string from = "";
  bool merge = true;
};
OptionTable<AdapterOptions> adapter_options();

/// [optimizer], beside its id
struct OptimizerOptions {
  double learning_rate = 3e-4;
  double clip_norm = 1.0;
  std::string master = "fp32";
  std::string gradient = "fp32";
};
OptionTable<OptimizerOptions> optimizer_options();

/// [precision], beside its id
struct PrecisionOptions {
  std::string outer = "bf16";
  std::int64_t first_layers = 0;
  std::int64_t last_layers = 0;
  std::vector<std::string> outer_parameters = {};
};
OptionTable<PrecisionOptions> precision_options();

/// [memory]
struct MemoryOptions {
  std::vector<std::string> recompute = {};
  std::string device_budget = "";
  std::string host_budget = "";
  std::string disk_budget = "";
  std::vector<std::string> stores = {"host", "zerocopy"};
  std::string master = "auto";  ///< this and below: "auto", "device", or an offload store's id
  std::string moments = "auto";
  std::string gradients = "auto";
  std::string weights = "auto";
  std::string activations = "auto";
};
OptionTable<MemoryOptions> memory_options();
/// Whether a budget is set, so that the planner chooses.
bool chooses(const MemoryOptions& memory);

/// [parallel]
struct ParallelOptions {
  std::int64_t ranks = 1;
  std::int64_t machines = 1;  ///< of as many ranks each
  std::string communicator = "none";
  std::string across = "none";      ///< "none" or the id of the communicator between machines
  std::string all_gather = "none";  ///< this and two below: "none" or another communicator's id
  std::string reduce_scatter = "none";
  std::string all_reduce = "none";
  double timeout = 60;
  std::int64_t restarts = 0;
  std::int64_t check_every = 500;
  std::string reduction = "fast";
  std::int64_t zero = 0;                 ///< preset of the three below
  std::string shard_optimizer = "none";  ///< this and two below: or "ranks"
  std::string shard_weights = "none";
  std::string shard_gradients = "none";
};
OptionTable<ParallelOptions> parallel_options();

/// [device], beside its id
struct DeviceOptions {
  std::int64_t ordinal = 0;
};
OptionTable<DeviceOptions> device_options();

/// [log]
struct LogOptions {
  std::string directory = "runs/default";
  std::vector<std::string> sinks = {"console", "jsonl"};
  std::int64_t every = 10;
  std::int64_t scales_every = 0;
};
OptionTable<LogOptions> log_options();

/// [sample]
struct SampleOptions {
  std::int64_t every = 0;
  std::vector<std::string> prompts = {};
  std::int64_t max_tokens = 32;
  double temperature = 1.0;
  double top_p = 1.0;
};
OptionTable<SampleOptions> sample_options();

/// [guard]
struct GuardOptions {
  std::string non_finite = "stop";
  std::int64_t limit = 10;
  double spike_z = 6.0;
  std::int64_t window = 100;
};
OptionTable<GuardOptions> guard_options();

/// [checkpoint]
struct CheckpointOptions {
  std::int64_t every = 0;
  std::int64_t keep_last = 2;
  std::int64_t keep_every = 0;
  bool background = true;
  bool at_end = true;
  std::string resume = "auto";
  std::string from = "";
  std::string from_data = "continue";
  bool export_model = true;
  std::string export_dtype = "fp32";
  std::string tokenizer = "";
};
OptionTable<CheckpointOptions> checkpoint_options();

}  // namespace quern
