#include "bench/bench.h"

#include <algorithm>
#include <cmath>

#include "base/clock.h"
#include "plan/time/estimate.h"
#include "program/names.h"
#include "quern/error.h"
#include "quern/random.h"
#include "run/weights.h"

namespace quern::bench {

namespace {

std::string phase_name(Phase phase) {
  return phase == Phase::forward ? "forward" : phase == Phase::recompute ? "recompute" : "backward";
}

/// Batches for so many micro-steps, or the first of them where they would take much memory.
std::vector<Batch> make_batches(const Plan& plan, std::int64_t micro_steps, std::int64_t document_tokens) {
  constexpr std::int64_t kMostBytes = std::int64_t{256} << 20;
  std::int64_t bytes = 1;
  for (const Value& input : plan.uploaded)
    bytes += byte_count(extents_at(input.shape, plan.options.geometry), input.dtype);
  const std::int64_t count = std::clamp<std::int64_t>(kMostBytes / bytes, 2, micro_steps);
  std::vector<Batch> batches;
  for (std::int64_t number = 0; number < count; ++number) {
    batches.push_back(batch_for(plan, static_cast<std::uint32_t>(number)));
    if (document_tokens > 0)
      cut_into_documents(batches.back(), plan.options.geometry, document_tokens, static_cast<std::uint32_t>(number));
  }
  return batches;
}

/// Normal numbers, or integers below the input's bound.
void add_random(Batch& batch, const Value& input, const Geometry& geometry, std::uint32_t number) {
  const std::int64_t count = element_count(extents_at(input.shape, geometry));
  auto unit = [&](std::int64_t i) {
    return to_unit(random_word({1, RandomPurpose::sample, 1}, number, static_cast<std::uint64_t>(i)));
  };
  if (input.dtype == DType::f32) {
    std::vector<float> values;
    for (std::int64_t i = 0; i < count; ++i)  // Box and Muller
      values.push_back(std::sqrt(-2 * std::log(unit(2 * i))) * std::cos(6.2831853f * unit(2 * i + 1)));
    return batch.set(input.name, std::span<const float>(values));
  }
  if (input.dtype == DType::u8) {
    std::vector<std::uint8_t> bytes;
    for (std::int64_t i = 0; i < count; ++i) bytes.push_back(static_cast<std::uint8_t>(255 * unit(i)));
    return batch.set(input.name, std::span<const std::uint8_t>(bytes));
  }
  std::vector<std::int32_t> values;
  const auto below = static_cast<float>(std::max<std::int64_t>(input.below, 1));
  for (std::int64_t i = 0; i < count; ++i) values.push_back(static_cast<std::int32_t>(0.999f * unit(i) * below));
  if (input.name == names::kTargets)
    batch.targets = std::move(values);
  else
    batch.set(input.name, std::span<const std::int32_t>(values));
}

using RunTimes = std::map<Run, std::vector<ActionTime>>;  // of actions

/// Milliseconds, work and launches of each op in one micro-step and one update, slowest first; and the sums of their
/// times beside estimates.
void add_launch_times(BenchResult& result, const RunTimes& times, const Plan& plan) {
  std::map<std::string, OpTime> ops;
  for (Run run : {Run::later, Run::update, Run::apply}) {
    const bool update = run != Run::later;
    if (run != Run::apply) result.schedules.push_back({plan.schedules[run].name});
    for (std::size_t i = 0; i < times.at(run).size(); ++i) {
      const Action& action = plan.schedules[run].actions[i];
      if (action.kind != ActionKind::launch) continue;
      const Task& task = plan.schedules.task_of(action);
      const double seconds = times.at(run)[i].end - times.at(run)[i].begin;
      const std::string& name = update ? task.instance.kind : task.name;
      OpTime& op = ops[name + (update ? "u" : "")];
      op.op = name;
      op.phase = update ? "update" : phase_name(task.phase);
      op.launches += 1;
      op.milliseconds += seconds * 1e3;
      op.flops += task.cost.flops;
      op.bytes += task.cost.bytes;
      op.tensor_core = task.cost.tensor_core;
      op.format = task.cost.format;
      result.schedules.back().estimated += task.seconds;
      result.schedules.back().measured += seconds;
    }
  }
  for (auto& [name, op] : ops) result.ops.push_back(std::move(op));
  std::sort(result.ops.begin(), result.ops.end(),
            [](const OpTime& a, const OpTime& b) { return a.milliseconds > b.milliseconds; });
}

/// A step's runs, one behind the other, each kind once.
std::vector<TimelineEvent> measured_timeline(const RunTimes& times, const Plan& plan, std::int64_t micro_batches) {
  std::vector<TimelineEvent> events;
  double begin = 0;
  for (const auto& [run, count] : runs_of_step(plan, micro_batches))
    begin = add_events(events, plan, run, times.at(run), begin);
  return events;
}

}  // namespace

std::map<DType, double> training_work(const Plan& plan) {
  std::map<DType, double> work;
  const double share = 1.0 / static_cast<double>(plan.options.geometry.tokens());
  for (const Action& action : plan.schedules[Run::later].actions) {
    if (action.kind != ActionKind::launch) continue;
    const Task& task = plan.schedules.task_of(action);
    if (!task.cost.tensor_core || task.phase == Phase::recompute) continue;
    work[task.cost.format] += share * (task.cost.flops - task.cost.repeated_flops);
  }
  return work;
}

double sol_seconds_per_token(const Plan& plan, const DeviceTraits& device) {
  double seconds = 0;
  for (const auto& [format, flops] : training_work(plan)) {
    const double rate = matmul_rate(device, format);
    if (rate <= 0) return 0;
    seconds += flops / rate;
  }
  return seconds;
}

Batch text_like_tokens(const Geometry& geometry, std::int64_t vocabulary, std::uint32_t number) {
  const double nats = std::log(static_cast<double>(vocabulary) + 1);
  auto token = [&](std::uint64_t place) {  // V^u for a uniform u
    const std::uint32_t word = random_word({1, RandomPurpose::sample, 0}, number, place);
    return static_cast<std::int32_t>(std::exp(nats * (word + 0.5) * 0x1p-32)) - 1;
  };
  Batch batch;
  for (std::int64_t i = 0; i < geometry.tokens(); ++i) {
    batch.tokens.push_back(token(2 * static_cast<std::uint64_t>(i)));
    batch.targets.push_back(token(2 * static_cast<std::uint64_t>(i) + 1));
    batch.positions.push_back(static_cast<std::int32_t>(i % geometry.sequence));
  }
  return batch;
}

void cut_into_documents(Batch& batch, const Geometry& geometry, std::int64_t mean, std::uint32_t number) {
  mean = std::min(mean, 2 * geometry.sequence);
  std::uint64_t place = 0;
  for (std::int64_t row = 0; row < geometry.batch; ++row) {
    for (std::int64_t begin = 0; begin < geometry.sequence;) {
      const double uniform = random_word({2, RandomPurpose::sample, 0}, number, place++) * 0x1p-32;
      const auto length =
          std::max<std::int64_t>(static_cast<std::int64_t>(static_cast<double>(mean) * (2 + 2 * uniform) / 3), 1);
      const std::int64_t first = row * geometry.sequence + begin;
      batch.documents.push_back(static_cast<std::int32_t>(first));
      const std::int64_t end = std::min(begin + length, geometry.sequence);
      for (std::int64_t i = begin; i < end; ++i)
        batch.positions[static_cast<std::size_t>(row * geometry.sequence + i)] = static_cast<std::int32_t>(i - begin);
      begin = end;
    }
  }
  batch.documents.push_back(static_cast<std::int32_t>(geometry.tokens()));
}

Batch batch_for(const Plan& plan, std::uint32_t number) {
  const std::int64_t vocabulary = plan.model.vocabulary;
  const Geometry& geometry = plan.options.geometry;
  Batch batch = text_like_tokens(geometry, std::max<std::int64_t>(vocabulary, 1), number);
  for (const Value& input : plan.uploaded) {
    const bool of_text = input.name == names::kTokens || input.name == names::kPositions ||
                         input.name == names::kDocuments || input.name == names::kStep;
    if (!of_text && (input.name != names::kTargets || vocabulary == 0)) add_random(batch, input, geometry, number);
  }
  return batch;
}

BenchResult run_bench(Session& session, const BenchOptions& options) {
  BenchResult result;
  session.device->open(static_cast<int>(session.device_options.ordinal));
  if (options.measure_peaks) result.peaks = measure_peaks(*session.device);
  std::int64_t accumulation = session.train.accumulation;
  result.start.enter("plan");
  Plan plan = session.plan(session.plan_options());
  result.start.enter("kernels");
  std::vector<OffloadStore*> stores = session.open_stores(plan);
  Engine engine(*session.device, std::move(plan), std::move(stores));
  const std::vector<Batch> batches =
      make_batches(engine.plan(), (options.steps + 1) * accumulation, options.document_tokens);
  std::size_t batch = 0;
  result.start.split("memory", engine.spent().memory);
  result.start.enter("weights");
  initialise_weights(engine, 1);
  result.start.enter("first step");
  const Geometry& geometry = engine.plan().options.geometry;

  StepState state;
  state.learning_rate = static_cast<float>(session.optimizer_options.learning_rate);
  state.clip_norm = static_cast<float>(session.optimizer_options.clip_norm);
  std::vector<double> speeds;
  for (std::int64_t step = 0; step <= options.steps; ++step) {
    double step_begin = now();
    state.step = state.updates = static_cast<std::uint32_t>(step);
    for (std::int64_t micro_step = 0; micro_step < accumulation; ++micro_step) {
      state.micro_step = static_cast<std::uint32_t>(micro_step);
      engine.micro_step(batches[batch++ % batches.size()], state,
                        {.first = micro_step == 0, .last = micro_step + 1 == accumulation});
    }
    engine.update();
    if (engine.result().update.apply == 0)
      throw Error(ErrorCode::numerics,
                  {.where = "step " + std::to_string(step + 1) + " of the bench",
                   .what = "loss or gradients are not finite, and the weights stay",
                   .next = "lower optimizer.learning_rate: the speed of such steps means nothing"});
    if (step > 0) {
      result.step_seconds.push_back(now() - step_begin);
      continue;
    }
    result.start.split("graphs", engine.spent().graphs);
    result.start.leave();
  }
  result.tokens_per_step = static_cast<double>(geometry.tokens() * accumulation);
  for (double seconds : result.step_seconds) speeds.push_back(result.tokens_per_step / seconds);
  std::sort(speeds.begin(), speeds.end());
  result.slowest = speeds.front();
  result.fastest = speeds.back();
  result.tokens_per_second = speeds[speeds.size() / 2];
  result.device_bytes = engine.plan().device_bytes;
  const DeviceTraits& rated = session.device->traits();
  result.sol = result.tokens_per_second * sol_seconds_per_token(engine.plan(), rated);
  if (result.peaks)
    result.measured_sol =
        result.tokens_per_second * sol_seconds_per_token(engine.plan(), with_measured(rated, *result.peaks));
  double work = 0;
  for (const auto& [format, flops] : training_work(engine.plan())) work += flops;
  if (double rate = matmul_rate(rated, session.precision->traits().matmul); rate > 0)
    result.mfu = result.tokens_per_second * work / rate;
  const RunTimes times = engine.profile(batches[0], state, accumulation);
  add_launch_times(result, times, engine.plan());
  result.timeline = measured_timeline(times, engine.plan(), accumulation);
  result.estimated = simulated_step(engine.plan(), rated, accumulation);
  result.one_by_one = step_time(engine.plan(), accumulation, [&](Run run) { return times.at(run); });
  return result;
}

}  // namespace quern::bench
