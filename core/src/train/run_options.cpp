#include "train/run_options.h"

#include <cmath>
#include <cstdlib>

#include "program/passes/choose_saved.h"
#include "quern/error.h"

namespace quern {

OptionTable<DataOptions> data_options() {
  OptionTable<DataOptions> t;
  t.add("documents", &DataOptions::documents,
        "joined: a row is one text; masked: its documents do not see each other, positions restart with each")
      .one_of({"joined", "masked"});
  return t;
}

OptionTable<TrainOptions> train_options() {
  OptionTable<TrainOptions> t;
  t.add("steps", &TrainOptions::steps, "optimizer steps of the run").at_least(1);
  t.add("micro_batch", &TrainOptions::micro_batch, "sequences that a device works on at once").at_least(1);
  t.add("sequence", &TrainOptions::sequence, "tokens of a sequence").at_least(1);
  t.add("accumulation", &TrainOptions::accumulation, "micro-batches of an optimizer step").at_least(1);
  t.add("seed", &TrainOptions::seed, "of initial weights, data order and stochastic rounding").at_least(0);
  t.add("z_loss", &TrainOptions::z_loss, "weight of logsumexp^2 of the logits in the objective; 0: none").at_least(0);
  t.add("eval_every", &TrainOptions::eval_every, "steps between evaluations; 0: only at the end").at_least(0);
  t.add("eval_batches", &TrainOptions::eval_batches, "micro-batches of an evaluation; 0: the whole validation split")
      .at_least(0);
  t.add("from", &TrainOptions::from, "Hugging Face model directory to take initial weights from; empty: random");
  return t;
}

OptionTable<OptimizerOptions> optimizer_options() {
  OptionTable<OptimizerOptions> t;
  t.add("learning_rate", &OptimizerOptions::learning_rate, "peak rate; the schedule scales it").above(0);
  t.add("clip_norm", &OptimizerOptions::clip_norm, "largest global gradient norm; 0: do not clip").at_least(0);
  t.add("master", &OptimizerOptions::master, "format of master weights; bf16 rounds stochastically")
      .one_of({"fp32", "bf16"});
  t.add("gradient", &OptimizerOptions::gradient, "format in which gradients accumulate").one_of({"fp32", "bf16"});
  return t;
}

OptionTable<MemoryOptions> memory_options() {
  OptionTable<MemoryOptions> t;
  std::string known;
  for (const std::string& name : kRecomputeNames) known += (known.empty() ? "" : ", ") + name;
  t.add("recompute", &MemoryOptions::recompute, "activations to recompute in the backward pass, any of " + known);
  t.add("device_budget", &MemoryOptions::device_budget,
        "device memory to stay within, such as \"16GiB\"; recomputation is then chosen to fit");
  return t;
}

OptionTable<DeviceOptions> device_options() {
  OptionTable<DeviceOptions> t;
  t.add("ordinal", &DeviceOptions::ordinal, "which of the machine's devices of this kind").at_least(0);
  return t;
}

OptionTable<LogOptions> log_options() {
  OptionTable<LogOptions> t;
  t.add("directory", &LogOptions::directory, "directory of the run: log, checkpoints, export");
  t.add("sinks", &LogOptions::sinks, "where events go, by id");
  t.add("every", &LogOptions::every, "steps between step lines on the console").at_least(1);
  return t;
}

OptionTable<CheckpointOptions> checkpoint_options() {
  OptionTable<CheckpointOptions> t;
  t.add("every", &CheckpointOptions::every, "steps between checkpoints; 0: only when the run is stopped").at_least(0);
  t.add("keep_last", &CheckpointOptions::keep_last, "checkpoints to keep; 0: all").at_least(0);
  t.add("resume", &CheckpointOptions::resume,
        "auto: continue from the newest whole checkpoint; never: start anew in an empty directory")
      .one_of({"auto", "never"});
  t.add("export", &CheckpointOptions::export_model, "write a Hugging Face model directory at the end");
  t.add("export_dtype", &CheckpointOptions::export_dtype, "format of exported weights").one_of({"fp32", "bf16"});
  t.add("tokenizer", &CheckpointOptions::tokenizer, "directory whose tokenizer files go into the export; empty: none");
  return t;
}

std::int64_t parse_bytes(const std::string& text, const std::string& where) {
  if (text.empty()) return 0;
  char* end = nullptr;
  double value = std::strtod(text.c_str(), &end);
  std::string unit = end;
  while (!unit.empty() && unit.front() == ' ') unit.erase(0, 1);
  double scale = 0;
  for (const auto& [name, factor] : {std::pair<const char*, double>{"", 1},
                                     {"B", 1},
                                     {"KiB", 0x1p10},
                                     {"MiB", 0x1p20},
                                     {"GiB", 0x1p30},
                                     {"TiB", 0x1p40},
                                     {"KB", 1e3},
                                     {"MB", 1e6},
                                     {"GB", 1e9},
                                     {"TB", 1e12}})
    if (unit == name) scale = factor;
  double bytes = value * scale;
  if (end == text.c_str() || scale == 0 || !std::isfinite(bytes) || bytes < 1 || bytes > 0x1p62)
    throw Error(ErrorCode::config, {.where = where,
                                    .what = "not a size",
                                    .found = "\"" + text + "\"",
                                    .expected = "a number with B, KiB, MiB, GiB, TiB, KB, MB, GB or TB"});
  return static_cast<std::int64_t>(bytes);
}

}  // namespace quern
