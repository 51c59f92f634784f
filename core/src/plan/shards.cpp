#include "plan/shards.h"

#include <algorithm>
#include <numeric>

#include "program/names.h"
#include "quern/error.h"

namespace quern {

namespace {

constexpr const char* kTranspose = "transpose";

bool is_transposed(const OpSpec& spec, std::size_t output) {
  return std::any_of(spec.transposed.begin(), spec.transposed.end(),
                     [&](const auto& pair) { return pair.first == static_cast<int>(output); });
}

/// The op as a rank runs it on its rows, with the whole's shapes, without transposed outputs.
struct OwnOp {
  std::string kind;
  std::int64_t row_groups = 0;
};

OwnOp own_op(const Program& program, const Op& op, const OpSet& ops) {
  const OpSpec& spec = ops.at(op.kind);
  std::vector<bool> read(program.values.size(), false);
  for (std::size_t o = 0; o < op.outputs.size(); ++o) {
    if (op.outputs[o] == kNoValue) continue;
    read[static_cast<std::size_t>(op.outputs[o])] = !is_transposed(spec, o);
  }
  OpInstance instance = instantiate(program, op, {}, read);
  if (spec.row_groups)
    if (const std::int64_t groups = spec.row_groups(instance); groups > 0) return {op.kind, groups};
  if (spec.of_amax.empty()) return {};
  instance.kind = spec.of_amax;
  const OpSpec& given = ops.at(spec.of_amax);
  return {spec.of_amax, given.row_groups ? given.row_groups(instance) : 0};
}

class Splitter {
 public:
  Splitter(const Program& whole, const OpSet& ops, const RowBounds& bounds, int rank)
      : whole_(whole), ops_(ops), bounds_(bounds), rank_(rank) {
    split_.own.name = whole.name;
    split_.rest.name = "refresh.gathered";
  }

  SplitRefresh run() {
    for (const Op& op : whole_.ops) split(op);
    return std::move(split_);
  }

 private:
  void split(const Op& op) {
    const OpSpec& spec = ops_.at(op.kind);
    Op own{.kind = own_op(whole_, op, ops_).kind, .inputs = {}, .outputs = {}, .attributes = op.attributes};
    own.inputs.push_back(own_master(op));
    if (own.kind != op.kind) own.inputs.push_back(amax(op));
    for (std::size_t o = 0; o < op.outputs.size(); ++o) {
      bool wanted = op.outputs[o] != kNoValue && !is_transposed(spec, o);
      for (const auto& [to, from] : spec.transposed)
        wanted = wanted || (from == static_cast<int>(o) && op.outputs[static_cast<std::size_t>(to)] != kNoValue);
      own.outputs.push_back(wanted ? add_own(op, o) : kNoValue);
    }
    split_.own.ops.push_back(std::move(own));
    for (const auto& [to, from] : spec.transposed)
      if (const ValueId id = op.outputs[static_cast<std::size_t>(to)]; id != kNoValue)
        transpose(whole_value(op, static_cast<std::size_t>(from)), whole_[id]);
  }

  // A value that the program makes, or would make if somebody read it.
  Value whole_value(const Op& op, std::size_t output) const {
    if (op.outputs[output] != kNoValue) return whole_[op.outputs[output]];
    fail_internal("shards", "a transposed copy without its original");
  }

  ValueId add_own(const Op& op, std::size_t output) {
    const Value value = whole_value(op, output);
    split_.made.push_back(value);
    if (element_count(fixed_extents(value.shape)) == 1) return split_.own.add_value(value);
    split_.gathered.push_back(value);
    return split_.own.add_value(in_shard(value));
  }

  /// The same for this rank's rows. What has fewer rows than the parameter has them for groups of its rows.
  Value in_shard(Value value) const {
    value.shape[0] = Dim(shard_of_rows(fixed_extents(value.shape), bounds_, rank_).extents[0]);
    return value;
  }

  ValueId own_master(const Op& op) {
    const Value& master = whole_[op.inputs[0]];
    const ValueId known = split_.own.find(master.name);
    return known != kNoValue ? known : split_.own.add_value(in_shard(master));
  }

