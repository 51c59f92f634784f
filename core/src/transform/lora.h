#pragma once
// LoRA (Hu et al., arXiv 2106.09685): y = x W^T + b becomes y + factor (dropout(x) A^T) B^T with A (rank, in) and B
// (out, rank), which train while all else is frozen. A matrix that holds several tensors (q, k and v) has an A and a B
// for each, as PEFT does. A's matmul is a linear and B's an add_matmul; neither is quantized.

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "quern/op_spec.h"
#include "transform/model_transform.h"

namespace quern {

struct LoraOptions {
  std::string where = "adapter.targets";  ///< in the config, for errors
  std::int64_t rank = 8;
  double factor = 2;                      ///< alpha / rank, or alpha / sqrt(rank)
  double dropout = 0;                     ///< share of the elements of A's input that training sets to zero
  std::vector<std::string> targets = {};  ///< modules: "q_proj", a pattern of whole names, or kAllLinear
};
inline constexpr const char* kAllLinear = "all-linear";

/// One tensor's adapter.
struct LoraTarget {
  std::string base;        ///< the parameter
  std::size_t part = 0;    ///< of it,
  std::int64_t first = 0;  ///< which begins at that row
  std::string module;      ///< "model.layers.{layer}.self_attn.q_proj"
  ParameterSpec a, b;
};

class LoraModel final : public ModelTransform {
 public:
  /// `ops` are those that the model's programs use. Targets that no linear of the layers has are a config error.
  LoraModel(std::unique_ptr<Model> model, const OpSet& ops, const LoraOptions& options);

  std::vector<ParameterSpec> parameters() const override;
  void block(ProgramBuilder& b, std::int64_t layer) const override;

  const std::vector<LoraTarget>& targets() const { return targets_; }
  double factor() const { return factor_; }
  /// The targets by the shortest ends of names that no other linear has.
  std::vector<std::string> target_modules() const;
  /// Whether the tensors are (in, out) in files.
  bool targets_are_transposed() const;
  /// Adds factor * B A to elements first, first + 1, ... of a target's part, row-major; `a` and `b` are its parameters'
  /// values.
  void merge(const LoraTarget& target, std::span<const float> a, std::span<const float> b, std::int64_t first,
             std::span<float> values) const;

 private:
  Program adapted(const Program& program, const ProgramBuilder::Context& context) const;

  double factor_, dropout_;
  std::vector<LoraTarget> targets_;
  std::vector<std::string> other_modules_;  // linears without an adapter
};

/// PEFT's name of a tensor of an adapter, which begins with this.
inline constexpr const char* kPeftPrefix = "base_model.model.";
bool is_adapter(const ParameterSpec& spec);

}  // namespace quern
