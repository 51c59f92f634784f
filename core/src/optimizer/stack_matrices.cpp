#include "optimizer/stack_matrices.h"

#include <algorithm>
#include <map>
#include <set>
#include <utility>

namespace quern {

namespace {

constexpr const char *kBegin = "over_norm", *kSquares = "sum_squares", *kProduct = "stacked_matmul", *kIndex = "index";

/// Whether the op takes matrix `index` out of the stack that is input `input`. All others read the whole stack.
bool takes_one(const Op& op, std::size_t input) {
  return input == 3 && (op.kind == "muon_apply" || op.kind == "row_factors");
}

/// Ops of one matrix: its sum of squares, the stack of one, and matmuls of what comes before.
struct Chain {
  std::vector<std::size_t> ops = {};
  std::vector<ValueId> made = {};
  ValueId matrix = kNoValue;
  bool alone = false;  ///< an op that is not of the chain reads a whole value of it
};

class Stacker {
 public:
  Stacker(Program update, std::int64_t bytes) : from_(std::move(update)), bytes_(bytes) {
    find_chains();
    find_dependencies();
    make_stacks();
  }

  Program run() {
    if (chains_.empty()) return std::move(from_);
    for (std::size_t i = 0; i < from_.ops.size(); ++i) emit(i);
    from_.ops = std::move(ops_);
    return std::move(from_);
  }

 private:
  void find_chains() {
    chain_of_op_.assign(from_.ops.size(), -1);
    chain_of_value_.assign(from_.values.size(), -1);
    std::map<ValueId, std::size_t> squares;
    for (std::size_t i = 0; i < from_.ops.size(); ++i) {
      const Op& op = from_.ops[i];
      if (op.kind == kSquares && op.inputs.size() == 1) squares[op.outputs[0]] = i;
      if (op.kind == kBegin && op.inputs.size() == 2) {
        const auto own = squares.find(op.inputs[0]);
        if (own == squares.end() || from_.ops[own->second].inputs[0] != op.inputs[1] || chain_of(op.inputs[0]) >= 0)
          continue;
        chains_.push_back({.matrix = op.inputs[1]});
        add(chains_.size() - 1, own->second);
        add(chains_.size() - 1, i);
      } else if (op.kind == kProduct) {
        const int chain = chain_of(op.inputs[0]);
        if (chain >= 0 && std::all_of(op.inputs.begin(), op.inputs.end(),
                                      [&](ValueId id) { return id == kNoValue || chain_of(id) == chain; }))
          add(static_cast<std::size_t>(chain), i);
      }
    }
    for (std::size_t i = 0; i < from_.ops.size(); ++i)
      for (std::size_t input = 0; input < from_.ops[i].inputs.size(); ++input) {
        const ValueId id = from_.ops[i].inputs[input];
        const int chain = id == kNoValue ? -1 : chain_of(id);
        if (chain >= 0 && chain != chain_of_op_[i] && !takes_one(from_.ops[i], input))
          chains_[static_cast<std::size_t>(chain)].alone = true;
      }
  }

  int chain_of(ValueId value) const { return chain_of_value_[static_cast<std::size_t>(value)]; }

  void add(std::size_t chain, std::size_t op) {
    chains_[chain].ops.push_back(op);
    chains_[chain].made.push_back(from_.ops[op].outputs[0]);
    chain_of_op_[op] = static_cast<int>(chain);
    chain_of_value_[static_cast<std::size_t>(from_.ops[op].outputs[0])] = static_cast<int>(chain);
  }

  /// An op comes after those that write what it reads or writes, and after those that read what it writes.
  void find_dependencies() {
    before_.resize(from_.ops.size());
    std::map<ValueId, std::size_t> writer;
    std::map<ValueId, std::vector<std::size_t>> readers;
    for (std::size_t i = 0; i < from_.ops.size(); ++i) {
      const Op& op = from_.ops[i];
      for (const auto* list : {&op.inputs, &op.outputs})
        for (ValueId id : *list)
          if (auto known = writer.find(id); id != kNoValue && known != writer.end() && known->second != i)
            before_[i].push_back(known->second);
      for (ValueId id : op.outputs)
        for (std::size_t reader : readers[id]) before_[i].push_back(reader);
      for (ValueId id : op.outputs) writer[id] = i, readers[id].clear();
      for (ValueId id : op.inputs)
        if (writer[id] != i) readers[id].push_back(i);
    }
  }

