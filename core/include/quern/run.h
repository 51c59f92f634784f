#pragma once
// A run, driven from a program: planned, trained step by step or to its end, evaluated, and used to generate; its
// tensors read and written by name, saved and exported. The command line is made of this class.

#include <atomic>
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "quern/data_source.h"
#include "quern/device.h"
#include "quern/generation.h"
#include "quern/model.h"

namespace quern {

/// What a signal handler, or another thread, asks of a run.
struct RunRequests {
  std::atomic<int> stop{0};       ///< not 0: save and return, at the next micro-batch
  std::atomic<bool> save{false};  ///< save the newest finished step, and go on
};

struct RunResult {
  std::int64_t step = 0;            ///< optimizer steps finished
  bool finished = false;            ///< false: stopped by request; every finished step is in a checkpoint
  std::vector<std::string> untold;  ///< warnings about log sinks that no sink took
};

/// Told what a start is at: "planning", "loading weights"; empty: nothing that takes long, and others may print.
using StartProgress = std::function<void(std::string_view)>;

/// Where weights come from; at most one is set. Neither: the newest whole checkpoint of the run's directory.
struct WeightSource {
  std::string checkpoint;  ///< a checkpoint, or a run directory, of which the newest
  std::string from;        ///< a Hugging Face model directory or safetensors file
};
/// `path` as the one or the other, by what is there; "" is neither.
WeightSource weight_source(const std::string& path);

/// What a run was opened with.
struct OpenedWeights {
  std::string path;                ///< the checkpoint, or the model
  std::vector<std::string> notes;  ///< for people: which weights were taken, and what was passed over
};

/// Where a training run stands. NaN: there is none yet.
struct RunPosition {
  std::int64_t step = 0;                                              ///< optimizer steps finished
  double loss = std::numeric_limits<double>::quiet_NaN();             ///< nats a target, of the last step that had one
  double validation_loss = std::numeric_limits<double>::quiet_NaN();  ///< of the last evaluation
};

/// The loss over some data.
struct DataLoss {
  std::string name;         ///< of the file; "validation" of a split that does not consist of token files
  double loss_sum = 0;      ///< nats, over all targets that count
  double targets = 0;       ///< that count
  std::int64_t tokens = 0;  ///< in whole windows
  double seconds = 0;
  double loss() const { return loss_sum / targets; }
  double perplexity() const;  ///< e to the loss
  double tokens_per_second() const { return static_cast<double>(tokens) / seconds; }
};

/// All that goes wrong is thrown as an Error, with the code of its kind. Not for several threads at once, but for
/// RunRequests. A run is opened once, for one of three uses; to use another, make another run.
class TrainingRun {
 public:
  /// Reads the config, with `overrides` ("train.steps=8") laid over it, and makes its components. Touches no device and
  /// no data.
  explicit TrainingRun(const std::string& config_file, const std::vector<std::string>& overrides = {});
  ~TrainingRun();
  TrainingRun(const TrainingRun&) = delete;
  TrainingRun& operator=(const TrainingRun&) = delete;

  // ---- what it is made of; references live as long as the run ----
  std::string config() const;  ///< TOML, with every default
  ModelTraits model() const;
  const DeviceTraits& device() const;
  Geometry geometry() const;      ///< of a micro-batch
  std::string tokenizer() const;  ///< checkpoint.tokenizer; "": none
  /// The tokens that end a text, as the config.json in `from`, that of the run's model or of its tokenizer has them.
  std::vector<std::int32_t> end_tokens(const std::string& from = {}) const;
  /// A split as training sees it. Outlived by the run.
  std::unique_ptr<DataSource> open_data(Split split) const;

  // ---- plan: what it will take, as text; before or after it is opened ----
  std::string plan_report();
  /// From here on the plan has the micro-batch with which the step's sequences take the least time.
  void choose_micro_batch();
  std::string chosen_config();                        ///< as config(), with the planner's choices; says why in comments
  std::string memory_table();                         ///< bytes by owner
  std::string show_program(const std::string& pass);  ///< "model", "rotate", ..., "place"
  std::string show_schedule(const std::string& name);  ///< of one run of the plan; "": of all
  std::string timeline();                              ///< of a simulated step, as JSON for Perfetto
  std::size_t verify_plan();  ///< checks the laws of its schedules; returns the number of actions

  // ---- open ----
  /// Takes the run directory, the device and all memory. `requests` outlives the run.
  void open_for_training(RunRequests& requests, const StartProgress& progress = {});
  /// Weights alone, in micro-batches of the run's geometry.
  OpenedWeights open_for_evaluation(const WeightSource& source);
  /// The same for `texts` at once of up to `longest` tokens.
  OpenedWeights open_for_generation(const WeightSource& source, std::int64_t texts, std::int64_t longest);

  // ---- train ----
  /// Opens data, weights and log. Until it returns nothing is trained, and a process that ends loses nothing.
  void start();
  /// One step and what the run does after it: samples, evaluation, checkpoints. False: none is left, or a stop was
  /// asked for. Starts, where that was not done. Before an error is thrown the steps done are saved, unless saving is
  /// what failed or the numbers of the step are not finite.
  bool step();
  /// Steps up to the end or to a stop, with the last evaluation, checkpoint and export.
  RunResult train();
  RunPosition position() const;
  /// Saves the newest finished step; returns when it is written.
  void save();

  // ---- use: of an open run, between steps; without a trace in the training state ----
  /// The loss over each of these token files (or patterns of them); none: over those of the validation split. Whole
  /// windows in the files' order, each target once. Sums are exact to fp64.
  std::vector<DataLoss> evaluate(const std::vector<std::string>& files = {});
  /// Continuations in the prompts' order. A run that is open for training needs samples (sample.every).
  std::vector<Continuation> generate(const std::vector<Prompt>& prompts, const GenerateSettings& settings,
                                     const TokenHandler& on_token = {});
  /// Names of the run's state, as in checkpoints: "master/qkv.weight/3", "moment1/qkv.weight/3".
  std::vector<std::string> tensors() const;
  /// A tensor's elements, row-major; fp32 and bf16 only.
  std::vector<float> read(const std::string& tensor) const;
  /// As many elements, rounded to the tensor's dtype. What was made of them before is made anew.
  void write(const std::string& tensor, std::span<const float> values);
  /// The weights as a Hugging Face model directory; it takes the place of an older export only when it is whole.
  void export_model(const std::string& directory);

 private:
  struct Parts;
  std::unique_ptr<Parts> parts_;
};

/// All of them as one.
DataLoss total_of(const std::vector<DataLoss>& evaluations);

}  // namespace quern
