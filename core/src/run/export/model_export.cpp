#include "run/export/model_export.h"

#include "run/export/export_config.h"
#include "run/weights.h"

namespace quern {

ModelExport::ModelExport(const Session& session, const std::string& directory) {
  what_.dtype = *dtype_named(session.checkpoint.export_dtype);
  what_.tokenizer_from = session.checkpoint.tokenizer;
  const OptionValue* source = session.config.section("model").find("config");
  what_.config = exported_config(session.model->hf_config(),
                                 {.dtype = what_.dtype,
                                  .vocabulary = session.model->traits().vocabulary,
                                  .sources = {source ? std::get<std::string>(*source) : "", session.train.from},
                                  .tokenizer = session.checkpoint.tokenizer});
  check_export(directory, what_);
}

void ModelExport::write(Engine& engine, const std::string& directory) const {
  export_weights(engine, directory, what_);
}

}  // namespace quern
