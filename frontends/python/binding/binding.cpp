// run.h for Python, which calls these functions through ctypes: a run is an opaque pointer; arguments and
// results are JSON, except the elements of tensors. Every function returns 0, or 1 with quern_error() set.
#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include <nlohmann/json.hpp>

#include "base/format.h"
#include "components.h"
#include "generate/prompts.h"
#include "launch/rank_place.h"
#include "launch/starter_link.h"
#include "quern/error.h"
#include "quern/run.h"
#include "run/ranks/start_ranks.h"
#include "stop_signals.h"

namespace quern::python {

namespace {

using nlohmann::json;

constexpr int kLeft = -1;  // RunRequests::stop of a program that is done with the run

/// A run as Python has it: opened by its first use.
struct Run {
  explicit Run(RunConfig from) : config(from), training(std::move(from)) {}
  ~Run() { end_hearing(); }
  void end_hearing() {
    if (std::exchange(hears, false)) hear_starter(nullptr);
  }

  enum class Use { none, training, inference, over };
  RunRequests requests;
  RunConfig config;
  TrainingRun training;
  std::unique_ptr<TrainingRun> texts;  // open for generation, of a run that does not train
  std::int64_t longest = 0;            // text that it is open for
  std::atomic<bool> busy{false};       // in a call
  bool finished = false;
  Use use = Use::none;
  bool is_rank = starter_of_this_rank() != 0;         // then its signals come from the starter
  bool hears = false;                                 // and go to this run, which trains
  std::vector<std::unique_ptr<StopSignals>> signals;  // of a run that trains, also between steps
};

json position(const Run& run) {
  const RunPosition at = run.training.position();
  return {{"step", at.step},
          {"tokens", at.tokens},
          {"loss", at.loss},
          {"gradient_norm", at.gradient_norm},
          {"learning_rate", at.learning_rate},
          {"seconds", at.seconds},
          {"validation_loss", at.validation_loss}};
}

[[noreturn]] void refuse(const char* what, const char* next) {
  throw Error(ErrorCode::config, {.where = "Run", .what = what, .next = next});
}

/// Ctrl-C ends a call that trains nothing. Ranks go on, since they make each pass together.
bool interrupted(Run& run) {
  int interrupt = SIGINT;
  return !rank_place() && run.requests.stop.compare_exchange_strong(interrupt, 0);
}

/// A call: one at a time, since callbacks of a run run within one of its calls.
class Turn {
 public:
  explicit Turn(Run& run) : run_(run) {
    if (run.busy.exchange(true))
      refuse("it is called inside another call of its own, as from on_event or data, or from another thread",
             "call it when the other call has returned");
  }
  ~Turn() {
    interrupted(run_);  // which ends this call only
    run_.busy = false;
  }
  Turn(const Turn&) = delete;
  Turn& operator=(const Turn&) = delete;

