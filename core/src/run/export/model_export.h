#pragma once
// The weights of a run as a Hugging Face model: in its directory when it is finished, or where a program wants them.

#include <string>
#include <vector>

#include "checkpoint/checkpoint.h"
#include "engine/engine.h"
#include "hf/hf_weights.h"
#include "run/session.h"
#include "run/weights.h"

namespace quern {

class ModelExport {
 public:
  /// Throws what `write` would, of faults that can be seen before there are weights, so that they are not found at the
  /// end of a long run.
  ModelExport(const Session& session, const std::string& directory);
  /// An adapter is merged.
  void write(Engine& engine, const std::string& directory) const;
  /// The weights of a checkpoint of this model, or where adapter.merge is off the adapter's folder; an input error
  /// where it has other parameters.
  void write(const Checkpoint& checkpoint, const Model& model, const std::string& directory) const;
  /// The adapter alone, as PEFT's folder; `masters` reads its parameters.
  void write_adapter(const WeightReader& masters, const std::string& directory) const;
  /// What the user should know of it, a line each.
  const std::vector<std::string>& notes() const { return notes_; }

 private:
  void write(const std::vector<ParameterSpec>& specs, std::int64_t layers, const WeightReader& masters,
             const std::string& directory) const;

  HfExport what_;
  FirstWeights::From frozen_;
  const LoraModel* adapter_ = nullptr;
  bool merges_ = true;
  PeftConfig peft_;
  std::vector<std::string> notes_;
};

/// Writes the weights of a checkpoint, or of the newest one of a run directory, as a Hugging Face model directory, or
/// with adapter.merge=false as PEFT's: with the model, data and export settings of its config, which `overrides` change,
/// and without a device. Returns what the user should know, a line each.
std::vector<std::string> export_checkpoint(const std::string& path, const std::string& directory,
                                           const std::vector<std::string>& overrides);

}  // namespace quern
