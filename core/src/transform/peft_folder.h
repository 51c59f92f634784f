#pragma once
// An adapter as PEFT has it on disk: a folder with adapter_config.json and adapter_model.safetensors.

#include <string>

#include "hf/hf_weights.h"
#include "transform/lora.h"

namespace quern {

struct PeftConfig {
  std::int64_t rank = 8;
  double alpha = 16;
  bool rslora = false;
  double dropout = 0;  ///< may differ from the folder's
  std::string base = {};  ///< directory of the base model, as written in the config; may be empty
};

inline constexpr const char* kPeftWeights = "adapter_model.safetensors";

/// Throws unless the folder's config says the same, and nothing that is not supported.
void check_peft_folder(const std::string& directory, const PeftConfig& config);
/// Writes the folder, whole or not at all, in the place of an older one. `reader` reads the adapter's parameters.
void write_peft_folder(const std::string& directory, const PeftConfig& config, const LoraModel& model, DType dtype,
                       const WeightReader& reader);

}  // namespace quern
