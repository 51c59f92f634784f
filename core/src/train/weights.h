#pragma once
// A model's weights in an engine: fresh, from and to Hugging Face, and as checkpoint tensors.

#include <string>
#include <vector>

#include "checkpoint/checkpoint.h"
#include "checkpoint/hf_weights.h"
#include "train/engine.h"

namespace quern {

/// Random values by each part's Init; the same for every device, precision and number of ranks.
void initialise_weights(Engine& engine, std::uint64_t seed);

/// Masters from a Hugging Face model directory or safetensors file.
void import_weights(Engine& engine, const std::string& path);
/// Masters as a Hugging Face model directory.
void export_weights(Engine& engine, const std::string& directory, const HfExport& what);

/// "master/qkv.weight/3"
std::string state_name(const PlannedTensor& tensor);
/// Reads the training state from a checkpoint; a tensor that is missing or has another shape or dtype is an input
/// error.
void load_state(Engine& engine, const Checkpoint& checkpoint);

}  // namespace quern