 private:
  Run& run_;
};

/// `work` of a run that trains; what it throws ends the run.
template <class Work>
void ending(Run& run, const Work& work) {
  try {
    work();
  } catch (...) {
    run.use = Run::Use::over;
    run.signals.clear();
    throw;
  }
}

void open_for_training(Run& run) {
  if (run.use == Run::Use::over) refuse("it has ended", "make another one, which continues");
  if (run.use == Run::Use::training) return;
  if (run.use == Run::Use::inference) refuse("it is open for evaluation, and does not train", "train with another one");
  if (run.is_rank) hear_starter(&run.requests), run.hears = true;
  run.training.open_for_training(run.requests);
  run.use = Run::Use::training;
  for (int signal : {SIGTERM, SIGHUP, SIGXCPU})
    if (is_default(signal))
      run.signals.push_back(std::make_unique<StopSignals>(run.requests, std::initializer_list<int>{signal}));
  ending(run, [&] { run.training.start(); });
}

void check_trains(const Run& run) {
  if (run.use == Run::Use::none || run.use == Run::Use::inference) refuse("it does not train yet", "call step() first");
}

void open_for_evaluation(Run& run, const std::string& weights) {
  if (run.use != Run::Use::none) return;
  run.training.open_for_evaluation(weight_source(weights));
  run.use = Run::Use::inference;
}

/// The end of a run: of its last step, or of a stop. Saves every finished step. Which signal stopped it, ranks agree on
/// in train(); one that comes after that ends the process at once.
json end(Run& run) {
  run.use = Run::Use::over;
  const RunResult result = run.training.train();
  run.end_hearing();
  run.signals.clear();
  run.finished = result.finished;
  const int stopped = run.requests.stop == kLeft ? 0 : run.requests.stop.load();
  return {{"moved", false},
          {"finished", result.finished},
          {"warnings", result.untold},
          {"position", position(run)},
          {"stopped", rank_place() ? stopped : 0}};
}

json step(Run& run, const json&) {
  if (run.finished) return {{"moved", false}, {"finished", true}};
  open_for_training(run);
  bool moved = false;
  ending(run, [&] { moved = run.training.step(); });
  // A stop that is not of all ranks yet ends none: the next step asks.
  if (!moved || (run.requests.stop != 0 && !rank_place())) return end(run);
  return {{"moved", true}, {"position", position(run)}};
}

json stop(Run& run, const json&) {
  if (run.use != Run::Use::training) return nullptr;
  int none = 0;
  run.requests.stop.compare_exchange_strong(none, kLeft);
  return end(run);
}

json evaluate(Run& run, const json& arguments) {
  open_for_evaluation(run, arguments.at("weights"));
  json losses = json::array();
  const auto files = arguments.at("files").get<std::vector<std::string>>();
  for (const DataLoss& loss : run.training.evaluate(files, [&] { return interrupted(run); }))
    losses.push_back({{"name", loss.name},
                      {"loss", loss.loss()},
                      {"perplexity", loss.perplexity()},
                      {"targets", loss.targets},
                      {"accuracy", loss.correct / loss.targets},
                      {"tokens", loss.tokens},
                      {"seconds", loss.seconds}});
  return losses;
}

/// The run that makes the texts: itself where it trains, else one of its own for texts of this length.
TrainingRun& open_for_texts(Run& run, const WeightSource& source, std::size_t prompts, std::int64_t longest) {
  if (run.use == Run::Use::training || run.use == Run::Use::over) return run.training;
  if (run.texts && run.longest >= longest) return *run.texts;
  run.texts = nullptr;  // its memory first
  auto texts = std::make_unique<TrainingRun>(run.config);
  texts->open_for_generation(source, std::min(texts->geometry().batch, static_cast<std::int64_t>(prompts)), longest);
  run.texts = std::move(texts);
  run.longest = longest;
  return *run.texts;
}

json generate(Run& run, const json& arguments) {
  std::vector<Prompt> prompts;
  std::int64_t longest = 0;
  for (const json& tokens : arguments.at("prompts")) {
    const std::string where = "prompt " + std::to_string(prompts.size() + 1);
    prompts.push_back({where, tokens_of(tokens, where)});
    longest = std::max(longest, static_cast<std::int64_t>(prompts.back().tokens.size()));
  }
  const ModelTraits model = run.training.model();
  GenerateSettings settings;
  settings.max_tokens = arguments.at("max_tokens");
  settings.sampling = {arguments.at("temperature"), arguments.at("top_p"),
                       static_cast<std::uint64_t>(arguments.at("seed").get<std::int64_t>())};
  const json& stop = arguments.at("stop");
  if (!stop.is_null()) settings.stop = tokens_of(stop, "stop");
  check_settings(settings, model.vocabulary, {"max_tokens", "temperature", "top_p", "seed", "stop"});
  check_prompts(prompts, model.vocabulary, settings.max_tokens, model.max_positions, "the model's positions");
  if (prompts.empty()) return json::array();
  const WeightSource source = weight_source(arguments.at("weights"));
  if (stop.is_null()) settings.stop = run.training.end_tokens(source.from);
  TrainingRun& maker = open_for_texts(run, source, prompts.size(), longest + settings.max_tokens);
  json texts = json::array();
  auto on_token = [&](std::size_t, std::int32_t) {
    if (interrupted(run)) refuse("the texts were interrupted", "generate them again");
  };
  for (const Continuation& text : maker.generate(prompts, settings, on_token))
    texts.push_back({{"tokens", text.tokens}, {"finish", text.finish == Finish::stop ? "stop" : "length"}});
  return texts;
}

json tensors(Run& run, const json&) {
  json list = json::array();
  for (const RunTensor& tensor : run.training.tensors())
    list.push_back({{"name", tensor.name}, {"dtype", name_of(tensor.dtype)}, {"shape", tensor.shape}});
  return list;
}

json place(Run& run, const json& arguments) {
  const TensorPlace place = run.training.place(arguments.at("tensor"));
  return {{"data", reinterpret_cast<std::uintptr_t>(place.data)}, {"device", place.device}, {"unit", place.unit}};
}

json open(Run& run, const json& arguments) {
  if (arguments.at("training"))
    open_for_training(run);
  else
    open_for_evaluation(run, arguments.at("weights"));
  return nullptr;
}

json set_learning_rate(Run& run, const json& arguments) {
  open_for_training(run);
  const json& rate = arguments.at("rate");
  if (!rate.is_null() && !(rate > 0))
    throw Error(
        ErrorCode::config,
        {.where = "Run.learning_rate", .what = "out of range", .found = rate.dump(), .expected = "a number above 0"});
  run.training.set_learning_rate(rate.is_null() ? std::optional<double>() : rate.get<double>());
  return nullptr;
}

using Method = std::function<json(Run&, const json&)>;

const std::map<std::string, Method, std::less<>>& methods() {
  static const std::map<std::string, Method, std::less<>> kMethods{
      {"open", open},
      {"step", step},
      {"stop", stop},
      {"evaluate", evaluate},
      {"generate", generate},
      {"pass", [](Run&, const json&) { return json(); }},  // refused inside another call
      {"tensors", tensors},
      {"place", place},
      {"set_learning_rate", set_learning_rate},
      {"position",
       [](Run& run, const json&) {
         check_trains(run);
         return position(run);
       }},
      {"learning_rate",
       [](Run& run, const json&) {
         open_for_training(run);
         return json(run.training.learning_rate());
       }},
      {"save",
       [](Run& run, const json&) {
         check_trains(run);
         run.training.save();
         return json();
       }},
      {"export",
       [](Run& run, const json& arguments) {
         open_for_evaluation(run, arguments.at("weights"));
         run.training.export_model(arguments.at("directory"));
         const std::optional<RankPlace> place = rank_place();
         return json{{"written", !place || place->rank == 0}};
       }},
      {"config", [](Run& run, const json&) { return json(run.training.config()); }},
      {"plan", [](Run& run, const json&) { return json(run.training.plan_report()); }},
      {"chosen_config", [](Run& run, const json&) { return json(run.training.chosen_config()); }},
      {"tokenizer", [](Run& run, const json&) { return json(run.training.tokenizer()); }},
  };
  return kMethods;
}

// ---- the boundary ----

std::string dumped(const json& value) { return value.dump(-1, ' ', false, json::error_handler_t::replace); }

thread_local std::string last_error;

int fail(const Error& error) {
  const ErrorDetail& detail = error.detail();
  last_error = dumped({{"code", static_cast<int>(error.code())},
                       {"message", error.what()},
                       {"where", detail.where},
                       {"what", detail.what},
                       {"found", detail.found},
                       {"expected", detail.expected},
                       {"next", detail.next}});
  return 1;
}

/// `work`, with whatever it throws as the last error.
template <class Work>
int guarded(const Work& work) {
  try {
    work();
    return 0;
  } catch (const Error& error) {
    return fail(error);
  } catch (const std::bad_alloc&) {
    return fail(Error(ErrorCode::resources, {.what = "out of host memory"}));
  } catch (const std::system_error& error) {
    return fail(Error(ErrorCode::resources, {.what = error.what()}));
  } catch (const std::exception& error) {
    return fail(Error(ErrorCode::internal, {.what = error.what()}));
  }
}

char* copy_of(const std::string& text) { return ::strdup(text.c_str()); }

/// {"file", "text": null or TOML, "overrides": [...]}
RunConfig config_in(const char* text, Callback callback) {
  const json config = json::parse(text);
  RunConfig result{.file = config.at("file")};
  if (const json& toml = config.at("text"); !toml.is_null()) result.text = toml.get<std::string>();
  result.overrides = config.at("overrides").get<std::vector<std::string>>();
  if (callback) result.components = components(callback);
  if (const std::optional<RankPlace> place = rank_place()) take_place(*place, result);
  return result;
}

}  // namespace

}  // namespace quern::python