  /// Chains of equal ops and shapes, in even stacks. One that comes after another cannot be in a stack with it.
  void make_stacks() {
    std::vector<std::vector<std::size_t>> groups;
    std::vector<bool> late(from_.ops.size(), false);
    for (std::size_t i = 0; i < from_.ops.size(); ++i)
      for (std::size_t op : before_[i])
        if (late[op] || (chain_of_op_[op] >= 0 && chain_of_op_[op] != chain_of_op_[i])) late[i] = true;
    for (std::size_t chain = 0; chain < chains_.size(); ++chain) {
      Chain& own = chains_[chain];
      own.alone = own.alone || std::any_of(own.ops.begin(), own.ops.end(), [&](std::size_t op) { return late[op]; });
      auto group = std::find_if(groups.begin(), groups.end(), [&](const auto& known) {
        return !own.alone && !chains_[known.front()].alone && equal(known.front(), chain);
      });
      if (group == groups.end())
        groups.push_back({chain});
      else
        group->push_back(chain);
    }
    stack_of_.assign(chains_.size(), 0);
    for (const auto& group : groups) {
      std::int64_t largest = 1;
      for (ValueId id : chains_[group.front()].made) largest = std::max(largest, bytes_of(id));
      const auto most = static_cast<std::size_t>(std::max<std::int64_t>(bytes_ / largest, 1));
      const std::size_t count = (group.size() + most - 1) / most;
      for (std::size_t stack = 0; stack < count; ++stack) {
        const std::size_t begin = group.size() * stack / count, end = group.size() * (stack + 1) / count;
        for (std::size_t i = begin; i < end; ++i) stack_of_[group[i]] = stacks_.size();
        stacks_.emplace_back(group.begin() + static_cast<std::ptrdiff_t>(begin),
                             group.begin() + static_cast<std::ptrdiff_t>(end));
      }
    }
    emitted_.assign(from_.ops.size(), false);
  }

  std::int64_t bytes_of(ValueId id) const { return byte_count(fixed_extents(from_[id].shape), from_[id].dtype); }

  /// Whether ops, attributes, dtypes and shapes are the same, of each other's matrices.
  bool equal(std::size_t first, std::size_t second) const {
    const Chain &a = chains_[first], &b = chains_[second];
    auto alike = [&](ValueId x, ValueId y) {
      if (x == kNoValue || y == kNoValue) return x == y;
      const auto in_a = std::find(a.made.begin(), a.made.end(), x), in_b = std::find(b.made.begin(), b.made.end(), y);
      return in_a - a.made.begin() == in_b - b.made.begin() && from_[x].dtype == from_[y].dtype &&
             from_[x].shape == from_[y].shape;
    };
    return std::equal(a.ops.begin(), a.ops.end(), b.ops.begin(), b.ops.end(), [&](std::size_t i, std::size_t j) {
      const Op &x = from_.ops[i], &y = from_.ops[j];
      return x.kind == y.kind && x.attributes == y.attributes &&
             std::equal(x.inputs.begin(), x.inputs.end(), y.inputs.begin(), y.inputs.end(), alike);
    });
  }

  void emit(std::size_t i) {
    if (emitted_[i]) return;
    emitted_[i] = true;
    if (const int chain = chain_of_op_[i]; chain >= 0)
      return emit_stack(stacks_[stack_of_[static_cast<std::size_t>(chain)]]);
    for (std::size_t op : before_[i]) emit(op);
    Op op = from_.ops[i];
    for (std::size_t input = 0; input < op.inputs.size(); ++input) {
      ValueId& id = op.inputs[input];
      if (id == kNoValue || chain_of(id) < 0 || !takes_one(op, input)) continue;
      const auto chain = static_cast<std::size_t>(chain_of(id));
      const std::vector<std::size_t>& stack = stacks_[stack_of_[chain]];
      op.attributes.set(kIndex,
                        static_cast<std::int64_t>(std::find(stack.begin(), stack.end(), chain) - stack.begin()));
      const std::vector<ValueId>& made = chains_[chain].made;
      id =
          chains_[stack.front()].made[static_cast<std::size_t>(std::find(made.begin(), made.end(), id) - made.begin())];
    }
    ops_.push_back(std::move(op));
  }

  /// Its first chain's ops, with the values of all.
  void emit_stack(const std::vector<std::size_t>& stack) {
    for (std::size_t chain : stack)
      for (std::size_t i : chains_[chain].ops) {
        emitted_[i] = true;
        for (std::size_t op : before_[i])
          if (chain_of_op_[op] != static_cast<int>(chain)) emit(op);
      }
    for (std::size_t i : chains_[stack.front()].ops) {
      Op op = from_.ops[i];
      from_[op.outputs[0]].shape[0] = Dim(static_cast<std::int64_t>(stack.size()));
      if (op.kind == kSquares || op.kind == kBegin) {
        op.inputs.pop_back();
        for (std::size_t chain : stack) op.inputs.push_back(chains_[chain].matrix);
      }
      ops_.push_back(std::move(op));
    }
  }

  Program from_;
  const std::int64_t bytes_;
  std::vector<Chain> chains_;
  std::vector<int> chain_of_op_, chain_of_value_;  // -1: none
  std::vector<std::vector<std::size_t>> before_;   // by op
  std::vector<std::vector<std::size_t>> stacks_;   // chains
  std::vector<std::size_t> stack_of_;              // by chain
  std::vector<bool> emitted_;
  std::vector<Op> ops_;
};

}  // namespace

Program stack_matrices(Program update, std::int64_t bytes) { return Stacker(std::move(update), bytes).run(); }

}  // namespace quern
