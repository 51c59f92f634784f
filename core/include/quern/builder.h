#pragma once
// How a model writes its programs: one typed method per op of the vocabulary, shapes checked as it goes.
//
//   auto h = b.rms_norm(x, "attn_norm.weight", eps, "attn_norm");  // the last argument names the result
//   auto q = b.linear(h, "qkv.weight", "qkv", "qkv.bias");

#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "quern/op_spec.h"
#include "quern/parameter.h"
#include "quern/program.h"
#include "quern/rope.h"

namespace quern {

/// Head layout of a packed qkv value: (N, (heads + 2 kv_heads) * head_dim), queries first, then keys, then values.
struct HeadLayout {
  std::int64_t heads = 0;
  std::int64_t kv_heads = 0;
  std::int64_t head_dim = 0;
  std::int64_t packed() const { return (heads + 2 * kv_heads) * head_dim; }
};

enum class AttentionMask { causal, full };

struct AttentionOptions {
  AttentionMask mask = AttentionMask::causal;
  std::int64_t window = 0;  ///< causal: a query sees so many keys, its own the last; 0: all before it
  double cap = 0;           ///< scores s become cap tanh(s / cap); 0: no cap
  double scale = 1;         ///< of q k^T, before the cap
};

/// x Phi(x), Phi being the distribution function of the normal law: exact, or its approximation by tanh. In Hugging
/// Face `gelu` is erf; `gelu_new` and `gelu_pytorch_tanh` are tanh.
enum class Gelu { erf, tanh };

class ProgramBuilder {
 public:
  struct Context {
    const OpSet* ops = nullptr;
    std::span<const ParameterSpec> parameters;  ///< all of the model's; looked up by name
    DType activation_dtype = DType::f32;        ///< dtype of activations, and of working parameters
    bool documents = false;                     ///< attention stays within documents
  };
  ProgramBuilder(std::string program_name, const Context& context);
  const Context& context() const { return context_; }

  // ---- inputs ----
  /// The residual stream that enters a block or the head, (N, width).
  ValueId stream(std::int64_t width);
  /// An input of each micro-batch, which the data source gives under that name. Its first dimension is per token or
  /// per row. Integers are from 0 to `below` - 1, as far as that is known; the bound is needed to make random ones.
  /// All programs of a model declare it alike. `targets` may also be -1: what does not count.
  ValueId input(std::string name, Shape shape, DType dtype, std::int64_t below = 0);
  ValueId tokens();     ///< input "tokens", (N) i32
  ValueId targets();    ///< input "targets", (N) i32, -1 where the token does not count
  ValueId positions();  ///< input "positions", (N) i32, position in its document
  ValueId parameter(std::string_view name);
  /// A state of this program, f32, which `spec.advance` alone changes, once per optimizer step. `statistics` of the
  /// spec stay empty; `advance_by` names them.
  ValueId state(StateSpec spec);
  /// What the state advances by: f32 or f64, made by an op whose outputs are statistics (OpSpec::statistics). In
  /// training its sum over the micro-batches and ranks of a step is input 1 of the state's op.
  void advance_by(ValueId state, ValueId statistics);

  // ---- vocabulary; `weight` and `bias` are parameter names; `name` names the result ----
  ValueId embedding(ValueId tokens, std::string_view weight, std::string name = "embedded");
  /// x W^T + b, W (out, in) as in Hugging Face. (N, in) -> (N, out)
  ValueId linear(ValueId x, std::string_view weight, std::string name, std::string_view bias = {});
  ValueId rms_norm(ValueId x, std::string_view weight, double eps, std::string name);
  ValueId layer_norm(ValueId x, std::string_view weight, std::string_view bias, double eps, std::string name);
  /// RMS norm of the queries and keys of a packed qkv (QK-norm): of each head, with weights (head_dim); or of all heads
  /// together, with weights (heads * head_dim) and (kv_heads * head_dim).
  ValueId head_norm(ValueId qkv, const HeadLayout& heads, std::string_view query_weight, std::string_view key_weight,
                    double eps, std::string name);
  /// Rotates queries and keys of a packed qkv, half-split as in Hugging Face.
  ValueId rope(ValueId qkv, const HeadLayout& heads, const RopeFrequencies& frequencies, std::string name);
  /// softmax(q k^T scale) v over a packed qkv, grouped-query. -> (N, heads * head_dim)
  ValueId attention(ValueId qkv, const HeadLayout& heads, const AttentionOptions& options, std::string name);
  ValueId add(ValueId a, ValueId b, std::string name);
  /// factor * x
  ValueId scale(ValueId x, double factor, std::string name);
  /// silu(gate) * up of a packed (N, 2 F), gate first. -> (N, F)
  ValueId swiglu(ValueId gate_up, std::string name);
  /// gelu(gate) * up by tanh, likewise.
  ValueId geglu(ValueId gate_up, std::string name);
  ValueId gelu(ValueId x, Gelu form, std::string name);
  /// Cross-entropy of logits x W^T against the targets, in chunks of logits. -> (N) f32 per token. With a cap above 0
  /// logits l become cap tanh(l / cap). A model with tied embeddings gives the weight of its embedding.
  ValueId lm_loss(ValueId x, std::string_view weight, std::string name = "token_loss", double cap = 0);
  /// Cross-entropy of logits (rows, classes) against a label for each row, -1 where it does not count. -> (rows) f32.
  /// Of the target, `smoothing` is spread over all classes and the rest is on the label.
  ValueId class_loss(ValueId logits, ValueId labels, double smoothing, std::string name = "class_loss");
  /// x times factors of its shape, both f32, of which the factors get no gradient: losses with weights.
  ValueId weigh(ValueId x, ValueId factors, std::string name);
  /// Puts the parameter's K tokens first in each row. (N - K B, width) -> (N, width)
  ValueId prepend(ValueId x, std::string_view tokens, std::string name);
  /// The mean over `count` tokens of each row from token `first` on; count 0: over all from there on. (N, C) -> (B, C)
  ValueId row_mean(ValueId x, std::int64_t first, std::int64_t count, std::string name);
  /// Any op kind, custom ones included; outputs are named after `name`.
  std::vector<ValueId> op(std::string kind, std::vector<ValueId> inputs, const std::string& name,
                          Attributes attributes = {});

  /// Declares the program's output: the residual stream, or the head's loss, f32 of the shape of input `targets`.
  void output(ValueId value);
  /// A further term of the objective, in any program: f32 of the shape of `targets`. Where these count, its elements
  /// times `weight` are added to the sum of losses, which is divided by the number of targets that count.
  void add_loss(ValueId value, double weight);
  /// The finished program, checked.
  Program take();
  /// A whole program in place of the ops so far: for a model that changes another model's programs.
  void replace(Program program) { program_ = std::move(program); }

 private:
  Program program_;
  Context context_;
};

}  // namespace quern
