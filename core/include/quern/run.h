#pragma once
// A run, driven from a program: planned, trained step by step or to its end, evaluated, and used to generate; its
// tensors read and written by name, saved and exported. The command line is made of this class.

#include <atomic>
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "quern/data_source.h"
#include "quern/device.h"
#include "quern/dtype.h"
#include "quern/generation.h"
#include "quern/model.h"
#include "quern/plugin.h"
#include "quern/shape.h"

namespace quern {

/// Where a run's config comes from, and the implementations that it may select beside plugins.
struct RunConfig {
  std::string file;                         ///< TOML; with `text`, only its name in messages
  std::optional<std::string> text = {};     ///< the TOML itself
  std::vector<std::string> overrides = {};  ///< "train.steps=8", applied in order
  Manifest components = {};                 ///< the calling program's own datasets, log sinks, ...
};

/// TOML with every default. A config error lists all faults. Makes no component.
std::string resolved_config(const RunConfig& config);

/// Requests to a run from a signal handler or another thread.
struct RunRequests {
  std::atomic<int> stop{0};       ///< not 0: save and return, at the next micro-batch
  std::atomic<bool> save{false};  ///< save the newest finished step, and go on
};

struct RunResult {
  std::int64_t step = 0;            ///< optimizer steps finished
  bool finished = false;            ///< false: stopped by request; every finished step is in a checkpoint
  std::vector<std::string> untold;  ///< warnings about log sinks that no sink accepted
};

/// Called with the current phase of a start: "planning", "loading weights"; empty: no long phase, others may print.
using StartProgress = std::function<void(std::string_view)>;

/// Source of weights; at most one is set. Neither: the newest whole checkpoint of the run's directory.
struct WeightSource {
  std::string checkpoint;  ///< a checkpoint, or a run directory, of which the newest
  std::string from;        ///< a Hugging Face model directory or safetensors file
};
/// Chooses by the file or folder at `path`; "" is neither.
WeightSource weight_source(const std::string& path);

/// Source of an opened run's weights.
struct OpenedWeights {
  std::string path;                ///< the checkpoint, or the model
  std::vector<std::string> notes;  ///< messages: which weights were loaded, and which checkpoints were skipped
};

/// Progress of a training run. NaN: there is none yet.
struct RunPosition {
  std::int64_t step = 0;                                              ///< optimizer steps finished
  std::int64_t tokens = 0;                                            ///< that these steps trained on
  double loss = std::numeric_limits<double>::quiet_NaN();             ///< nats a target, of the last step that had one
  double gradient_norm = std::numeric_limits<double>::quiet_NaN();    ///< of the same step, before clipping
  double learning_rate = std::numeric_limits<double>::quiet_NaN();    ///< of the last step
  double seconds = std::numeric_limits<double>::quiet_NaN();          ///< that the last step took
  double validation_loss = std::numeric_limits<double>::quiet_NaN();  ///< of the last evaluation
};

/// A tensor of the run's state.
struct RunTensor {
  std::string name;  ///< as in checkpoints: "master/qkv.weight/3", "moment1/qkv.weight/3"
  DType dtype = DType::f32;
  Extents shape;  ///< over all ranks
};

/// Where a tensor is, for other libraries that read it between two calls of the run.
struct TensorPlace {
  void* data = nullptr;  ///< in the device's memory, row-major; valid as long as the run is open
  std::string device;    ///< id of the device: "cpu", "cuda"
  int unit = 0;          ///< number of the hardware unit that the device opened
};

/// The loss over some data.
struct DataLoss {
  std::string name;         ///< of the file; "validation" of a split that does not consist of token files
  double loss_sum = 0;      ///< nats, over all targets that count
  double correct = 0;       ///< of these, those predicted right; NaN: the loss does not count these
  double targets = 0;       ///< that count
  std::int64_t tokens = 0;  ///< in whole windows
  double seconds = 0;
  double loss() const { return loss_sum / targets; }
  double perplexity() const;  ///< e to the loss
  double tokens_per_second() const { return static_cast<double>(tokens) / seconds; }
};

/// Every fault is thrown as an Error, with the code of its kind. Not thread-safe, except RunRequests. A run is opened
/// once, for one of three uses; another use needs another run.
class TrainingRun {
 public:
  /// Reads the config, applies `overrides` ("train.steps=8"), and makes its components. Opens neither device nor
  /// data.
  explicit TrainingRun(RunConfig config);
  explicit TrainingRun(const std::string& config_file, const std::vector<std::string>& overrides = {})
      : TrainingRun(RunConfig{.file = config_file, .overrides = overrides}) {}
  ~TrainingRun();
  TrainingRun(const TrainingRun&) = delete;
  TrainingRun& operator=(const TrainingRun&) = delete;

