#pragma once
// A model's weights in an engine: fresh, and from and to Hugging Face.

#include <functional>
#include <string>

#include "engine/engine.h"
#include "hf/hf_weights.h"

namespace quern {

/// Random values by each part's Init; the same for every device, precision and number of ranks. `written` is called
/// before the working copies are made, which ranks do together.
void initialise_weights(
    Engine& engine, std::uint64_t seed, const std::function<void()>& written = [] {});

/// Masters from a Hugging Face model directory or safetensors file; `written` as above.
void import_weights(
    Engine& engine, const std::string& path, const std::function<void()>& written = [] {});
/// Masters as a Hugging Face model directory.
void export_weights(Engine& engine, const std::string& directory, const HfExport& what);

}  // namespace quern
