#include "quern/run.h"

#include <algorithm>
#include <cmath>
#include <optional>
#include <utility>

#include "checkpoint/saved_state.h"
#include "config/resolve.h"
#include "data/file_list.h"
#include "engine/host_tensor.h"
#include "generate/generator.h"
#include "generate/prompts.h"
#include "launch/rank_place.h"
#include "plan/choice/choose.h"
#include "plan/programs/state_programs.h"
#include "plan/report.h"
#include "plan/shards.h"
#include "plan/show_schedules.h"
#include "program/names.h"
#include "quern/error.h"
#include "run/inference.h"
#include "run/options/run_schemas.h"
#include "run/trainer.h"

namespace quern {

namespace {

[[noreturn]] void refuse_use(const std::string& what, const std::string& next) {
  throw Error(ErrorCode::config, {.where = "TrainingRun", .what = what, .next = next});
}

/// What a step leaves of a gradient: this rank's rows, where ranks reduce it by rows.
PlannedTensor reduced_gradient(const Plan& plan, const PlannedTensor& gradient) {
  return plan.part({gradient.kind, gradient.parameter, gradient.layer, TensorId::kOwn});
}

}  // namespace

std::string resolved_config(const RunConfig& config) {
  PluginHost host = run_host(config.components);
  return resolve(document_of(config), run_schemas(), host).to_toml();
}

struct TrainingRun::Parts : ConfiguredRun {
  explicit Parts(RunConfig from) : ConfiguredRun(document_of(from), from.components), from(std::move(from)) {}

  Engine& engine() {
    if (trainer) return trainer->engine();
    if (!inference.engine) refuse_use("it is not open", "call one of open_for_training, _evaluation and _generation");
    return *inference.engine;
  }
  Trainer& training() {
    if (!trainer) refuse_use("it is not open for training", "call open_for_training");
    return *trainer;
  }
  void check_closed() const {
    if (trainer || inference.engine) refuse_use("it is open already", "make another one");
  }
  const Plan& plan() {
    if (trainer) return trainer->engine().plan();
    if (inference.engine) return inference.engine->plan();
    if (!own_plan) own_plan = session.plan(session.plan_options());
    return *own_plan;
  }
  /// Also the gradients of a run that trains.
  const std::vector<PlannedTensor>& tensors() {
    if (!state.empty()) return state;
    const Plan& open = engine().plan();
    state = training_state(open);
    if (trainer)
      for (const PlannedTensor& tensor : open.tensors)
        if (tensor.kind == names::kGradient && tensor.part == TensorId::kWhole)
          state.push_back(reduced_gradient(open, tensor));
    return state;
  }
  const PlannedTensor& tensor(const std::string& name);
  const PlannedTensor& readable(const std::string& name);
  std::unique_ptr<DataSource> open_tokens(const std::string& file);
  DataLoss loss_over(DataSource& data, const std::string& name, const std::function<bool()>& stopped);

