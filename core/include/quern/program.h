#pragma once
// A Program is a straight list of ops over named SSA values, without branches: models write it, passes rewrite it, and
// the engine runs it. docs/architecture.md follows one block through every pass.

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "quern/attributes.h"
#include "quern/shape.h"

namespace quern {

using ValueId = std::int32_t;
inline constexpr ValueId kNoValue = -1;  ///< an absent optional operand

/// Storage and producer of a value.
enum class Role : std::uint8_t {
  runtime,         ///< input of the micro-batch or step: tokens, targets, what else a model declares, step
  boundary,        ///< comes from the neighbouring program: the residual stream, or its gradient
  parameter,       ///< a parameter's working operand in the value's dtype, per layer
  parameter_grad,  ///< gradient of a parameter: its producers write it or add to it, over micro-steps
  state,           ///< persistent and written in place: optimizer moments, amax histories, loss statistics
  observation,     ///< statistics of a tensor (ScaleObservation), accumulated over an observed step's micro-steps
  saved,           ///< written by the forward program and kept, per layer, for the backward program
  local,           ///< used only inside one program
};

struct Value {
  std::string name = {};  ///< unique in the program; a recomputed value keeps its name
  Shape shape = {};
  DType dtype = DType::f32;
  Role role = Role::local;
  std::string parameter = {};  ///< parameter and parameter_grad: the parameter's name
  std::int64_t below = 0;      ///< runtime integers: a bound that each is below; 0: none is known
};

enum class Phase : std::uint8_t { forward, recompute, backward };

struct Op {
  std::string kind = {};
  std::vector<ValueId> inputs = {};   ///< kNoValue for an absent optional operand
  std::vector<ValueId> outputs = {};  ///< kNoValue for an output that no op reads
  Attributes attributes = {};
  Phase phase = Phase::forward;
  bool operator==(const Op&) const = default;
};

/// Persistent state of a program, separate for each layer: zero at first, kept in checkpoints, the same on all ranks.
struct StateSpec {
  std::string name = {};  ///< of the value; unique in a layer
  DType dtype = DType::f32;
  Extents extents = {};
  std::string advance = {};     ///< op kind that runs on it in place once per optimizer step; empty: none
  Attributes attributes = {};   ///< of that op
  std::string statistics = {};  ///< value that the op reads as input 1: its sums over the step; empty: none
  bool written = false;         ///< ops that read it may write it too, as ops of delayed scales do
};

/// Plain data; passes copy and rebuild it. `check_program` states the invariants.
struct Program {
  std::string name;
  std::vector<Value> values;
  std::vector<Op> ops;
  std::vector<ValueId> inputs;   ///< boundary values from the previous program, in order
  std::vector<ValueId> outputs;  ///< values for the next program
  std::vector<StateSpec> states = {};

  /// Declares a state, once, and returns its value. States outside the layers have the program's name before theirs.
  ValueId add_state(StateSpec spec);
  /// The state of that name, or null.
  const StateSpec* state(std::string_view name) const;
  ValueId add_value(Value value);
  /// The value of that name, or kNoValue.
  ValueId find(std::string_view name) const;
  const Value& operator[](ValueId id) const { return values[static_cast<std::size_t>(id)]; }
  Value& operator[](ValueId id) { return values[static_cast<std::size_t>(id)]; }

  /// Index of the op that writes `id`, or -1.
  int producer(ValueId id) const;
  /// Indices of the ops that read `id`, ascending.
  std::vector<int> consumers(ValueId id) const;
};

/// Ids in range, names unique, every value written once and before it is read. Throws an internal error naming the op.
void check_program(const Program& program);

/// One op a line: `%h, %h.rstd = rms_norm(%x, attn_norm.weight) {eps = 1e-06}   # (N, 896) bf16`.
std::string to_string(const Program& program);

}  // namespace quern
