#pragma once
// The host side of ops that quantize to 8 bits, alone or fused behind the op that makes their values: where the
// operands of the quantizing part are, what it refuses, and its launches. Operands of "<producer>_quantize..." are the
// producer's, then the quantizing part's.

#include <cuda_runtime_api.h>

#include <string>

#include "primitives/scale.cuh"
#include "runtime/check.h"
#include "runtime/kernels.h"
#include "runtime/operand_check.h"

namespace quern::cuda {

enum class ScaleSource : std::uint8_t {
  current,  ///< quantize: from the tensor's own amax
  delayed,  ///< quantize_delayed: from a state
  given,    ///< quantize_by
  amax,     ///< quantize_amax: from an amax that is given, by scale_first of quantize_ops.h
};

/// The suffixes of op kinds, which are kinds themselves.
inline constexpr struct {
  const char* kind;
  ScaleSource source;
  const char* pattern;  ///< of a fusion, given y
} kQuantizeKinds[] = {{"quantize_delayed", ScaleSource::delayed, "q, sc, t = quantize_delayed(y, st)"},
                      {"quantize_by", ScaleSource::given, "q, t = quantize_by(y, sc)"},
                      {"quantize", ScaleSource::current, "q, sc, t = quantize(y)"}};

/// The attribute "format", which the check refuses unless it is of 8 bits.
DType check_format(OperandCheck& check, const OpInstance& op);
/// Of an op that quantizes what it makes: its values are bf16.
void check_fused(OperandCheck& check, const OpInstance& op);
/// Of the ops with a scale for each row or column.
inline bool rounds_stochastically(const OpInstance& op) { return op.attributes.integer_or("stochastic", 0) != 0; }

class QuantizePlan {
 public:
  /// Of a tensor (rows, columns), where the producer has so many inputs and outputs.
  QuantizePlan(const OpInstance& op, ScaleSource source, std::size_t inputs, std::size_t outputs, Matrix size);

  std::size_t inputs() const { return state_ + (source_ == ScaleSource::current ? 0 : 1); }
  std::size_t outputs() const { return t_ + 1; }
  DType format() const { return format_; }
  /// Checks the quantizing part's operands; the producer's are checked by who knows them.
  void check(OperandCheck& check, const OpInstance& op) const;
  /// Of a launch; what the caller needs besides comes behind.
  static constexpr std::size_t kWorkspace = 256;

  std::uint8_t* q(std::span<const View> outputs) const { return outputs[q_].as<std::uint8_t>(); }
  std::uint8_t* t(std::span<const View> outputs) const { return outputs[t_].as<std::uint8_t>(); }
  bool has_t(const OpInstance& op) const { return op.outputs[t_].present; }
  bool has_q(const OpInstance& op) const { return op.outputs[q_].present; }

  /// Calls launch(arguments) for each launch that the op takes.
  template <class LaunchPass>
  void run(std::span<const View> inputs, std::span<const View> outputs, const Exec& exec, LaunchPass launch) const {
    QuantizeArguments args = start(inputs, outputs, exec);
    launch(args);
    if (args.pass == Pass::given) return;
    args.pass = Pass::again;
    launch(args);
  }

 private:
  QuantizeArguments start(std::span<const View> inputs, std::span<const View> outputs, const Exec& exec) const;

  ScaleSource source_;
  DType format_ = DType::e4m3;
  Matrix size_;
  std::size_t state_, q_, scale_, t_;  ///< operands; state_: of the state or the given scale
  std::int64_t margin_ = 0, history_ = 0;
};

}  // namespace quern::cuda
