#pragma once
// A model: its parameters and three programs. It runs nothing; the example parallel_decoder is one.

#include <cstdint>
#include <string>
#include <vector>

#include "quern/builder.h"
#include "quern/parameter.h"

namespace quern {

/// Sizes the core needs for planning and reporting.
struct ModelTraits {
  std::int64_t layers = 0;
  std::int64_t width = 0;          ///< of the residual stream
  std::int64_t vocabulary = 0;     ///< 0: it has no tokens
  std::int64_t max_positions = 0;  ///< longest sequence that the model is made for
  bool causal = true;              ///< no loss depends on later tokens: it can continue texts
  bool whole_rows = false;         ///< every sequence has max_positions tokens, as the parts of an image
};

class Model {
 public:
  virtual ~Model() = default;

  // ---- capabilities ----
  virtual ModelTraits traits() const = 0;
  virtual std::vector<ParameterSpec> parameters() const = 0;

  /// Layers of one kind have the same program, which is written once. By default all are of one.
  virtual std::int64_t block_kind(std::int64_t /*layer*/) const { return 0; }

  // ---- programs: each takes its input from the builder and declares one output ----
  virtual void embed(ProgramBuilder& b) const = 0;
  /// All layers have the parameters of group `block`; what they do with them may differ.
  virtual void block(ProgramBuilder& b, std::int64_t layer) const = 0;
  virtual void head(ProgramBuilder& b) const = 0;

  // ---- state ----
  /// The Hugging Face config.json of this model, as text.
  virtual std::string hf_config() const = 0;
};

}  // namespace quern
