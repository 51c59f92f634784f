#pragma once
// A model's weights in an engine: fresh, and from and to Hugging Face.

#include <functional>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "engine/engine.h"
#include "hf/hf_weights.h"
#include "quern/random.h"
#include "transform/lora.h"

namespace quern {

/// The weights that a run begins with: of files, and random by each part's Init where these have none, the same for
/// every device, precision and number of ranks.
class FirstWeights {
 public:
  struct From {
    std::string model = {};    ///< a Hugging Face model directory or safetensors file; empty: random
    std::string adapter = {};  ///< an adapter's folder, as PEFT writes it, for its parameters; empty: random
    std::uint64_t seed = 0;
  };
  /// Opens the files and checks that they fit the parameters of a model of so many layers.
  FirstWeights(std::vector<ParameterSpec> specs, std::int64_t layers, const From& from);
  const std::vector<ParameterSpec>& specs() const { return specs_; }
  const ParameterSpec& spec(const std::string& parameter) const;
  std::int64_t layers() const { return layers_; }

  /// Elements first, first + 1, ... of a part of `spec`; a whole part unless it is `as_stored`.
  void read(const ParameterSpec& spec, const ParameterPart& part, int layer, std::int64_t first,
            std::span<float> values) const;
  /// Whether files have it.
  const WeightFiles* files_of(const ParameterPart& part, int layer) const;
  RandomKey key_of(const ParameterSpec& spec, int layer) const;
  /// What the user should know of it, a line each.
  const std::vector<std::string>& notes() const { return notes_; }

 private:
  std::vector<ParameterSpec> specs_;
  std::int64_t layers_;
  From from_;
  std::unique_ptr<WeightFiles> model_, adapter_;
  std::vector<std::string> notes_;
};

FirstWeights first_weights(const Engine& engine, const FirstWeights::From& from);

enum class Loaded { all, frozen };
/// Writes masters, and makes the forms of frozen weights. Working copies of the others are made by Engine::refresh.
/// Returns the checksum of the frozen weights, as text; empty: there are none.
std::string load_weights(Engine& engine, const FirstWeights& weights, Loaded which);

/// Random weights.
void initialise_weights(Engine& engine, std::uint64_t seed);
/// The weights of a Hugging Face model directory or safetensors file, likewise.
void import_weights(Engine& engine, const std::string& path);
/// A Hugging Face model directory: trained parameters as `masters` reads them, frozen ones as they were loaded, and an
/// adapter is merged.
void export_weights(const WeightReader& masters, const FirstWeights& frozen, const LoraModel* adapter,
                    const std::string& directory, const HfExport& what);
std::vector<ParameterSpec> specs_of(const Plan& plan);
/// Reads masters, as fp32.
WeightReader master_reader(Engine& engine);

}  // namespace quern
