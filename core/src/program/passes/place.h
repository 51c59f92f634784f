#pragma once
// Pass 6, place: gives every local value of a program an offset in the transient arena, by liveness. Programs run one
// after another, so they share that arena.

#include <cstdint>
#include <functional>
#include <vector>

#include "program/names.h"
#include "quern/op_spec.h"

namespace quern {

struct PlacedProgram {
  Program program = {};
  /// By value, as far as it goes: the tensor that it is; no kind: it follows from its role, and the layer that runs it.
  std::vector<TensorId> tensors = {};
  bool own = false;  ///< parameters' tensors among its values are TensorId::kOwn, without its saying so
  std::vector<std::int64_t> offsets = {};            ///< by value; -1 unless local and read
  std::vector<std::int64_t> workspace_offsets = {};  ///< by op; -1 when it needs none
  std::vector<std::int64_t> workspace_bytes = {};    ///< by op
  std::int64_t bytes = 0;                            ///< of the arena that this program uses

  /// Of a value that no parameter or layer decides.
  TensorId id_of(ValueId value) const {
    const auto index = static_cast<std::size_t>(value);
    return index < tensors.size() && !tensors[index].kind.empty() ? tensors[index] : TensorId{program[value].name};
  }
};

/// `workspace` gives the scratch bytes of an op. Values live from the op that makes them to the last that reads them;
/// an output takes over the memory of an input that dies there when the op allows it. Offsets are multiples of
/// `alignment`. Values in `elsewhere` (by id) get their memory from somebody else.
PlacedProgram place(const Program& program, const OpSet& ops, const Geometry& geometry, std::int64_t alignment,
                    const std::function<std::int64_t(const Op&)>& workspace, const std::vector<ValueId>& elsewhere);

}  // namespace quern
