#include "plan/programs/update_windows.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "plan/programs/state_programs.h"
#include "program/names.h"
#include "quern/checked.h"
#include "quern/error.h"

namespace quern {

namespace {

/// Terabytes of state. Planning takes time and memory for each window.
constexpr std::size_t kMostWindows = std::size_t{1} << 15;

class Splitter {
 public:
  Splitter(const Plan& plan, const std::vector<std::vector<Program>>& refreshes)
      : plan_(plan), refreshes_(refreshes), limit_(plan.options.update_window_bytes) {}

  std::vector<UpdateWindow> run() {
    for_each_group(plan_.model.layers, [&](ParameterGroup group, int layer) { add_group(group, layer); });
    return std::move(windows_);
  }

 private:
  void add_group(ParameterGroup group, int layer) {
    bytes_ = limit_;  // begins a window
    for (std::size_t i = 0; i < plan_.parameters.size(); ++i) {
      if (const ParameterSpec& spec = plan_.parameters[i].spec; spec.group != group || !spec.trainable) continue;
      const UpdatePart whole{.parameter = i, .layer = layer};
      if (const RowBounds bounds = slices_of(whole); bounds.empty())
        add(whole, group);
      else
        add_slices(whole, bounds, group);
    }
  }

  void add(const UpdatePart& part, ParameterGroup group) {
    const std::int64_t bytes = bytes_of(part);
    if (bytes_ + bytes > limit_) add_window(group, part.layer), bytes_ = 0;
    bytes_ += bytes;
    windows_.back().parts.push_back(part);
    if (has_amax(part)) windows_.back().agrees.push_back(part.parameter);
  }

  UpdateWindow& add_window(ParameterGroup group, int layer, const RowSlice& rows = {}) {
    bytes_ = limit_;  // nothing joins a slice
    return windows_.emplace_back(UpdateWindow{.group = group, .layer = layer, .rows = rows});
  }

  static void follow(UpdateWindow& window, Program program, std::vector<TensorId> tensors = {}) {
    window.follow.push_back({.program = std::move(program), .tensors = std::move(tensors), .own = true});
  }

  const ParameterPlan& parameter_of(const UpdatePart& part) const { return plan_.parameters[part.parameter]; }
  /// Whether its working copies have a scale that ranks have to agree on.
  bool has_amax(const UpdatePart& part) const {
    return !plan_.forms_of(parameter_of(part), part.layer).amax.program.ops.empty();
  }

  // Slice by slice: the update, and rows of the working copies; behind all of them first where these need the amax of
  // all rows. Then the values made of all their rows.
  void add_slices(const UpdatePart& whole, const RowBounds& bounds, ParameterGroup group) {
    const Program& refresh = refresh_of(whole);
    const bool sharded = !parameter_of(whole).bounds.empty();
    const std::int64_t rows = parameter_of(whole).spec.extents[0];
    if (windows_.size() + bounds.size() > kMostWindows)
      throw Error(ErrorCode::resources, {.where = "memory.master",
                                         .what = "the model is too large to be updated in windows",
                                         .found = "more than " + std::to_string(kMostWindows) + " of them",
                                         .expected = {},
                                         .next = "take a smaller model"});
    std::vector<RowSlice> slices;
    for (std::size_t i = 1; i < bounds.size(); ++i) slices.push_back({bounds[i - 1], bounds[i], rows});
    std::vector<SplitRefresh> splits;
    for (const RowSlice& rows : slices)
      splits.push_back(split_refresh(refresh, plan_.ops, {0, rows.begin, rows.end, rows.of}, 1));
    const std::string& format = splits[0].amax_format;
    for (std::size_t i = 0; i < slices.size(); ++i) {
      UpdateWindow& window = add_window(group, whole.layer, slices[i]);
      window.parts.push_back({whole.parameter, whole.layer, slices[i]});
      if (format.empty())
        follow(window, splits[i].own);
      else
        follow(
            window, StatePrograms::amax_of(splits[i].own.values[0], "slice_amax", format),
            {{}, {names::kSliceAmaxes, plan_.parameters[whole.parameter].spec.name, whole.layer, static_cast<int>(i)}});
    }
    if (!format.empty()) {
      const Value slice_amaxes{.name = names::kSliceAmaxes,
                               .shape = {static_cast<std::int64_t>(slices.size())},
                               .dtype = DType::f32,
                               .role = Role::state,
                               .parameter = plan_.parameters[whole.parameter].spec.name};
      follow(windows_.back(), StatePrograms::amax_of(slice_amaxes, names::kAmax, format));
      if (has_amax(whole)) windows_.back().agrees.push_back(whole.parameter);
      for (std::size_t i = 0; i < slices.size(); ++i) follow(add_window(group, whole.layer, slices[i]), splits[i].own);
    }
    if (!sharded && !splits[0].rest.ops.empty()) follow(add_window(group, whole.layer), splits[0].rest);
  }

