#pragma once
// A precision backend chooses formats and lowers every linear's three matmuls to explicit quantize, transpose and
// matmul ops. It sees one joint program (forward and backward ops), so a weight gradient can request a transposed or
// quantized operand in the forward phase, and only that is saved.

#include <string>
#include <string_view>
#include <vector>

#include "quern/op_spec.h"
#include "quern/program.h"

namespace quern {

/// Default dtypes of a recipe.
struct PrecisionTraits {
  DType activation = DType::f32;  ///< values between ops, and their gradients
  DType working = DType::f32;     ///< parameters as ops read them
  DType matmul = DType::f32;      ///< operand format that bounds speed; for time estimates
};

/// One matmul to lower. Absent operands are kNoValue.
struct ProductSite {
  Product product = Product::output;
  std::string_view parameter;  ///< the weight's name
  ValueId x = kNoValue;        ///< (N, in): output, weight_gradient, loss
  ValueId weight = kNoValue;   ///< (out, in) working operand: output, input_gradient, loss
  ValueId bias = kNoValue;     ///< (out): output
  ValueId dy = kNoValue;       ///< (N, out): input_gradient, weight_gradient
  ValueId result = kNoValue;   ///< the value to produce: y, dx, dW or the loss of each token
  const Op* op = nullptr;      ///< loss: the original op, to be replaced by one with more inputs and attributes
};

/// How a backend emits ops. Equal requests return the same value, so two consumers share one quantization.
class Lowering {
 public:
  virtual ~Lowering() = default;
  virtual const Program& program() const = 0;
  /// Whether gradients follow; false for evaluation, which must not change persistent state.
  virtual bool training() const = 0;
  /// Emits an op as early as its inputs allow, so that an operand of the forward phase is quantized there; an op that
  /// reads only parameters comes just before the matmul being lowered. Returns its outputs, named after `name`.
  virtual std::vector<ValueId> emit(std::string kind, std::vector<ValueId> inputs, Attributes attributes,
                                    std::string name) = 0;
  /// Emits the op that computes the site's result.
  virtual void produce(std::string kind, std::vector<ValueId> inputs, Attributes attributes) = 0;
  /// The state of that name as an operand, which ops may write; for training only.
  virtual ValueId state(StateSpec spec) = 0;
  /// A working copy of a parameter in another format, computed from the master weights once per optimizer step by the
  /// op `kind` (for example quantize_rows); returns the op's outputs as parameter operands.
  virtual std::vector<ValueId> working_copy(std::string_view parameter, std::string kind, Attributes attributes) = 0;
};

/// Lowers a site to one matmul without quantization, and keeps a loss unchanged. For backends without quantization, and
/// for sites that others do not quantize.
void lower_to_matmul(const ProductSite& site, Lowering& lowering);

class PrecisionBackend {
 public:
  virtual ~PrecisionBackend() = default;
  // ---- capabilities ----
  virtual const PrecisionTraits& traits() const = 0;
  // ---- set-up ----
  virtual void lower(const ProductSite& site, Lowering& lowering) const = 0;
};

}  // namespace quern
