#pragma once
// The components of a run, made from its config: what `quern plan` and `quern train` share.

#include <memory>
#include <vector>

#include "config/resolve.h"
#include "plan/plan.h"
#include "plugin/plugin_host.h"
#include "quern/data_source.h"
#include "quern/error.h"
#include "run/options/run_options.h"
#include "transform/peft_folder.h"

namespace quern {

struct Session {
  /// Makes all components; touches no device and no data. `config` and `host` outlive the session.
  Session(const ResolvedConfig& config, PluginHost& host);

  const ResolvedConfig& config;
  DataOptions data;
  TrainOptions train;
  AdapterOptions adapter;
  OptimizerOptions optimizer_options;
  ParallelOptions parallel;
  PrecisionOptions precision_options;
  MemoryOptions memory;
  DeviceOptions device_options;
  LogOptions log;
  SampleOptions sample;
  GuardOptions guard;
  CheckpointOptions checkpoint;

  std::unique_ptr<Device> device;
  std::unique_ptr<Communicator> communicator;         ///< null: none, for one rank
  std::vector<std::unique_ptr<OffloadStore>> stores;  ///< those that [memory] names
  std::unique_ptr<Model> model;                       ///< with its adapter and the config's groups
  const LoraModel* lora = nullptr;                    ///< of the model; null: no adapter
  std::unique_ptr<PrecisionBackend> precision, outer_precision;
  std::unique_ptr<Optimizer> optimizer;
  std::unique_ptr<Schedule> schedule;
  std::unique_ptr<Dataset> dataset;
  std::vector<OpSpec> custom_ops;
  std::vector<std::string> notes;              ///< what the user should know at the start, a line each
  std::vector<PrecisionForm> precision_forms;  ///< for the options of `precision` that are left to the planner

  PlanParts parts() const;
  PlanOptions plan_options() const;
  /// What `make` gives. Planning and optimizers do not know the config: an error of theirs that names a key gets the
  /// file and the line of it.
  template <class Make>
  auto with_config_places(Make make) const {
    try {
      return make();
    } catch (const Error& error) {
      ErrorDetail detail = error.detail();
      detail.where = config.where(detail.where);
      throw Error(error.code(), std::move(detail));
    }
  }
  Plan plan(const PlanOptions& options) const {
    return with_config_places([&] { return make_plan(parts(), options); });
  }
  std::int64_t ranks_of_machine() const;
  /// Of what all ranks of a machine have together; 0 stays 0.
  std::int64_t share_of_machine(std::int64_t bytes) const;
  /// The plan's stores, in its order, opened on the open device.
  std::vector<OffloadStore*> open_stores(const Plan& plan);
  /// Where the model of a finished run goes.
  static std::string export_directory(const std::string& run_directory) { return run_directory + "/export"; }
  /// And its adapter, alone.
  static std::string adapter_directory(const std::string& run_directory) { return run_directory + "/adapter"; }
  /// Opens a split as this run needs it.
  std::unique_ptr<DataSource> open_data(Split split) const { return open_data(*dataset, split); }
  std::unique_ptr<DataSource> open_data(const Dataset& from, Split split) const;
  /// Micro-batches of a step that a rank takes in a row, before it is the next rank's turn.
  std::int64_t turn() const;
  /// What this rank takes of the training split, read ahead by a thread.
  std::unique_ptr<DataSource> open_training_data(int rank) const;
  /// Sets train.steps by train.epochs, where that is set; opens the data.
  void set_steps_of_epochs();
  /// A config error when the data have more tokens than the model.
  void check_vocabulary(const DataSource& source) const;
  void check_reduction() const;
  void make_precision_forms(PluginHost& host);
  void make_optimizer(PluginHost& host);
  void check_optimizer() const;
  void transform_model();
  PeftConfig peft_config() const;
  void note_ignored(const std::string& model_config);
  /// Whether the run has several ranks, and its config leaves open which state they shard.
  bool leaves_sharding() const;
  std::int64_t tokens_per_step() const { return train.micro_batch * train.sequence * train.accumulation; }

 private:
  std::vector<std::unique_ptr<PrecisionBackend>> backends_of_forms_;
};

/// A session with what it is made from.
struct ConfiguredRun {
  /// `components` are selected by the config as built-in ones are.
  explicit ConfiguredRun(const ConfigDocument& document, const Manifest& components = {});

  PluginHost host;
  ResolvedConfig config;
  Session session;
};

}  // namespace quern
