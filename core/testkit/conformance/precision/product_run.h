#pragma once
// One matmul under a precision backend, alone: a linear (y = x W^T + b and its gradients) or a language-model loss,
// differentiated, lowered and run op by op on the oracle. Errors that a whole model blurs show here.

#include <map>
#include <string>
#include <vector>

#include "conformance/subject.h"
#include "program/passes/lower_precision.h"
#include "quern/quantized_format.h"
#include "quern/testkit/compare.h"

namespace quern::conformance {

struct ProductSize {
  std::int64_t tokens, in, out;
  bool bias = true;  ///< linear only
};

/// Operands as floats: x (tokens, in), weight (out, in), bias (out), dy (tokens, out) or targets (tokens).
struct ProductInputs {
  std::vector<float> x, weight, bias, dy;
  std::vector<std::int32_t> targets;
};

/// "y", "dx", "dweight", "dbias"; of a loss "token_loss", "dx", "dweight".
using ProductResults = std::map<std::string, std::vector<float>>;

class ProductRun {
 public:
  enum class What { linear, loss };
  /// A training's program, or the one of an evaluation, which is lowered apart and gives y or token_loss only.
  enum class Pass { training, evaluation };
  /// The backend and `device`, which is host-addressable and open, outlive the run. Throws what the backend throws, and
  /// a config error when the device refuses an op.
  ProductRun(PluginHost& host, const PrecisionBackend& backend, Device& device, What what, const ProductSize& size,
             Pass pass = Pass::training);

  /// One micro-step; persistent states carry over to the next.
  ProductResults run(const ProductInputs& inputs);
  /// What the core does once per optimizer step.
  void advance_states();
  /// The root of the sum of squared unit roundoffs over all values that `result` is made from, each of the format that
  /// its op states: the relative error of a matmul of rounded operands, with room, for roundings are independent and
  /// half of a unit on average.
  double error_bound(const std::string& result) const;
  /// Values of the last run that were rounded to int8, with a scale for the tensor or for each row of `codes`.
  struct Quantization {
    std::string label;
    std::vector<double> exact, codes;  ///< numbers in units of the scale, before and after rounding
    double largest = 127;              ///< of the format that the op states
  };
  std::vector<Quantization> quantizations();
  /// Whether an op or a copy states a format of fewer than 8 bits.
  bool is_narrow() const { return narrow_; }
  bool evaluates() const { return pass_ == Pass::evaluation; }
  /// Formats of 8 bits or less in the program.
  std::string formats() const;

 private:
  testkit::PoisonedTensor& memory(ValueId id);
  void launch(const OpInstance& instance, const std::vector<ValueId>& inputs, const std::vector<ValueId>& outputs);
  void note_formats();
  void fill(std::string_view name, const std::vector<float>& values);

  Device& device_;
  What what_;
  Pass pass_;
  Geometry geometry_;
  OpSet ops_;
  LoweredProgram lowered_;
  std::vector<bool> read_;
  std::map<ValueId, testkit::PoisonedTensor> values_;
  std::map<std::string, ValueId> results_;
  std::map<ValueId, const QuantizedFormat*> stated_;  // formats of values whose op or copy states one
  bool narrow_ = false;
};

/// The exact results in double precision.
ProductResults exact_product(ProductRun::What what, const ProductSize& size, const ProductInputs& inputs);

}  // namespace quern::conformance