  ValueId amax(const Op& op) {
    split_.amax_format = op.attributes.word("format");
    if (const ValueId known = split_.own.find(names::kAmax); known != kNoValue) return known;
    return split_.own.add_value({.name = names::kAmax,
                                 .shape = {1},
                                 .dtype = DType::f32,
                                 .role = Role::state,
                                 .parameter = whole_[op.inputs[0]].parameter});
  }

  void transpose(const Value& from, const Value& to) {
    const ValueId known = split_.rest.find(from.name);
    Op op{.kind = kTranspose,
          .inputs = {known != kNoValue ? known : split_.rest.add_value(from)},
          .outputs = {},
          .attributes = {}};
    op.outputs.push_back(split_.rest.add_value(to));
    split_.rest.ops.push_back(std::move(op));
    split_.made.push_back(to);
  }

  const Program& whole_;
  const OpSet& ops_;
  const RowBounds& bounds_;
  const int rank_;
  SplitRefresh split_;
};

}  // namespace

RowBounds split_rows(std::int64_t rows, std::int64_t unit, int ranks) {
  const std::int64_t units = rows / unit;  // the rest belongs to the last
  if (units < ranks) return {};
  RowBounds bounds;
  for (std::int64_t rank = 0; rank < ranks; ++rank) bounds.push_back(units * rank / ranks * unit);
  bounds.push_back(rows);
  return bounds;
}

std::int64_t aligned_rows(const ParameterSpec& spec, std::span<const OptimizerState> states, std::int64_t alignment) {
  std::int64_t rows = alignment / std::gcd(alignment, spec.columns());
  for (const OptimizerState& state : states)
    if (state.extents != spec.extents && !state.extents.empty())
      rows = std::lcm(rows, alignment / std::gcd(alignment, byte_count(state.extents, state.dtype) / state.extents[0]));
  return rows;
}

Cuts cuts_of(const StatePlacement& state, const ParameterSpec& spec, std::int64_t row_groups) {
  Cuts cuts;
  if (spec.extents.size() < 2 || row_groups == 0) return cuts;
  if (state.in_tree > 0) cuts.pieces = split_rows(spec.extents[0], row_groups, kPieces);
  if (!state.shards()) return cuts;
  if (state.in_tree == 0) cuts.shards = split_rows(spec.extents[0], row_groups, state.ranks);
  const auto stride = static_cast<std::size_t>(kPieces / state.ranks);
  for (std::size_t piece = 0; piece < cuts.pieces.size(); piece += stride) cuts.shards.push_back(cuts.pieces[piece]);
  return cuts;
}

Shard shard_of_rows(const Extents& whole, const RowBounds& bounds, int rank) {
  auto row = [&](std::int64_t bound) { return whole[0] * bound / bounds.back(); };
  const std::int64_t first = row(bounds[static_cast<std::size_t>(rank)]);
  Shard shard{whole, first * (element_count(whole) / whole[0])};
  shard.extents[0] = row(bounds[static_cast<std::size_t>(rank) + 1]) - first;
  return shard;
}

std::vector<std::int64_t> slabs_of(const Extents& whole, const RowBounds& bounds, int ranks) {
  const std::int64_t count = element_count(whole);
  std::vector<std::int64_t> slabs;
  for (int rank = 0; rank < ranks; ++rank)
    slabs.push_back(bounds.empty() ? count * (rank + 1) / ranks - count * rank / ranks
                                   : element_count(shard_of_rows(whole, bounds, rank).extents));
  return slabs;
}

std::int64_t row_groups_of(const Program& refresh, const OpSet& ops) {
  std::int64_t groups = 1;
  for (const Op& op : refresh.ops) {
    const std::int64_t own = own_op(refresh, op, ops).row_groups;
    if (own == 0) return 0;
    groups = std::lcm(groups, own);
  }
  return groups;
}

SplitRefresh split_refresh(const Program& refresh, const OpSet& ops, const RowBounds& bounds, int rank) {
  return Splitter(refresh, ops, bounds, rank).run();
}

}  // namespace quern