  // ---- components; references live as long as the run ----
  std::string config() const;  ///< TOML, with every default
  ModelTraits model() const;
  const DeviceTraits& device() const;
  Geometry geometry() const;      ///< of a micro-batch
  std::string tokenizer() const;  ///< checkpoint.tokenizer; "": none
  /// The tokens that end a text: from the config.json in `from`, of the run's model, or of its tokenizer.
  std::vector<std::int32_t> end_tokens(const std::string& from = {}) const;
  /// A split as in training. The run must outlive it.
  std::unique_ptr<DataSource> open_data(Split split) const;

  // ---- plan: memory, time and programs as text; before or after opening ----
  std::string plan_report();
  /// Sets the plan's micro-batch to the one with the fastest step, for the same number of sequences.
  void choose_micro_batch();
  std::string chosen_config();  ///< as config(), with the planner's choices, and reasons in comments
  std::string memory_table();   ///< bytes by owner
  std::string show_program(const std::string& pass);   ///< "model", ..., "place"
  std::string show_schedule(const std::string& name);  ///< of one run of the plan; "": of all
  std::string timeline();                              ///< of a simulated step, as JSON for Perfetto
  std::size_t verify_plan();                           ///< checks its schedules; returns the number of actions

  // ---- open ----
  /// Opens the run directory and the device, and allocates all memory. `requests` outlives the run.
  void open_for_training(RunRequests& requests, const StartProgress& progress = {});
  /// Only weights, in micro-batches of the run's geometry.
  OpenedWeights open_for_evaluation(const WeightSource& source);
  /// The same for `texts` concurrent texts of up to `longest` tokens.
  OpenedWeights open_for_generation(const WeightSource& source, std::int64_t texts, std::int64_t longest);

  // ---- train ----
  /// Opens data, weights and log. Nothing is trained before it returns.
  void start();
  /// One step with its samples, evaluation and checkpoints. False: no step is left, or a stop was requested. Calls
  /// start() if necessary. Before an error is thrown, finished steps are saved, unless saving failed or the step's
  /// numbers are not finite.
  bool step();
  /// Steps up to the end or to a stop, with the last evaluation, checkpoint and export.
  RunResult train();
  RunPosition position() const;
  /// The next step's: the schedule's, unless one is set.
  double learning_rate() const;
  /// Replaces the schedule's from the next step on; none: the schedule's again. Not part of checkpoints.
  void set_learning_rate(std::optional<double> rate);
  /// Saves the newest finished step; returns when it is written.
  void save();

  // ---- use of an open run, between steps; does not change the training state ----
  /// The loss over each of these token files (or patterns); none: over the validation split's files. Whole windows in
  /// the files' order, each target once. Sums are in fp64. Asks `stopped` before each batch; true: throws.
  std::vector<DataLoss> evaluate(const std::vector<std::string>& files = {}, const std::function<bool()>& stopped = {});
  /// Continuations in the prompts' order. A run that is open for training needs samples (sample.every).
  std::vector<Continuation> generate(const std::vector<Prompt>& prompts, const GenerateSettings& settings,
                                     const TokenHandler& on_token = {});
  /// The run's state; also gradients, "gradient/qkv.weight/3", of a run that trains: of the last step's loss, summed
  /// over its targets, before clipping.
  std::vector<RunTensor> tensors() const;
  /// A tensor's elements, row-major; fp32 and bf16 only. All ranks call this together, and the functions below.
  std::vector<float> read(const std::string& tensor) const;
  /// A tensor that is whole on this rank's device: not sharded, and not in an offload store. Waits for the device
  /// first.
  TensorPlace place(const std::string& tensor) const;
  /// Replaces all elements, rounded to the tensor's dtype, and renews the working copies.
  void write(const std::string& tensor, std::span<const float> values);
  /// The weights as a Hugging Face model directory; it replaces an older export only when it is complete.
  void export_model(const std::string& directory);

 private:
  struct Parts;
  std::unique_ptr<Parts> parts_;
};

/// Their combined loss.
DataLoss total_of(const std::vector<DataLoss>& evaluations);

}  // namespace quern
