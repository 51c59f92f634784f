#include "plan/schedule/run_memory.h"

#include <algorithm>
#include <map>

#include <doctest/doctest.h>

#include "plan/test_plans.h"

using namespace quern;

namespace {

struct Range {
  std::int64_t begin = 0, end = 0;
};

/// The streams that pass through a run's memory at its stops, from the first that has one to the last.
std::vector<std::map<std::size_t, Range>> passing(const Plan& plan, const std::vector<Stop>& order,
                                                  const RunMemory& memory) {
  struct Life {
    std::size_t first = 0, last = 0;
    std::int64_t bytes = 0;
  };
  std::map<std::size_t, Life> lives;
  for (std::size_t i = 0; i < order.size(); ++i) {
    if (!order[i].program) continue;
    const Program& program = order[i].program->program;
    auto touch = [&](const std::vector<StreamId>& streams, const std::vector<ValueId>& operands) {
      for (std::size_t o = 0; o < streams.size(); ++o) {
        Life& life = lives.try_emplace(number_of(plan, streams[o]), Life{i, i}).first->second;
        life.last = i;
        life.bytes = plan.bytes_of(program[operands[o]]);
      }
    };
    touch(streams_into(plan, order[i]), program.inputs);
    touch(streams_out_of(plan, order[i]), program.outputs);
  }
  std::vector<std::map<std::size_t, Range>> at(order.size());
  for (const auto& [number, life] : lives)
    for (std::size_t i = life.first; i <= life.last && memory.streams[number] >= 0; ++i)
      at[i][number] = {memory.streams[number], memory.streams[number] + life.bytes};
  return at;
}

}  // namespace

TEST_CASE("what a run has at once is apart, within the memory of all runs, and one of them takes all of it") {
  for (unsigned places : {0u, 7u, 16u, 31u})
    for (bool train : {true, false}) {
      CAPTURE(places);
      CAPTURE(train);
      PlanOptions options = stored_options(places, 1);
      options.train = train;
      options.recompute = {places % 2 == 0 ? "block" : "swiglu"};
      options.logits = options.observe = places == 7;
      const Plan plan =
          tiny_plan(options, PlanningDevice([](const OpInstance&) { return OpSupport{.workspace_bytes = 768}; }));
      const std::int64_t end = (plan.ring.bytes > 0 ? plan.ring.offset : plan.device_bytes) - plan.transient_offset;
      std::int64_t most = 0;
      for (const Run& run : all_runs()) {
        std::vector<Stop> order = order_of(plan, run);
        const RunMemory memory = run_memory(plan, order);
        most = std::max(most, memory.bytes);
        const auto streams = passing(plan, order, memory);
        for (std::size_t i = 0; i < order.size(); ++i) {
          if (!order[i].program) continue;
          std::vector<Range> ranges{{order[i].locals, order[i].locals + order[i].program->bytes}};
          for (const auto& [number, range] : streams[i]) ranges.push_back(range);
          std::sort(ranges.begin(), ranges.end(), [](const Range& a, const Range& b) { return a.begin < b.begin; });
          for (std::size_t r = 0; r < ranges.size(); ++r) {
            CHECK(ranges[r].end <= (r + 1 < ranges.size() ? ranges[r + 1].begin : memory.bytes));
            CHECK(ranges[r].begin % plan.alignment == 0);
          }
        }
      }
      CHECK(most == end);
    }
}

TEST_CASE(
    "a stream's gradient takes memory that streams had in the forward pass, and one that a layer keeps takes none") {
  PlanOptions options = tiny_options();
  const Plan plan = tiny_plan(options);
  std::vector<Stop> order = order_of(plan, Run::later);
  const RunMemory memory = run_memory(plan, order);
  const auto streams = passing(plan, order, memory);
  std::size_t most = 0, kept = 0;
  for (const auto& here : streams) most = std::max(most, here.size());
  CHECK(most <= 2 * plan.head_evaluate.program.inputs.size());
  for (int boundary = 0; boundary < static_cast<int>(plan.model.layers); ++boundary)
    for (std::size_t operand = 0; operand < plan.layer_class(boundary).forward.program.inputs.size(); ++operand) {
      const StreamId stream{boundary, static_cast<int>(operand)};
      if (!kept_as(plan, stream)) continue;
      ++kept;
      CHECK(memory.streams[number_of(plan, stream)] == -1);
    }
  CHECK(kept > 0);
}
