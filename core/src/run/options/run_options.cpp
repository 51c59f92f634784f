#include "run/options/run_options.h"

#include "launch/rank_place.h"
#include "program/passes/choose_saved.h"

namespace quern {

namespace {

constexpr double kMost31 = 0x7fffffff;  // what 32-bit counters on devices hold

}  // namespace

OptionTable<DataOptions> data_options() {
  OptionTable<DataOptions> t;
  t.add("documents", &DataOptions::documents,
        "joined: a row is one text; masked: documents of a row do not see each other, and positions restart with each")
      .one_of({"joined", "masked"});
  t.add("seed", &DataOptions::seed, "seed of the order of the data; -1: train.seed").at_least(-1);
  return t;
}

OptionTable<TrainOptions> train_options() {
  OptionTable<TrainOptions> t;
  t.add("steps", &TrainOptions::steps, "optimizer steps of the run").at_least(1).at_most(kMost31);
  t.add("epochs", &TrainOptions::epochs,
        "passes over the training data, in place of steps: as many steps as they need, rounded up; 0: steps")
      .at_least(0);
  t.add("micro_batch", &TrainOptions::micro_batch, "sequences in one forward and backward pass of a device")
      .at_least(1)
      .at_most(1 << 24);
  t.add("sequence", &TrainOptions::sequence, "tokens per sequence").at_least(1).at_most(1 << 30);
  t.add("accumulation", &TrainOptions::accumulation, "micro-batches per optimizer step").at_least(1).at_most(1 << 20);
  t.add("seed", &TrainOptions::seed, "seed of initial weights, data order and stochastic rounding").at_least(0);
  t.add("z_loss", &TrainOptions::z_loss, "weight of logsumexp^2 of the logits in the objective; 0: none").at_least(0);
  t.add("loss_chunk", &TrainOptions::loss_chunk,
        "tokens whose logits exist at once: fewer need less memory and more time; 0: the device chooses")
      .at_least(0)
      .at_most(kMost31);
  t.add("eval_every", &TrainOptions::eval_every, "steps between evaluations; 0: only at the end").at_least(0);
  t.add("eval_batches", &TrainOptions::eval_batches, "micro-batches per evaluation; 0: the whole validation split")
      .at_least(0)
      .at_most(kMost31);
  t.add("from", &TrainOptions::from, "Hugging Face model directory with the initial weights; empty: random weights");
  return t;
}

OptionTable<TrainGroup> train_group_options() {
  OptionTable<TrainGroup> t;
  t.add("match", &TrainGroup::match,
        "patterns (*, ?, [...]) of parameters: quern's names (qkv.weight), or tensors of a Hugging Face file "
        "(model.layers.*.mlp.*), where all tensors of one matrix must match")
      .required();
  t.add("trainable", &TrainGroup::trainable,
        "false: frozen, without gradient, master weights and optimizer state; unset: as the model or adapter has it");
  t.add("rate", &TrainGroup::rate, "factor on the learning rate; unset: 1").at_least(0);
  t.add("decay", &TrainGroup::decay, "whether weight decay applies; unset: to matrices");
  t.add("optimizer", &TrainGroup::optimizer,
        "id of the optimizer, whose options are in [optimizer.<id>]; unset: optimizer.id");
  t.add("deviation", &TrainGroup::deviation,
        "standard deviation of random initial weights; 0: zeros; unset: as the model has it")
      .at_least(0);
  return t;
}

OptionTable<AdapterOptions> adapter_options() {
  OptionTable<AdapterOptions> t;
  t.add("id", &AdapterOptions::id,
        "lora: two narrow matrices train beside each target, and the model is frozen; none: no adapter")
      .one_of({"none", "lora"});
  t.add("rank", &AdapterOptions::rank, "inner width of the two matrices").at_least(1).at_most(1 << 14);
  t.add("alpha", &AdapterOptions::alpha, "what the two matrices give counts alpha / rank times").above(0);
  t.add(
      "targets", &AdapterOptions::targets,
      "modules that get an adapter: last part of a name (q_proj), a pattern of the whole name (model.layers.*.mlp.*), "
      "or all-linear: every linear of the layers");
  t.add("rslora", &AdapterOptions::rslora, "alpha / sqrt(rank) instead of alpha / rank (arXiv 2312.03732)");
  t.add("dropout", &AdapterOptions::dropout,
        "share of the elements of each adapter's input that a step of training sets to zero, at random")
      .at_least(0)
      .at_most(0.99);
  t.add("merge", &AdapterOptions::merge,
        "the export at the end of a run is the whole model with the adapter in it, beside the adapter's own folder; "
        "false: only that folder");
  t.add("from", &AdapterOptions::from, "an adapter's folder, as PEFT writes it, to begin with; empty: a new one");
  return t;
}

OptionTable<OptimizerOptions> optimizer_options() {
  OptionTable<OptimizerOptions> t;
  t.add("learning_rate", &OptimizerOptions::learning_rate, "peak rate; the schedule scales it").above(0);
  t.add("clip_norm", &OptimizerOptions::clip_norm, "largest global gradient norm; 0: do not clip").at_least(0);
  t.add("master", &OptimizerOptions::master,
        "format of master weights; bf16 rounds stochastically. none: weights that the precision reads in int8 alone "
        "have "
        "no master, and their updates round into these; others are fp32")
      .one_of({"fp32", "bf16", "none"});
  t.add("gradient", &OptimizerOptions::gradient, "format of gradients").one_of({"fp32", "bf16"});
  return t;
}

OptionTable<PrecisionOptions> precision_options() {
  OptionTable<PrecisionOptions> t;
  t.add("outer", &PrecisionOptions::outer,
        "backend of the high-precision layers and weights that the next keys name, with its default options; its "
        "activations must have the same dtype");
  t.add("first_layers", &PrecisionOptions::first_layers, "number of layers at the beginning that run under `outer`")
      .at_least(0)
      .at_most(1 << 20);
  t.add("last_layers", &PrecisionOptions::last_layers, "number of layers at the end that run under `outer`")
      .at_least(0)
      .at_most(1 << 20);
  t.add("outer_parameters", &PrecisionOptions::outer_parameters,
        "weights whose matmuls run under `outer` in every layer, by quern's names: down.weight, qkv.weight, ...");
  return t;
}

OptionTable<MemoryOptions> memory_options() {
  OptionTable<MemoryOptions> t;
  std::string known;
  for (const std::string& name : kRecomputeNames) known += (known.empty() ? "" : ", ") + name;
  t.add("recompute", &MemoryOptions::recompute, "activations to recompute in the backward pass, any of " + known);
  t.add("device_budget", &MemoryOptions::device_budget,
        "limit of the run's device memory, such as \"16GiB\". With a budget the planner chooses further recomputation "
        "and all placements that are \"auto\", for the fastest step; `quern plan --write` also chooses the "
        "micro-batch. 0 or empty: the device's memory")
      .size();
  t.add("host_budget", &MemoryOptions::host_budget,
        "the same for the host memory of all ranks of a machine: pinned buffers, stores in host memory and the copies "
        "for checkpoints. 0 or empty: not limited")
      .size();
  t.add("disk_budget", &MemoryOptions::disk_budget,
        "the same for stores that are not in host memory, of all ranks of a machine. 0 or empty: as much as each of "
        "them says that it can hold")
      .size();
  t.add("stores", &MemoryOptions::stores,
        "ids of the offload stores that the planner may choose: the first for any kind of state, all of them for "
        "masters and moments; none: all state stays on the device");
  t.add("master", &MemoryOptions::master,
        "placement of master weights: device; the id of an offload store; a share of the layers on the device, with "
        "embedding and head, and the rest in a store (\"device:40%,host\"); or auto, which is the device without a "
        "budget");
  t.add("moments", &MemoryOptions::moments, "the same for optimizer states");
  t.add("gradients", &MemoryOptions::gradients, "the same for parameter gradients");
  t.add("weights", &MemoryOptions::weights, "the same for compute weights");
  t.add("activations", &MemoryOptions::activations, "the same for activations saved for the backward pass");
  return t;
}

bool chooses(const MemoryOptions& memory) {
  return *size_in_bytes(memory.device_budget) > 0 || *size_in_bytes(memory.host_budget) > 0 ||
         *size_in_bytes(memory.disk_budget) > 0;
}

OptionTable<ParallelOptions> parallel_options() {
  OptionTable<ParallelOptions> t;
  const std::vector<std::string> shards = {"none", "ranks"};
  t.add(
       "ranks", &ParallelOptions::ranks,
       "processes of the run, one per device; they share the train.accumulation micro-batches of each step; 0: one for "
       "each of this machine's devices")
      .at_least(0)
      .at_most(kMostRanks);
  t.add("communicator", &ParallelOptions::communicator,
        "id of the plugin through which ranks exchange data; none: for one rank");
  t.add("machines", &ParallelOptions::machines,
        "groups of as many ranks each, numbered one behind the other; shard_ keys then shard state over the ranks of a "
        "group, and each group has all of it")
      .at_least(1)
      .at_most(kMostRanks);
  t.add("across", &ParallelOptions::across,
        "id of the communicator between groups of ranks; none: parallel.communicator");
  t.add("collectives.all_gather", &ParallelOptions::all_gather,
        "id of another communicator for all-gathers of weights; none: parallel.communicator");
  t.add("collectives.reduce_scatter", &ParallelOptions::reduce_scatter, "the same for reduce-scatters of gradients");
  t.add("collectives.all_reduce", &ParallelOptions::all_reduce, "the same for all-reduces");
  t.add("timeout", &ParallelOptions::timeout, "seconds that a rank waits for another before the run fails").above(0);
  t.add("restarts", &ParallelOptions::restarts,
        "how often a failed run is restarted from its last checkpoint, if quern starts the ranks")
      .at_least(0)
      .at_most(1000);
  t.add("check_every", &ParallelOptions::check_every,
        "steps between comparisons of all ranks' weights; a difference, such as corrupted memory, ends the run; 0: "
        "never")
      .at_least(0);
  t.add("reduction", &ParallelOptions::reduction,
        "reproducible: gradients of micro-batches are summed in fp32 in a tree over their number, so that any number "
        "of ranks gives the same bits; fast: in the cheapest order")
      .one_of({"fast", "reproducible"});
  t.add("zero", &ParallelOptions::zero,
        "preset of the next three keys, by the stages of ZeRO: 1 shards the optimizer, 2 gradients too, 3 weights too; "
        "a key that is set itself wins")
      .at_least(0)
      .at_most(3);
  t.add("shard_optimizer", &ParallelOptions::shard_optimizer,
        "ranks: each rank keeps and updates a slab of master weights and optimizer states; none: all of them")
      .one_of(shards);
  t.add("shard_weights", &ParallelOptions::shard_weights,
        "ranks: each rank keeps a slab of the compute weights, which all gather for each use; none: all of them")
      .one_of(shards);
  t.add("shard_gradients", &ParallelOptions::shard_gradients,
        "ranks: each rank keeps a slab of the gradients, which all reduce in each micro-batch; none: all of them")
      .one_of(shards);
  return t;
}

OptionTable<DeviceOptions> device_options() {
  OptionTable<DeviceOptions> t;
  t.add("ordinal", &DeviceOptions::ordinal, "which of the machine's devices of this kind").at_least(0).at_most(1023);
  return t;
}

OptionTable<LogOptions> log_options() {
  OptionTable<LogOptions> t;
  t.add("directory", &LogOptions::directory, "directory of the run: log, checkpoints, export");
  t.add("sinks", &LogOptions::sinks, "ids of the log plugins that get the events; their options are in [log.<id>]");
  t.add("every", &LogOptions::every, "steps between lines on the console").at_least(1);
  t.add("scales_every", &LogOptions::scales_every,
        "steps between records of each quantized tensor: amax, scale, fractions clipped and underflowed; 0: none")
      .at_least(0);
  return t;
}

OptionTable<SampleOptions> sample_options() {
  OptionTable<SampleOptions> t;
  t.add("every", &SampleOptions::every, "steps between samples; 0: none").at_least(0);
  t.add("prompts", &SampleOptions::prompts,
        "prompts to continue: token numbers such as \"1,2,3\", a .jsonl file of prompts, or a list of these");
  t.add("max_tokens", &SampleOptions::max_tokens,
        "most tokens of a continuation; prompt and continuation must fit train.sequence")
      .at_least(1)
      .at_most(1 << 30);
  t.add("temperature", &SampleOptions::temperature, "logits are divided by it; 0: always the most likely token")
      .at_least(0);
  t.add("top_p", &SampleOptions::top_p, "draw from the most likely tokens whose probabilities add up to this")
      .above(0)
      .at_most(1);
  return t;
}

OptionTable<GuardOptions> guard_options() {
  OptionTable<GuardOptions> t;
  t.add("non_finite", &GuardOptions::non_finite,
        "when a loss or gradient is not finite: stop the run; skip the step and its data; roll_back to the newest "
        "checkpoint, and continue with the data after that step")
      .one_of({"stop", "skip", "roll_back"});
  t.add("limit", &GuardOptions::limit, "how many such steps are allowed; the count restarts after `window` good steps")
      .at_least(0);
  t.add("spike_z", &GuardOptions::spike_z,
        "log a loss or gradient norm this many standard deviations above its mean as a spike; 0: never")
      .at_least(0);
  t.add("window", &GuardOptions::window, "steps over which that mean is taken").at_least(2).at_most(1000000);
  return t;
}

OptionTable<CheckpointOptions> checkpoint_options() {
  OptionTable<CheckpointOptions> t;
  t.add("every", &CheckpointOptions::every, "steps between checkpoints; 0: only when the run ends or is stopped")
      .at_least(0);
  t.add("at_end", &CheckpointOptions::at_end, "save after the last step too");
  t.add("keep_last", &CheckpointOptions::keep_last, "number of newest checkpoints to keep; 0: all").at_least(0);
  t.add("keep_every", &CheckpointOptions::keep_every,
        "checkpoints at multiples of this many steps are never removed; must be a multiple of `every`; 0: none")
      .at_least(0);
  t.add("background", &CheckpointOptions::background,
        "write the checkpoints of `every` during training, from a copy in pinned host memory; false: training waits, "
        "and the host needs memory for only one tensor");
  t.add("resume", &CheckpointOptions::resume,
        "auto: continue from the newest whole checkpoint; never: start a new run, and refuse a directory with "
        "checkpoints")
      .one_of({"auto", "never"});
  t.add("from", &CheckpointOptions::from,
        "checkpoint, or run directory for its newest, at which a run without checkpoints of its own begins, with "
        "weights, optimizer state and step; empty: none");
  t.add("from_data", &CheckpointOptions::from_data,
        "continue: the data go on where the checkpoint `from` was saved; restart: they begin anew")
      .one_of({"continue", "restart"});
  t.add("export", &CheckpointOptions::export_model, "write a Hugging Face model directory at the end");
  t.add("export_dtype", &CheckpointOptions::export_dtype, "format of exported weights").one_of({"fp32", "bf16"});
  t.add("tokenizer", &CheckpointOptions::tokenizer,
        "directory whose tokenizer files are copied into the export; empty: none");
  return t;
}

}  // namespace quern
