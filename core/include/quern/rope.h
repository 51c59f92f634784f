#pragma once
// Rotary position embedding: the frequencies of every scaling that quern knows, computed once on the host.
// Su et al., "RoFormer" (2021); scalings as Hugging Face transformers defines them in modeling_rope_utils.

#include <cstdint>
#include <string>
#include <vector>

namespace quern {

/// The fields of a Hugging Face `rope_scaling` table together with `rope_theta`.
struct RopeConfig {
  std::string type = "default";  ///< default, linear, llama3 or yarn
  double theta = 10000.0;
  double factor = 1.0;
  double low_freq_factor = 1.0;                       ///< llama3
  double high_freq_factor = 4.0;                      ///< llama3
  std::int64_t original_max_position_embeddings = 0;  ///< llama3, yarn; 0: not given
  double beta_fast = 32.0;                            ///< yarn
  double beta_slow = 1.0;                             ///< yarn
  double attention_factor = 0.0;                      ///< yarn; 0: from factor
};

struct RopeFrequencies {
  std::vector<double> inverse;  ///< radians a position, one per pair: head_dim / 2 of them
  double magnitude = 1.0;       ///< cos and sin are multiplied by it (yarn's attention factor)
};

/// All faults of a scaling, one text per field that names it; empty if it is valid.
std::vector<std::string> rope_problems(const RopeConfig& config, std::int64_t head_dim);

/// Frequencies of a head of `head_dim`. A scaling that misses a field it needs, or has one out of range, is a config
/// error that names it.
RopeFrequencies rope_frequencies(const RopeConfig& config, std::int64_t head_dim);

}  // namespace quern
