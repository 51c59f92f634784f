#include "run/inference.h"

#include <algorithm>
#include <filesystem>

#include "checkpoint/changes.h"
#include "checkpoint/checkpoint_store.h"
#include "checkpoint/saved_state.h"
#include "quern/error.h"
#include "run/export/export_config.h"
#include "run/export/prepared_data.h"
#include "run/starting_point.h"
#include "run/weights.h"

namespace quern {

WeightSource weight_source(const std::string& path) {
  if (path.empty()) return {};
  for (const char* part : {"state.json", "checkpoints"})  // of a checkpoint, of a run
    if (std::filesystem::exists(std::filesystem::path(path) / part)) return {.checkpoint = path, .from = {}};
  return {.checkpoint = {}, .from = path};
}

PlanOptions inference_options(const Session& session) {
  PlanOptions options = session.plan_options();
  options.train = false;
  options.next_logits = false;
  options.snapshot = false;
  options.state = {};
  options.uploads = 1;
  return options;
}

Inference open_inference(Session& session, const WeightSource& source, const PlanOptions& options) {
  Inference made;
  made.weights.notes = session.notes;
  std::optional<Checkpoint> checkpoint;
  if (source.from.empty())
    checkpoint =
        checkpoint_at(source.checkpoint.empty() ? session.log.directory : source.checkpoint, made.weights.notes);
  made.weights.path = checkpoint ? checkpoint->path : source.from;
  made.weights.notes.push_back("weights of " + made.weights.path);
  session.device->open(static_cast<int>(session.device_options.ordinal));
  for (const std::string& warning : session.device->traits().warnings) made.weights.notes.push_back(warning);
  if (checkpoint) session.device->load_state(checkpoint->meta.device_state);
  made.engine = std::make_unique<Engine>(*session.device, session.plan(options));
  if (!checkpoint) {
    import_weights(*made.engine, source.from);
    return made;
  }
  load_frozen_weights(session, *made.engine);
  const std::vector<std::string> changes = config_changes(checkpoint->meta.config, session.config.to_toml());
  load_state(*made.engine, *checkpoint, changes);
  for (const std::string& change : changes)
    if (change.starts_with("model.")) made.weights.notes.push_back("changed since the checkpoint: " + change);
  return made;
}

std::vector<std::int32_t> end_tokens(const Session& session, const std::string& from) {
  const OptionValue* config = session.config.section("model").find("config");
  const ExportFacts facts{.dtype = DType::f32,
                          .vocabulary = session.model->traits().vocabulary,
                          .sources = {from, config ? std::get<std::string>(*config) : "", session.train.from},
                          .tokenizer = session.checkpoint.tokenizer,
                          .end_tokens = from.empty() ? prepared_data(session).end_tokens : std::vector<std::int32_t>{}};
  std::vector<std::int32_t> tokens = end_tokens_of(exported_config(session.model->hf_config(), facts));
  for (std::int32_t token : end_tokens_of(exported_generation_config(facts)))
    if (token < facts.vocabulary && std::find(tokens.begin(), tokens.end(), token) == tokens.end())
      tokens.push_back(token);
  return tokens;
}

}  // namespace quern
