#pragma once
// Hugging Face weights in and out: their tensors are the parts of quern's packed parameters. Values travel as fp32 in
// pieces, so a model of any size passes through a small buffer.

#include <cstdint>
#include <functional>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "hf/weight_files.h"
#include "quern/parameter.h"

namespace quern {

/// Fills `values` with elements first, first + 1, ...
using WeightReader = std::function<void(const ParameterSpec& parameter, std::int64_t layer, std::int64_t first,
                                        std::span<float> values)>;

/// Names and shapes: missing tensors, but optional ones, unknown tensors and wrong shapes are input errors. A tied
/// model's lm_head.weight may be there if it equals the embedding.
void check_hf_weights(const WeightFiles& files, std::span<const ParameterSpec> parameters, std::int64_t layers);
/// Stored elements first, first + 1, ... of a part that the files, which are checked, have: all of them at once where
/// the part is not `as_stored`. NaNs and infinities are an input error that counts the tensor's.
void read_hf_part(const WeightFiles& files, const ParameterSpec& parameter, const ParameterPart& part,
                  std::int64_t layer, std::int64_t first, std::span<float> values);

struct HfExport {
  DType dtype = DType::bf16;      ///< f32 or bf16 (rounded to nearest)
  std::string config;             ///< text of config.json
  std::string generation_config;  ///< text of generation_config.json; empty: none
  std::string tokenizer_from;     ///< directory whose tokenizer files are copied; empty: none
  /// By name ("default", "tool_use"), that go with the tokenizer in place of its own; none: its own.
  std::map<std::string, std::string> chat_templates = {};
};

/// A safetensors file of the parameters' parts in f32 or bf16.
void write_hf_weights(const std::string& path, DType dtype, std::span<const ParameterSpec> parameters,
                      std::int64_t layers, const WeightReader& reader);

/// Replacing a directory deletes it: an input or resources error unless it is not there, or holds nothing but an export
/// of this program, whose weights are in that file.
void check_replaceable(const std::string& directory, const std::string& weights);

/// Throws what export_hf_model would, of faults that can be seen before there are weights: something else in the place
/// of the directory, no tokenizer files where they are to come from.
void check_export(const std::string& directory, const HfExport& what);

/// Writes a model directory that Hugging Face transformers loads; it takes the place of an older export only when it is
/// whole. A directory that holds anything else is refused.
void export_hf_model(const std::string& directory, const HfExport& what, std::span<const ParameterSpec> parameters,
                     std::int64_t layers, const WeightReader& reader);

/// A part's Hugging Face tensor: "{layer}" replaced.
std::string hf_tensor_name(const ParameterPart& part, std::int64_t layer);
/// A part's values in the other form, whole: of the tensor from the stored form, and back.
std::vector<float> hf_tensor_values(const ParameterPart& part, std::int64_t columns, const std::vector<float>& stored);
std::vector<float> stored_values(const ParameterPart& part, std::int64_t columns, const std::vector<float>& tensor);
/// The part's shape; by default (rows, columns), or (rows) of a vector; transposed if the part is.
Extents hf_tensor_extents(const ParameterSpec& parameter, const ParameterPart& part);

}  // namespace quern
