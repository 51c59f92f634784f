#pragma once
// A precision backend chooses formats and lowers every linear's three products to explicit quantize, transpose and
// matmul ops. It sees one joint program (forward and backward ops), so that a weight gradient can ask the forward
// phase for a transposed or quantized operand and have just that saved.

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

/// One product to lower. Absent operands are kNoValue.
struct ProductSite {
  Product product = Product::output;
  std::string_view parameter;  ///< the weight's name
  ValueId x = kNoValue;        ///< (N, in): output, weight_gradient, loss
  ValueId weight = kNoValue;   ///< (out, in) working operand: output, input_gradient, loss
  ValueId bias = kNoValue;     ///< (out): output
  ValueId dy = kNoValue;       ///< (N, out): input_gradient, weight_gradient
  ValueId result = kNoValue;   ///< the value to produce: y, dx, dW or the loss of each token
  const Op* op = nullptr;      ///< loss: the op as it is, to be produced again with more inputs and attributes
};

/// Persistent state of one quantized tensor, of which every layer has its own: zero at first, checkpointed.
struct StateRequest {
  std::string name;  ///< unique in a layer
  DType dtype = DType::f32;
  Extents extents;
  std::string advance;    ///< op kind that runs on it in place once per optimizer step; empty: none
  Attributes attributes;  ///< of that op
};

/// How a backend emits ops. Equal requests return the same value, so two consumers share one quantization.
class Lowering {
 public:
  virtual ~Lowering() = default;
  virtual const Program& program() const = 0;
  /// Whether gradients follow; false for evaluation, which must leave no trace in persistent state.
  virtual bool training() const = 0;
  /// Emits an op as early as its inputs allow, so that an operand made in the forward phase is quantized there; an op
  /// on parameters alone just before the product being lowered. Returns its outputs, named after `name`.
  virtual std::vector<ValueId> emit(std::string kind, std::vector<ValueId> inputs, Attributes attributes,
                                    std::string name) = 0;
  /// Emits the op that makes the site's result.
  virtual void produce(std::string kind, std::vector<ValueId> inputs, Attributes attributes) = 0;
  /// The state of that name as an operand; for training only.
  virtual ValueId state(StateRequest request) = 0;
  /// A working copy of a parameter in another format, made from the master weights once per optimizer step by the op
  /// `kind` (for example quantize_rows); returns the op's outputs as parameter operands.
  virtual std::vector<ValueId> working_copy(std::string_view parameter, std::string kind, Attributes attributes) = 0;
};

/// Lowers a product to one matmul on the operands as they are, and leaves a loss as it is: what a backend without
/// quantization does, and what others do at the sites they leave alone.
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
