#pragma once
// For tests: the plans of all ranks of a run with the tiny model, and their faults.

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "plan/laws/check_schedules.h"
#include "plan/test_plans.h"

namespace quern {

inline PlanOptions rank_options(int ranks, int rank, Sharding sharding, PlanOptions options = tiny_options()) {
  options.state.ranks = ranks;
  options.state.rank = rank;
  options.state.meet = true;
  options.state.master.sharding = options.state.moments.sharding = sharding;
  return options;
}

/// Of all ranks, on a device with small alignment, so that the tiny model's matrices can be split.
struct Stored {
  unsigned places = 0;  ///< as of stored_options
  std::int64_t window_bytes = std::int64_t{128} << 20;
  bool weights = false, gradients = false;  ///< these are sharded too
  DType master = DType::f32;
  int ahead = 1;
  bool tied = false;  ///< the head's weight is the embedding's, whose gradient two programs make
  std::vector<std::string> frozen = {};
  bool scaled = false;  ///< copies of matrices have one scale each, for which ranks need the amax of all rows
};

/// Matmuls of weights with one scale for each matrix.
class ScaledWeights final : public testkit::PlainPrecision {
 public:
  ScaledWeights() : PlainPrecision(DType::bf16) {}
  void lower(const ProductSite& site, Lowering& lowering) const override {
    if (site.product == Product::loss || site.product == Product::weight_gradient)
      return lower_to_matmul(site, lowering);
    const Attributes format{{"format", std::string("e4m3")}};
    const bool output = site.product == Product::output;
    const ValueId input = output ? site.x : site.dy;
    const std::vector<ValueId> a = lowering.emit("quantize", {input}, format, lowering.program()[input].name + ".e4m3"),
                               b = lowering.working_copy(site.parameter, "quantize", format);
    lowering.produce("matmul", {a[0], output ? b[0] : b[2], site.bias, a[1], b[1]},
                     {{"transpose_a", std::int64_t{0}}, {"transpose_b", std::int64_t{1}}});
  }
};

inline std::vector<Plan> plans_of(int ranks, Sharding sharding, std::int64_t in_tree = 0, const Stored& stored = {}) {
  PlanningDevice device;
  device.device_traits.alignment = 16;
  std::vector<Plan> plans;
  for (int rank = 0; rank < ranks; ++rank) {
    PlanOptions options = rank_options(ranks, rank, sharding, stored_options(stored.places, stored.ahead));
    options.state.in_tree = in_tree;
    options.update_window_bytes = stored.window_bytes;
    if (stored.weights) options.state.weights.sharding = Sharding::ranks;
    if (stored.gradients) options.state.gradients.sharding = Sharding::ranks;
    options.master = stored.master;
    const testkit::TinyModelOptions form{.tied = stored.tied, .frozen = stored.frozen};
    plans.push_back(stored.scaled ? tiny_plan(options, device, ScaledWeights(), form)
                                  : tiny_plan(options, device, testkit::PlainPrecision(DType::bf16), form));
  }
  return plans;
}

/// Of each plan's schedules, and of all of them together.
inline std::vector<std::string> faults_of(const std::vector<Plan>& plans) {
  std::vector<std::string> faults;
  auto add = [&](const std::vector<std::string>& more) { faults.insert(faults.end(), more.begin(), more.end()); };
  std::vector<const ScheduleSet*> schedules;
  for (const Plan& plan : plans) {
    add(schedule_faults(plan));
    schedules.push_back(&plan.schedules);
  }
  add(rank_faults(schedules));
  return faults;
}

}  // namespace quern
