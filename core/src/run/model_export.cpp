#include "run/model_export.h"

#include "run/export_config.h"
#include "run/weights.h"

namespace quern {

ModelExport::ModelExport(const Session& session) : wanted_(session.checkpoint.export_model) {
  if (!wanted_) return;
  what_.dtype = *dtype_named(session.checkpoint.export_dtype);
  what_.tokenizer_from = session.checkpoint.tokenizer;
  const OptionValue* source = session.config.section("model").find("config");
  what_.config = exported_config(session.model->hf_config(),
                                 {.dtype = what_.dtype,
                                  .vocabulary = session.model->traits().vocabulary,
                                  .sources = {source ? std::get<std::string>(*source) : "", session.train.from},
                                  .tokenizer = session.checkpoint.tokenizer});
  check_export(Session::export_directory(session.log.directory), what_);
}

std::string ModelExport::write(Engine& engine, const std::string& run_directory) const {
  if (!wanted_) return {};
  std::string directory = Session::export_directory(run_directory);
  export_weights(engine, directory, what_);
  return directory;
}

}  // namespace quern