  RunConfig from;
  std::optional<Plan> own_plan;      // while no engine has one
  std::unique_ptr<Trainer> trainer;  // open for training
  Inference inference;               // open for something else
  std::vector<PlannedTensor> state;  // of the open run; made when first asked for
};

TrainingRun::TrainingRun(RunConfig config) : parts_(std::make_unique<Parts>(std::move(config))) {}

TrainingRun::~TrainingRun() = default;

// ---- what it is made of ----

std::string TrainingRun::config() const { return parts_->config.to_toml(); }
ModelTraits TrainingRun::model() const { return parts_->session.model->traits(); }
const DeviceTraits& TrainingRun::device() const { return parts_->session.device->traits(); }
Geometry TrainingRun::geometry() const { return parts_->session.plan_options().geometry; }
std::string TrainingRun::tokenizer() const { return parts_->session.checkpoint.tokenizer; }

std::vector<std::int32_t> TrainingRun::end_tokens(const std::string& from) const {
  return quern::end_tokens(parts_->session, from);
}

std::unique_ptr<DataSource> TrainingRun::open_data(Split split) const { return parts_->session.open_data(split); }

// ---- plan ----

std::string TrainingRun::plan_report() {
  const Plan& plan = parts_->plan();
  const TrainOptions& train = parts_->session.train;
  std::string report =
      quern::plan_report(plan, device(), train.accumulation * train.micro_batch / plan.options.geometry.batch);
  for (const std::string& note : parts_->session.notes) report += "note            " + note + "\n";
  return report;
}

void TrainingRun::choose_micro_batch() {
  parts_->check_closed();
  const Session& session = parts_->session;
  if (session.train.accumulation % session.parallel.ranks != 0)
    refuse_use("its micro-batches are not as many on each rank",
               "make train.accumulation a multiple of parallel.ranks");
  Choice choice = session.with_config_places([&] {
    return choose(session.parts(), session.plan_options(),
                  session.leaves_sharding() ? Reach::sharding : Reach::micro_batch);
  });
  if (!choice.fits) return;
  add_schedules(choice.plan, *session.device);
  parts_->own_plan = std::move(choice.plan);
}

std::string TrainingRun::chosen_config() {
  RunConfig chosen = parts_->from;
  std::string text(kChosenConfigFile.begin);
  text += ", for " + device().name + "\n";
  for (const Decision& decision : parts_->plan().decisions) {
    if (!decision.assignment.empty()) chosen.overrides.push_back(decision.assignment);
    text +=
        "# " + decision.key + " = " + decision.value + " (was " + decision.configured + "): " + decision.reason + "\n";
  }
  return text + "\n" + resolved_config(chosen);
}

std::string TrainingRun::memory_table() { return quern::memory_table(parts_->plan()); }

std::string TrainingRun::show_program(const std::string& pass) {
  const Session& session = parts_->session;
  return session.with_config_places([&] { return show_programs(session.parts(), session.plan_options(), pass); });
}

std::string TrainingRun::show_schedule(const std::string& name) {
  return show_schedules(parts_->plan(), device(), name);
}

std::string TrainingRun::timeline() {
  return timeline_json(simulated_timeline(parts_->plan(), device()), "quern, estimated on " + device().name);
}

std::size_t TrainingRun::verify_plan() {
  verify_all_ranks(parts_->session.parts(), parts_->plan());
  std::size_t actions = 0;
  for (const RunSchedule& schedule : parts_->plan().schedules.runs) actions += schedule.actions.size();
  return actions;
}

// ---- open ----

void TrainingRun::open_for_training(RunRequests& requests, const StartProgress& progress) {
  parts_->check_closed();
  const StartProgress told = progress ? progress : [](std::string_view) {};
  parts_->trainer = std::make_unique<Trainer>(parts_->session, parts_->host, requests, told);
}

OpenedWeights TrainingRun::open_for_evaluation(const WeightSource& source) {
  parts_->check_closed();
  parts_->inference = open_inference(parts_->session, source, inference_options(parts_->session));
  return parts_->inference.weights;
}

OpenedWeights TrainingRun::open_for_generation(const WeightSource& source, std::int64_t texts, std::int64_t longest) {
  parts_->check_closed();
  PlanOptions options = inference_options(parts_->session);
  options.next_logits = true;
  options.geometry = {texts, (longest + 15) / 16 * 16};  // a size for 8-bit matmuls
  parts_->inference = open_inference(parts_->session, source, options);
  return parts_->inference.weights;
}

// ---- train ----

void TrainingRun::start() { parts_->training().start(); }
bool TrainingRun::step() { return parts_->training().step(); }
RunResult TrainingRun::train() { return parts_->training().run(); }
RunPosition TrainingRun::position() const { return parts_->training().position(); }
double TrainingRun::learning_rate() const { return parts_->training().learning_rate(); }
void TrainingRun::set_learning_rate(std::optional<double> rate) { parts_->training().set_learning_rate(rate); }
void TrainingRun::save() { parts_->training().save(); }

// ---- use ----

double DataLoss::perplexity() const { return std::exp(loss()); }

DataLoss total_of(const std::vector<DataLoss>& losses) {
  DataLoss total{.name = "total"};
  for (const DataLoss& loss : losses) {
    total.loss_sum += loss.loss_sum;
    total.correct += loss.correct;
    total.targets += loss.targets;
    total.tokens += loss.tokens;
    total.seconds += loss.seconds;
  }
  return total;
}

std::unique_ptr<DataSource> TrainingRun::Parts::open_tokens(const std::string& file) {
  OptionValues values = config.id("data") == "tokens"
                            ? config.factory_values("data")
                            : default_values(host.require(kPluginKind<Dataset>, "tokens").options);
  values.set("validation", std::vector<std::string>{file});
  return session.open_data(*host.create<Dataset>("tokens", values), Split::validation);
}

DataLoss TrainingRun::Parts::loss_over(DataSource& data, const std::string& name,
                                       const std::function<bool()>& stopped) {
  std::optional<DataLoss> sums;
  auto asked = [&] { return stopped && stopped(); };
  engine().with(Weights::evaluated, [&] { sums = sum_losses(engine(), nullptr, data, data.epoch_tokens(), asked); });
  if (!sums) throw Error(ErrorCode::input, {.where = name, .what = "the evaluation was interrupted"});
  DataLoss loss = *sums;
  loss.name = name;
  if (loss.targets == 0)
    throw Error(ErrorCode::input, {.where = name, .what = "no target counts", .next = "name other data"});
  if (!std::isfinite(loss.loss()))
    throw Error(ErrorCode::numerics, {.where = name,
                                      .what = "the loss is not finite",
                                      .found = "loss sum " + std::to_string(loss.loss_sum),
                                      .expected = "a finite number",
                                      .next = "take the weights of an earlier checkpoint"});
  return loss;
}

std::vector<DataLoss> TrainingRun::evaluate(const std::vector<std::string>& files,
                                            const std::function<bool()>& stopped) {
  std::vector<std::string> entries = files;
  if (entries.empty() && parts_->config.id("data") == "tokens")
    entries = parts_->config.factory_values("data").get<std::vector<std::string>>("validation");
  std::vector<std::pair<std::string, std::unique_ptr<DataSource>>> sources;  // all, before the first takes its time
  for (const std::string& entry : entries)
    for (const std::string& file : files_of(entry, files.empty() ? "data.tokens.validation" : "data to evaluate"))
      sources.emplace_back(file, parts_->open_tokens(file));
  if (sources.empty()) {
    if (!parts_->session.dataset->has(Split::validation))
      throw Error(ErrorCode::config, {.where = parts_->config.where("data", "id"),
                                      .what = "the data have no validation split",
                                      .next = "name token files to evaluate on"});
    sources.emplace_back("validation", open_data(Split::validation));
  }
  for (const auto& [name, source] : sources) parts_->session.check_vocabulary(*source);
  std::vector<DataLoss> losses;
  losses.reserve(sources.size());
  for (const auto& [name, source] : sources) losses.push_back(parts_->loss_over(*source, name, stopped));
  return losses;
}

std::vector<Continuation> TrainingRun::generate(const std::vector<Prompt>& prompts, const GenerateSettings& settings,
                                                const TokenHandler& on_token) {
  const PlanOptions& options = parts_->engine().plan().options;
  if (!options.next_logits) refuse_use("it is not open for texts", "set sample.every, or generate with another run");
  check_prompts(prompts, model().vocabulary, settings.max_tokens, options.geometry.sequence, "the open sequence");
  std::vector<Continuation> texts;
  parts_->engine().with(Weights::evaluated,
                        [&] { texts = quern::generate(parts_->engine(), prompts, settings, on_token); });
  return texts;
}

const PlannedTensor& TrainingRun::Parts::tensor(const std::string& name) {
  const std::vector<PlannedTensor>& known = tensors();
  auto found = std::find_if(known.begin(), known.end(), [&](const auto& tensor) { return state_name(tensor) == name; });
  if (found == known.end())
    throw Error(ErrorCode::config, {.where = "TrainingRun",
                                    .what = "no such tensor",
                                    .found = "\"" + name + "\"",
                                    .expected = "one of TrainingRun::tensors, such as " + state_name(known.front())});
  if (found->dtype != DType::f32 && found->dtype != DType::bf16)
    throw Error(ErrorCode::config, {.where = name,
                                    .what = "its elements are not read or written as floats",
                                    .found = std::string(name_of(found->dtype)),
                                    .expected = "f32 or bf16"});
  return *found;
}

std::vector<RunTensor> TrainingRun::tensors() const {
  std::vector<RunTensor> tensors;
  for (const PlannedTensor& tensor : parts_->tensors())
    tensors.push_back({state_name(tensor), tensor.dtype, tensor.whole_extents()});
  return tensors;
}

/// With its last step's gradient made, or its update applied.
const PlannedTensor& TrainingRun::Parts::readable(const std::string& name) {
  const PlannedTensor& found = tensor(name);
  if (found.kind != names::kGradient)
    engine().apply_update();
  else if (std::isnan(trainer->position().seconds))
    refuse_use("there is no gradient before the first step", "make a step first");
  return found;
}

std::vector<float> TrainingRun::read(const std::string& name) const {
  const PlannedTensor& tensor = parts_->readable(name);
  std::vector<std::byte> stored(static_cast<std::size_t>(byte_count(tensor.whole_extents(), tensor.dtype)));
  parts_->engine().read(tensor, stored.data());
  std::vector<float> values(static_cast<std::size_t>(element_count(tensor.whole_extents())));
  decode(stored.data(), tensor.dtype, values);
  return values;
}

TensorPlace TrainingRun::place(const std::string& name) const {
  const PlannedTensor& tensor = parts_->readable(name);
  void* const data = tensor.whole.empty() ? parts_->engine().device_address(tensor) : nullptr;
  if (!data)
    throw Error(ErrorCode::config, {.where = name,
                                    .what = "is not whole in this device's memory",
                                    .found = tensor.whole.empty() ? "in an offload store" : "sharded over ranks",
                                    .next = "copy it with read"});
  const Session& session = parts_->session;
  const std::optional<RankPlace> rank = rank_place();
  const bool counted = rank && parts_->trainer && device().units > 1;
  return {data, device().id, static_cast<int>(session.device_options.ordinal) + (counted ? rank->local_rank : 0)};
}

void TrainingRun::write(const std::string& name, std::span<const float> values) {
  const PlannedTensor& tensor = parts_->tensor(name);
  if (tensor.kind == names::kGradient)
    throw Error(ErrorCode::config, {.where = name,
                                    .what = "gradients cannot be written",
                                    .next = "each step makes its own; write masters or moments"});
  if (static_cast<std::int64_t>(values.size()) != element_count(tensor.whole_extents()))
    throw Error(ErrorCode::config, {.where = name,
                                    .what = "number of elements",
                                    .found = std::to_string(values.size()),
                                    .expected = std::to_string(element_count(tensor.whole_extents()))});
  std::vector<std::byte> stored(static_cast<std::size_t>(byte_count(tensor.whole_extents(), tensor.dtype)));
  encode(values, tensor.dtype, stored.data());
  parts_->engine().apply_update();
  parts_->engine().write(tensor, stored.data());
  parts_->engine().refresh();
}

void TrainingRun::export_model(const std::string& directory) {
  const ModelExport model(parts_->session, directory);
  auto write = [&] { model.write(parts_->engine(), directory); };
  if (parts_->trainer) return parts_->trainer->lead("exporting the model", write);
  const std::optional<RankPlace> place = rank_place();
  if (!place || place->rank == 0) write();  // each rank has all weights
}

}  // namespace quern
