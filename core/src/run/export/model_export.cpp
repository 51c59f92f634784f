#include "run/export/model_export.h"

#include <algorithm>
#include <utility>

#include "base/shorten.h"
#include "checkpoint/checkpoint_store.h"
#include "quern/error.h"
#include "run/export/export_config.h"
#include "run/export/prepared_data.h"
#include "run/starting_point.h"

namespace quern {

namespace {

[[noreturn]] void refuse(const Checkpoint& checkpoint, const std::string& what, const std::string& found,
                         const std::string& expected) {
  throw Error(ErrorCode::input, {.where = checkpoint.path,
                                 .what = "its weights are of another model than its config says: " + what,
                                 .found = found,
                                 .expected = expected,
                                 .next = "correct the model's settings with --set"});
}

}  // namespace

ModelExport::ModelExport(const Session& session, const std::string& directory) {
  what_.dtype = *dtype_named(session.checkpoint.export_dtype);
  what_.tokenizer_from = session.checkpoint.tokenizer;
  PreparedData data = prepared_data(session);
  what_.chat_templates = std::move(data.chat_templates);
  notes_ = std::move(data.notes);
  const OptionValue* source = session.config.section("model").find("config");
  const ExportFacts facts{.dtype = what_.dtype,
                          .vocabulary = session.model->traits().vocabulary,
                          .sources = {source ? std::get<std::string>(*source) : "", session.train.from},
                          .tokenizer = session.checkpoint.tokenizer,
                          .end_tokens = std::move(data.end_tokens)};
  what_.config = exported_config(session.model->hf_config(), facts);
  what_.generation_config = exported_generation_config(facts);
  frozen_ = first_weights_of(session);
  adapter_ = session.lora;
  merges_ = session.adapter.merge;
  peft_ = session.peft_config();
  check_export(directory, what_);
}

void ModelExport::write(Engine& engine, const std::string& directory) const {
  write(specs_of(engine.plan()), engine.plan().model.layers, master_reader(engine), directory);
}

void ModelExport::write(const std::vector<ParameterSpec>& specs, std::int64_t layers, const WeightReader& masters,
                        const std::string& directory) const {
  const bool frozen =
      std::any_of(specs.begin(), specs.end(), [](const ParameterSpec& spec) { return !spec.trainable; });
  export_weights(masters, FirstWeights(specs, layers, frozen ? frozen_ : FirstWeights::From{}), adapter_, directory,
                 what_);
}

void ModelExport::write_adapter(const WeightReader& masters, const std::string& directory) const {
  write_peft_folder(directory, peft_, *adapter_, what_.dtype, masters);
}

void ModelExport::write(const Checkpoint& checkpoint, const Model& model, const std::string& directory) const {
  const std::vector<ParameterSpec> specs = model.parameters();
  std::size_t known = 0;
  auto tensor_of = [&](const ParameterSpec& spec, std::int64_t layer) -> const StoredTensor& {
    const std::string name = std::string(kMasterPrefix) + spec.name + (layer < 0 ? "" : "/" + std::to_string(layer));
    const StoredTensor* stored = checkpoint.tensors.find(name);
    if (!stored || stored->extents != spec.extents)
      refuse(checkpoint, quote_name(name), stored ? to_string(stored->extents) : "none", to_string(spec.extents));
    return *stored;
  };
  for (const ParameterSpec& spec : specs) {
    if (!spec.trainable) continue;  // loaded again from where it came
    const bool in_layers = spec.group == ParameterGroup::block;
    for (std::int64_t layer = in_layers ? 0 : -1; layer < (in_layers ? model.traits().layers : 0); ++layer, ++known)
      tensor_of(spec, layer);
  }
  std::size_t stored = 0;
  for (const StoredTensor& tensor : checkpoint.tensors.tensors()) stored += tensor.name.starts_with(kMasterPrefix);
  if (stored != known) refuse(checkpoint, "parameters", std::to_string(stored), std::to_string(known));
  auto reader = [&](const ParameterSpec& spec, std::int64_t layer, std::int64_t first, std::span<float> values) {
    read_weights(checkpoint, tensor_of(spec, layer).name, first, values);
  };
  adapter_ && !merges_ ? write_adapter(reader, directory) : write(specs, model.traits().layers, reader, directory);
}

std::vector<std::string> export_checkpoint(const std::string& path, const std::string& directory,
                                           const std::vector<std::string>& overrides) {
  std::vector<std::string> notes;
  const Checkpoint checkpoint = checkpoint_at(path, notes);
  notes.push_back("weights of " + checkpoint.path);
  ConfigDocument document = ConfigDocument::parse(checkpoint.meta.config, checkpoint.path + "/state.json: config");
  document.keep({"model", "adapter", "data", "train", "checkpoint"});
  for (const std::string& assignment : overrides) document.set(assignment);
  const ConfiguredRun run(document);
  if (!run.session.adapter.merge && !run.session.lora)
    throw Error(ErrorCode::config, {.where = checkpoint.path,
                                    .what = "the run has no adapter to write alone",
                                    .expected = "adapter.id = \"lora\"",
                                    .next = "export the whole model: --to hf"});
  const ModelExport model(run.session, directory);
  model.write(checkpoint, *run.session.model, directory);
  notes.insert(notes.end(), model.notes().begin(), model.notes().end());
  return notes;
}

}  // namespace quern
