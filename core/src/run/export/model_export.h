#pragma once
// The weights of a run as a Hugging Face model: in its directory when it is finished, or where a program wants them.

#include <string>
#include <vector>

#include "engine/engine.h"
#include "hf/hf_weights.h"
#include "run/session.h"

namespace quern {

class ModelExport {
 public:
  /// Throws what `write` would, of faults that can be seen before there are weights, so that they are not found at the
  /// end of a long run.
  ModelExport(const Session& session, const std::string& directory);
  void write(Engine& engine, const std::string& directory) const;
  /// What the user should know of it, a line each.
  const std::vector<std::string>& notes() const { return notes_; }

 private:
  HfExport what_;
  std::vector<std::string> notes_;
};

}  // namespace quern
