#include "program/passes/place.h"

#include <algorithm>
#include <numeric>

namespace quern {

namespace {

// Memory wanted from op `begin` through op `end`, both included.
struct Block {
  std::int64_t bytes = 0;
  int begin = 0, end = 0;
  std::int64_t offset = -1;
};

class Placement {
 public:
  Placement(const Program& program, const OpSet& ops, const Geometry& geometry, std::int64_t alignment,
            const std::vector<ValueId>& elsewhere)
      : ops_(ops), geometry_(geometry), alignment_(alignment), read_(read_values(program)) {
    placed_.program = program;
    block_of_.assign(program.values.size(), -1);
    for (ValueId id : elsewhere) elsewhere_.push_back(id);
  }

  PlacedProgram run(const std::function<std::int64_t(const Op&)>& workspace) {
    make_value_blocks();
    std::vector<int> workspace_blocks;
    for (std::size_t i = 0; i < program().ops.size(); ++i) {
      std::int64_t bytes = workspace(program().ops[i]);
      placed_.workspace_bytes.push_back(bytes);
      workspace_blocks.push_back(bytes > 0 ? static_cast<int>(blocks_.size()) : -1);
      if (bytes > 0) blocks_.push_back({aligned(bytes), static_cast<int>(i), static_cast<int>(i), -1});
    }
    assign_offsets();
    for (int block : block_of_)
      placed_.offsets.push_back(block < 0 ? -1 : blocks_[static_cast<std::size_t>(block)].offset);
    for (int block : workspace_blocks)
      placed_.workspace_offsets.push_back(block < 0 ? -1 : blocks_[static_cast<std::size_t>(block)].offset);
    return std::move(placed_);
  }

 private:
  const Program& program() const { return placed_.program; }
  std::int64_t aligned(std::int64_t bytes) const { return rounded_up(bytes, alignment_); }
  std::int64_t bytes_of(ValueId id) const {
    return byte_count(extents_at(program()[id].shape, geometry_), program()[id].dtype);
  }
  bool placeable(ValueId id) const {
    return id != kNoValue && program()[id].role == Role::local && read_[static_cast<std::size_t>(id)] &&
           std::find(elsewhere_.begin(), elsewhere_.end(), id) == elsewhere_.end();
  }

  void make_value_blocks() {
    std::vector<int> last_read(program().values.size(), -1);
    for (std::size_t i = 0; i < program().ops.size(); ++i)
      for (ValueId id : program().ops[i].inputs)
        if (id != kNoValue) last_read[static_cast<std::size_t>(id)] = static_cast<int>(i);
    for (std::size_t i = 0; i < program().ops.size(); ++i) {
      const Op& op = program().ops[i];
      const OpSpec& spec = ops_.at(op.kind);
      for (std::size_t o = 0; o < op.outputs.size(); ++o) {
        ValueId id = op.outputs[o];
        if (!placeable(id) || block_of_[static_cast<std::size_t>(id)] >= 0) continue;  // or updated in place
        int end = std::max(static_cast<int>(i), last_read[static_cast<std::size_t>(id)]);
        int taken_over = take_over(op, spec, static_cast<int>(o), static_cast<int>(i), end);
        if (taken_over < 0) {
          taken_over = static_cast<int>(blocks_.size());
          blocks_.push_back({aligned(bytes_of(id)), static_cast<int>(i), end, -1});
        }
        block_of_[static_cast<std::size_t>(id)] = taken_over;
      }
    }
  }

  // The block of an input that dies at this op and that output `o` may overwrite, extended to `end`; or -1.
  int take_over(const Op& op, const OpSpec& spec, int o, int index, int end) {
    for (auto [output, input] : spec.may_overwrite) {
      if (output != o || static_cast<std::size_t>(input) >= op.inputs.size()) continue;
      ValueId source = op.inputs[static_cast<std::size_t>(input)];
      if (source == kNoValue || block_of_[static_cast<std::size_t>(source)] < 0) continue;
      int block = block_of_[static_cast<std::size_t>(source)];
      Block& memory = blocks_[static_cast<std::size_t>(block)];
      bool once = std::count(op.inputs.begin(), op.inputs.end(), source) == 1;
      if (memory.end != index || !once || bytes_of(source) != bytes_of(op.outputs[static_cast<std::size_t>(o)]))
        continue;
      memory.end = std::max(end, index + (end > index ? 0 : 1));  // taken: no second output of this op gets it
      return block;
    }
    return -1;
  }

  // Largest first, each at the lowest offset that is free during its life.
  void assign_offsets() {
    std::vector<std::size_t> order(blocks_.size());
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(),
                     [&](std::size_t a, std::size_t b) { return blocks_[a].bytes > blocks_[b].bytes; });
    std::vector<std::size_t> set;
    for (std::size_t index : order) {
      Block& block = blocks_[index];
      std::vector<const Block*> busy;
      for (std::size_t other : set)
        if (blocks_[other].begin <= block.end && block.begin <= blocks_[other].end) busy.push_back(&blocks_[other]);
      std::sort(busy.begin(), busy.end(), [](const Block* a, const Block* b) { return a->offset < b->offset; });
      std::int64_t offset = 0;
      for (const Block* other : busy) {
        if (checked_sum(offset, block.bytes) <= other->offset) break;
        offset = std::max(offset, other->offset + other->bytes);
      }
      block.offset = offset;
      placed_.bytes = std::max(placed_.bytes, checked_sum(offset, block.bytes));
      set.push_back(index);
    }
  }

  const OpSet& ops_;
  Geometry geometry_;
  std::int64_t alignment_;
  std::vector<bool> read_;
  std::vector<ValueId> elsewhere_;
  std::vector<Block> blocks_;
  std::vector<int> block_of_;
  PlacedProgram placed_;
};

}  // namespace

PlacedProgram place(const Program& program, const OpSet& ops, const Geometry& geometry, std::int64_t alignment,
                    const std::function<std::int64_t(const Op&)>& workspace, const std::vector<ValueId>& elsewhere) {
  return Placement(program, ops, geometry, alignment, elsewhere).run(workspace);
}

}  // namespace quern