#define QUERN_PYTHON extern "C" __attribute__((visibility("default")))

using namespace quern::python;

/// The error of this thread's last call that returned 1, as JSON; borrowed until its next call.
QUERN_PYTHON const char* quern_error() { return last_error.c_str(); }

/// Frees a text that a call returned.
QUERN_PYTHON void quern_free(char* text) { ::free(text); }

/// Sets the answer of a callback.
QUERN_PYTHON void quern_answer(std::string* answer, const char* text, std::size_t size) { answer->assign(text, size); }

/// The config as TOML, with every default.
QUERN_PYTHON int quern_resolve(const char* config, Callback callback, char** toml) {
  return guarded([&] { *toml = copy_of(quern::resolved_config(config_in(config, callback))); });
}

/// Makes a run. `callback` may be null; else it is called until quern_close returns.
QUERN_PYTHON int quern_make(const char* config, Callback callback, Run** run) {
  return guarded([&] { *run = new Run(config_in(config, callback)); });
}

/// Starts `words`, a JSON list, as the config's ranks, and sets their exit code; -1: the run has one, or this is a
/// rank.
QUERN_PYTHON int quern_start_ranks(const char* config, const char* words, int* code) {
  return guarded([&] {
    *code = -1;
    if (quern::starter_of_this_rank() != 0) hear_starter(nullptr);
    if (quern::rank_place()) return;
    auto say = [](const std::string& line) { std::fprintf(stderr, "%s\n", line.c_str()); };
    *code = quern::start_ranks(config_in(config, nullptr), json::parse(words), say).value_or(-1);
  });
}

QUERN_PYTHON int quern_close(Run* run) {
  return guarded([&] { delete run; });
}

/// In a child that fork made: no run of the parent gets its signals.
QUERN_PYTHON void quern_forked() { release_signals(); }

QUERN_PYTHON int quern_call(Run* run, const char* method, const char* arguments, char** answer) {
  return guarded([&] {
    const Turn turn(*run);
    const StopSignals interrupt(run->requests, {SIGINT});
    *answer = copy_of(dumped(methods().at(method)(*run, json::parse(arguments))));
  });
}

/// Elements of a tensor, row-major.
QUERN_PYTHON int quern_read(Run* run, const char* tensor, float* values, std::size_t count) {
  return guarded([&] {
    const Turn turn(*run);
    const std::vector<float> elements = run->training.read(tensor);
    if (elements.size() != count) quern::fail_internal(tensor, "has another number of elements");
    std::memcpy(values, elements.data(), count * sizeof(float));
  });
}

QUERN_PYTHON int quern_write(Run* run, const char* tensor, const float* values, std::size_t count) {
  return guarded([&] {
    const Turn turn(*run);
    run->training.write(tensor, {values, count});
  });
}
