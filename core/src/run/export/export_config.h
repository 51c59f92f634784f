#pragma once
// config.json and generation_config.json of an export: a model writes its own fields, and what only the run knows is
// filled in here, the special tokens' ids and the dtype of the weights.

#include <cstdint>
#include <string>
#include <vector>

#include "quern/dtype.h"

namespace quern {

struct ExportFacts {
  DType dtype = DType::f32;     ///< of the exported weights; recorded as torch_dtype
  std::int64_t vocabulary = 0;  ///< ids at or above it are not filled in
  std::vector<std::string> sources =
      {};                 ///< config.json files, or folders that may have one; earlier ones win; "" is none
  std::string tokenizer;  ///< folder of the tokenizer; empty: none
  std::vector<std::int32_t> end_tokens = {};  ///< that end a text besides the sources'
};

/// `model_config` with torch_dtype and, where it has no bos_token_id, eos_token_id or pad_token_id, the id of the first
/// source that has one, else the id of the token which tokenizer_config.json names. An id that nothing states stays
/// null. eos_token_id also has facts.end_tokens. An input error for files that are damaged, and for a tokenizer that is
/// not a folder.
std::string exported_config(const std::string& model_config, const ExportFacts& facts);

/// The first generation_config.json that is beside a source or the tokenizer, its eos_token_id with facts.end_tokens;
/// empty when there is none.
std::string exported_generation_config(const ExportFacts& facts);

/// The token ids in the eos_token_id of such a config; empty when it has none.
std::vector<std::int32_t> end_tokens_of(const std::string& config);

}  // namespace quern
