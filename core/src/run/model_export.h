#pragma once
// The Hugging Face model that a finished run leaves in its directory.

#include <string>

#include "engine/engine.h"
#include "hf/hf_weights.h"
#include "run/session.h"

namespace quern {

class ModelExport {
 public:
  /// Throws what `write` would, of faults that can be seen before there are weights, so that they are not found at the
  /// end of a long run.
  explicit ModelExport(const Session& session);
  /// Returns where it wrote the model; "" when the run is to export none.
  std::string write(Engine& engine, const std::string& run_directory) const;

 private:
  bool wanted_;
  HfExport what_;
};

}  // namespace quern