  const Program& refresh_of(const UpdatePart& part) const {
    return refreshes_[part.parameter][plan_.class_index(part.layer)];
  }

  /// Rows of the smallest and the largest shard.
  std::pair<std::int64_t, std::int64_t> rows_of(const UpdatePart& part) const {
    const ParameterPlan& parameter = parameter_of(part);
    std::pair<std::int64_t, std::int64_t> rows{parameter.spec.extents[0],
                                               parameter.bounds.empty() ? parameter.spec.extents[0] : 0};
    for (std::size_t rank = 1; rank < parameter.bounds.size(); ++rank) {
      const std::int64_t own = parameter.bounds[rank] - parameter.bounds[rank - 1];
      rows = {std::min(rows.first, own), std::max(rows.second, own)};
    }
    return rows;
  }

  std::int64_t bytes_of(const UpdatePart& part) const {
    const auto element = static_cast<std::int64_t>(size_of(plan_.options.gradient) + size_of(plan_.options.master));
    const ParameterSpec& spec = parameter_of(part).spec;
    const std::int64_t rows = rows_of(part).second;
    std::int64_t bytes = checked_product(spec.count() / spec.extents[0] * rows, element);
    for (const OptimizerState& state : parameter_of(part).update.states)
      bytes = checked_sum(bytes, byte_count(state.extents, state.dtype) / spec.extents[0] * rows);
    for (const Value& value : refresh_of(part).values)
      if (value.role == Role::parameter) bytes += byte_count(fixed_extents(value.shape), value.dtype);
    return bytes;
  }

  /// Rows where slices begin; empty: it is updated whole.
  RowBounds slices_of(const UpdatePart& part) const {
    const ParameterSpec& spec = plan_.parameters[part.parameter].spec;
    const Program& refresh = refresh_of(part);
    const std::int64_t groups = row_groups_of(refresh, plan_.ops), bytes = bytes_of(part);
    if (spec.extents.size() < 2 || !parameter_of(part).update.splits()) return {};
    if (groups == 0 || !has_rows(refresh)) return {};
    if (bytes <= (is_made_twice(refresh) ? kLargest * limit_ : limit_)) return {};
    const std::int64_t unit = std::lcm(groups, aligned_rows(spec, parameter_of(part).update.states, plan_.alignment));
    // All but the last are of one size, so that every rank has as many.
    const auto [smallest, largest] = rows_of(part);
    const std::int64_t each = std::max(largest / unit / ((bytes + limit_ - 1) / limit_), std::int64_t{1}) * unit;
    const std::int64_t slices = (smallest + each - 1) / each;
    if (slices < 2) return {};
    const RowBounds& shards = parameter_of(part).bounds;
    const auto rank = static_cast<std::size_t>(plan_.options.state.rank);
    const std::int64_t begin = shards.empty() ? 0 : shards[rank], end = shards.empty() ? largest : shards[rank + 1];
    RowBounds bounds;
    for (std::int64_t slice = 0; slice < slices; ++slice) bounds.push_back(begin + slice * each);
    bounds.push_back(end);
    return bounds;
  }

  /// Whether the transposed copy's source is there.
  bool has_rows(const Program& refresh) const {
    return std::all_of(refresh.ops.begin(), refresh.ops.end(), [&](const Op& op) {
      const auto& pairs = plan_.ops.at(op.kind).transposed;
      auto present = [&](int output) { return op.outputs[static_cast<std::size_t>(output)] != kNoValue; };
      return std::all_of(pairs.begin(), pairs.end(),
                         [&](const auto& pair) { return !present(pair.first) || present(pair.second); });
    });
  }

  /// Whether slices would have to come again, for an amax of all or to be transposed.
  bool is_made_twice(const Program& refresh) const {
    return std::any_of(refresh.ops.begin(), refresh.ops.end(), [&](const Op& op) {
      const OpSpec& spec = plan_.ops.at(op.kind);
      return !spec.of_amax.empty() || !spec.transposed.empty();
    });
  }

  static constexpr std::int64_t kLargest = 16;  ///< windows' sizes up to which values that are made twice are not split

  const Plan& plan_;
  const std::vector<std::vector<Program>>& refreshes_;
  const std::int64_t limit_;
  std::vector<UpdateWindow> windows_;
  std::int64_t bytes_ = 0;  // of the last window
};

}  // namespace

std::vector<UpdateWindow> one_update(const Plan& plan) {
  std::vector<UpdateWindow> all(1);
  for (std::size_t i = 0; i < plan.parameters.size(); ++i)
    if (plan.parameters[i].spec.trainable)
      for_each_layer(plan.parameters[i].spec, static_cast<int>(plan.model.layers),
                     [&](int layer) { all[0].parts.push_back({.parameter = i, .layer = layer}); });
  return all;
}

std::vector<UpdateWindow> split_update(const Plan& plan, const std::vector<std::vector<Program>>& refreshes) {
  return Splitter(plan, refreshes).run();
}

}  // namespace quern
