#include "run/export/model_export.h"

#include <utility>

#include "run/export/export_config.h"
#include "run/export/prepared_data.h"
#include "run/weights.h"

namespace quern {

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
  check_export(directory, what_);
}

void ModelExport::write(Engine& engine, const std::string& directory) const {
  export_weights(engine, directory, what_);
}

}  // namespace quern
