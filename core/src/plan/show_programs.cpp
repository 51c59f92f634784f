#include <algorithm>

#include "plan/choice/choose.h"
#include "quern/error.h"

namespace quern {

namespace {

std::string placed_text(const PlacedProgram& placed, const Geometry& geometry) {
  std::string text = to_string(placed.program);
  for (std::size_t i = 0; i < placed.offsets.size(); ++i) {
    if (placed.offsets[i] < 0) continue;
    const Value& value = placed.program.values[i];
    std::int64_t bytes = byte_count(extents_at(value.shape, geometry), value.dtype);
    text += "    " + std::to_string(placed.offsets[i]) + " .. " + std::to_string(placed.offsets[i] + bytes) + "  %" +
            value.name + "\n";
  }
  for (std::size_t i = 0; i < placed.workspace_offsets.size(); ++i)
    if (placed.workspace_offsets[i] >= 0)
      text += "    " + std::to_string(placed.workspace_offsets[i]) + " ..  workspace of " + placed.program.ops[i].kind +
              "\n";
  return text + "    " + std::to_string(placed.bytes) + " bytes of the transient arena\n";
}

std::string show_placed(const Plan& plan) {
  const Geometry& geometry = plan.options.geometry;
  std::string text = placed_text(plan.embed, geometry);
  for (const LayerClass& layer : plan.classes)
    text += placed_text(layer.forward, geometry) + placed_text(layer.backward, geometry);
  return text + placed_text(plan.head_train, geometry);
}

}  // namespace

std::string show_programs(const PlanParts& parts, const PlanOptions& options, std::string_view pass) {
  static const std::vector<std::string> kPasses = {"model",     "rotate", "differentiate", "lower",
                                                   "as_stored", "saved",  "fuse",          "place"};
  if (std::find(kPasses.begin(), kPasses.end(), pass) == kPasses.end()) {
    std::string known;
    for (const std::string& name : kPasses) known += (known.empty() ? "" : ", ") + name;
    throw Error(
        ErrorCode::config,
        {.where = "quern plan --show program", .what = "unknown pass", .found = std::string(pass), .expected = known});
  }
  if (pass == "place") return show_placed(make_plan(parts, options));
  Trials trials;
  const Choice choice = pass == "saved" || pass == "fuse" ? choose_for_all_ranks(trials, parts, options)
                                                          : Choice{.precision = &parts.precision};
  const PlanParts chosen = parts.with(*choice.precision);
  ProgramSet set(chosen, options);
  std::string text;
  if (pass == "model") {
    const ModelPrograms written = set.written();
    text = to_string(written.embed);
    for (const Program& block : written.blocks) text += to_string(block);
    return text + to_string(written.head);
  }
  set.finish(choice.recompute);
  auto show = [&](const Stage& stage, bool is_head) {
    if (pass == "rotate") text += to_string(stage.model);
    if (pass == "differentiate") text += to_string(stage.joint.program);
    if (pass == "lower") text += to_string(stage.transposing);
    if (pass == "as_stored") text += to_string(stage.lowered.joint.program);
    if (pass == "saved")
      text += is_head ? to_string(stage.lowered.joint.program)
                      : to_string(stage.split.forward) + to_string(stage.split.backward);
    if (pass == "fuse")
      text += is_head ? to_string(stage.forward) : to_string(stage.forward) + to_string(stage.backward);
  };
  show(set.embed, false);
  for (const Stage& layer : set.classes) show(layer, false);
  show(set.head, true);
  return text;
}

}  // namespace quern
