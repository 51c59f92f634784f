#include "quantization/fused_quantize.h"

#include <algorithm>
#include <array>
#include <vector>

#include "runtime/support.h"

namespace quern::cpu {

namespace {

struct Producer {
  const char* kind;
  const char* pattern;  ///< up to the quantization
  const char* result;   ///< the quantized result
  std::size_t inputs, outputs, result_output;
};
constexpr std::array<Producer, 6> kProducers = {{
    {"add_rms_norm", "s = add(a, b); y, r = rms_norm(s, w)", "y", 3, 3, 1},
    {"rms_norm_grad_add", "d, dw = rms_norm_grad(dy, x, w, r); g = add(d, e)", "g", 5, 3, 2},
    {"rms_norm", "y, r = rms_norm(x, w)", "y", 2, 2, 0},
    {"swiglu", "y = swiglu(gu)", "y", 1, 1, 0},
    {"swiglu_grad", "d = swiglu_grad(dy, gu)", "d", 2, 1, 0},
    {"rope_grad", "d = rope_grad(dy, p)", "d", 2, 1, 0},
}};

struct Quantization {
  const char *kind, *results, *more;  ///< `more`: operands beside the matrix
};
constexpr std::array<Quantization, 3> kQuantizations = {{
    {"quantize_delayed", "q, sc, t", ", st"},
    {"quantize", "q, sc, t", ""},
    {"quantize_by", "q, t", ", sc"},
}};

std::string name_of(const Producer& producer, const Quantization& quantization) {
  return std::string(producer.kind) + "_" + quantization.kind;
}

struct Parts {
  OpInstance producer, quantization;
  std::size_t inputs = 0, outputs = 0, result = 0;  ///< of the producer
  std::size_t result_bytes = 0;                     ///< scratch for a result that nobody else reads
};

Parts split(const OpInstance& op, const Producer& producer, const Quantization& quantization) {
  Parts parts;
  parts.inputs = producer.inputs, parts.outputs = producer.outputs, parts.result = producer.result_output;
  auto at = [](auto& list, std::size_t i) { return list.begin() + static_cast<std::ptrdiff_t>(i); };
  parts.producer = op;
  parts.producer.kind = producer.kind;
  parts.producer.inputs.assign(op.inputs.begin(), at(op.inputs, producer.inputs));
  parts.producer.outputs.assign(op.outputs.begin(), at(op.outputs, producer.outputs));
  Operand& result = parts.producer.outputs[producer.result_output];
  if (!result.present) {
    result.present = true;
    parts.result_bytes = float_bytes((result.bytes() + 3) / 4);
  }
  parts.quantization = op;
  parts.quantization.kind = quantization.kind;
  parts.quantization.inputs = {result};
  parts.quantization.inputs.insert(parts.quantization.inputs.end(), at(op.inputs, producer.inputs), op.inputs.end());
  parts.quantization.outputs.assign(at(op.outputs, producer.outputs), op.outputs.end());
  return parts;
}

CpuOp fused(const Producer& producer, const Quantization& quantization, const CpuOp& first, const CpuOp& second) {
  CpuOp op;
  op.query = [=](const OpInstance& instance) -> OpSupport {
    if (instance.inputs.size() < producer.inputs || instance.outputs.size() < producer.outputs)
      return {instance.kind + ": too few operands", 0};
    Parts parts = split(instance, producer, quantization);
    OpSupport one = first.query ? first.query(parts.producer) : OpSupport{};
    if (!one.refusal.empty()) return one;
    OpSupport two = second.query ? second.query(parts.quantization) : OpSupport{};
    if (!two.refusal.empty()) return two;
    return {{}, parts.result_bytes + std::max(one.workspace_bytes, two.workspace_bytes)};
  };
  op.prepare = [=](const OpInstance& instance) -> Launch {
    Parts parts = split(instance, producer, quantization);
    Launch produce = first.prepare(parts.producer), quantize = second.prepare(parts.quantization);
    const Operand& made = parts.producer.outputs[parts.result];
    return [=, dtype = made.dtype, extents = made.extents](std::span<const View> in, std::span<const View> out,
                                                           const Exec& exec) {
      std::vector<View> produced(out.begin(), out.begin() + static_cast<std::ptrdiff_t>(parts.outputs));
      View& result = produced[parts.result];
      if (!result) result = {exec.workspace, dtype, extents};
      Exec rest{exec.stream, static_cast<char*>(exec.workspace) + parts.result_bytes};
      produce(in.first(parts.inputs), produced, rest);
      std::vector<View> quantized = {result};
      quantized.insert(quantized.end(), in.begin() + static_cast<std::ptrdiff_t>(parts.inputs), in.end());
      quantize(quantized, out.subspan(parts.outputs), rest);
    };
  };
  return op;
}

}  // namespace

std::span<const Fusion> quantize_fusions() {
  static const std::vector<Fusion> kFusions = [] {
    std::vector<Fusion> fusions;
    for (const Producer& producer : kProducers)
      for (const Quantization& quantization : kQuantizations)
        fusions.push_back({name_of(producer, quantization), std::string(producer.pattern) + "; " +
                                                                quantization.results + " = " + quantization.kind + "(" +
                                                                producer.result + quantization.more + ")"});
    return fusions;
  }();
  return kFusions;
}

void add_fused_quantize_ops(OpTable& table) {
  for (const Producer& producer : kProducers)
    for (const Quantization& quantization : kQuantizations)
      table[name_of(producer, quantization)] =
          fused(producer, quantization, table.at(producer.kind), table.at(quantization.kind));
}

}  // namespace quern::cpu
