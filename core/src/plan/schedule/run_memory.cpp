#include "plan/schedule/run_memory.h"

#include <algorithm>

#include "quern/checked.h"

namespace quern {

namespace {

using Flow = Stop::Flow;

// What the first block hands on as it came is put at once where the next block reads it.
StreamId stream_at(const Plan& plan, int boundary, std::size_t operand, bool evaluate) {
  const Program& first = (evaluate ? plan.layer_class(0).evaluate : plan.layer_class(0).forward).program;
  if (boundary == 0) {
    const auto out = std::find(first.outputs.begin(), first.outputs.end(), first.inputs[operand]);
    if (out != first.outputs.end()) return {1, static_cast<int>(out - first.outputs.begin())};
  }
  return {boundary, static_cast<int>(operand)};
}

std::vector<StreamId> streams(const Plan& plan, const Stop& stop, int boundary, std::size_t operands, bool gradient) {
  std::vector<StreamId> streams;
  for (std::size_t i = 0; i < operands && boundary >= 0; ++i)
    streams.push_back(gradient ? StreamId{boundary, static_cast<int>(i), true}
                               : stream_at(plan, boundary, i, stop.flow == Flow::evaluate));
  return streams;
}

struct Life {
  std::int64_t begin = 0, end = 0;
  std::size_t last = 0;  ///< stop
};

/// Those that live, by offset.
class Living {
 public:
  explicit Living(std::int64_t alignment) : alignment_(alignment) {}
  void leave_behind(std::size_t stop) {
    std::erase_if(lives_, [&](const Life& life) { return life.last < stop; });
  }
  std::int64_t add(std::int64_t bytes, std::size_t last) {
    std::int64_t begin = 0;
    auto next = lives_.begin();
    for (; next != lives_.end() && next->begin < checked_sum(begin, bytes); ++next) begin = next->end;
    const std::int64_t end = checked_sum(begin, rounded_up(bytes, alignment_));
    lives_.insert(next, {begin, end, last});
    most_ = std::max(most_, end);
    return begin;
  }
  std::int64_t most() const { return most_; }

 private:
  std::int64_t alignment_, most_ = 0;
  std::vector<Life> lives_;
};

}  // namespace

std::vector<StreamId> streams_into(const Plan& plan, const Stop& stop) {
  return streams(plan, stop, stop.boundary_in, stop.program->program.inputs.size(), stop.flow == Flow::backward);
}

std::vector<StreamId> streams_out_of(const Plan& plan, const Stop& stop) {
  return streams(plan, stop, stop.boundary_out, stop.program->program.outputs.size(),
                 stop.flow == Flow::turn || stop.flow == Flow::backward);
}

const PlannedTensor* kept_as(const Plan& plan, const StreamId& stream) {
  const auto operand = static_cast<std::size_t>(stream.operand);
  auto kept = [&](const Program& program, const std::vector<ValueId>& operands, int layer) {
    const Value& value = program[operands[operand]];
    return value.role == Role::saved ? &plan.tensor({value.name, "", layer}) : nullptr;
  };
  if (stream.gradient || !plan.options.train) return nullptr;
  if (stream.boundary > 0) {
    const Program& producer = plan.layer_class(stream.boundary - 1).forward.program;
    if (const PlannedTensor* tensor = kept(producer, producer.outputs, stream.boundary - 1)) return tensor;
  }
  if (stream.boundary == static_cast<int>(plan.model.layers)) return nullptr;
  const Program& consumer = plan.layer_class(stream.boundary).forward.program;
  return kept(consumer, consumer.inputs, stream.boundary);
}

std::size_t number_of(const Plan& plan, const StreamId& stream) {
  const std::size_t operands = plan.head_evaluate.program.inputs.size();
  return (static_cast<std::size_t>(stream.boundary) * operands + static_cast<std::size_t>(stream.operand)) * 2 +
         (stream.gradient ? 1 : 0);
}

RunMemory run_memory(const Plan& plan, std::vector<Stop>& order) {
  RunMemory memory;
  memory.streams.assign(number_of(plan, {static_cast<int>(plan.model.layers) + 1}), -1);
  std::vector<std::size_t> last(memory.streams.size(), 0), flows;  // by stream the last stop; stops with streams
  for (std::size_t i = 0; i < order.size(); ++i) {
    if (order[i].flow == Flow::none) continue;
    flows.push_back(i);
    for (const auto& streams : {streams_into(plan, order[i]), streams_out_of(plan, order[i])})
      for (const StreamId& stream : streams) last[number_of(plan, stream)] = i;
  }
  Living living(plan.alignment);
  if (!order.empty() && order[0].loads) living.add(plan.loading_bytes, order.size());
  for (std::size_t i = 0; i < order.size(); ++i) {
    living.leave_behind(i);
    Stop& stop = order[i];
    if (!stop.program) continue;
    const std::vector<StreamId> out = streams_out_of(plan, stop);
    for (std::size_t o = 0; o < out.size(); ++o) {
      const std::size_t number = number_of(plan, out[o]);
      if (memory.streams[number] >= 0) continue;  // handed on
      std::size_t end = last[number];
      if (const PlannedTensor* kept = stop.flow == Flow::forward ? kept_as(plan, out[o]) : nullptr) {
        if (kept->store < 0) continue;
        const auto after = std::upper_bound(flows.begin(), flows.end(), end);
        if (after != flows.end()) end = *after;
      }
      memory.streams[number] = living.add(plan.bytes_of(stop.program->program[stop.program->program.outputs[o]]), end);
    }
    stop.locals = living.add(stop.program->bytes, i);
  }
  memory.bytes = living.most();
  return memory;
}

}  // namespace quern
