#include "train/bench.h"

#include <algorithm>
#include <chrono>
#include <map>

#include "quern/random.h"
#include "train/weights.h"

namespace quern {

namespace {

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

Batch random_tokens(const Geometry& geometry, std::int64_t vocabulary, std::uint32_t number) {
  Batch batch;
  for (std::int64_t i = 0; i < geometry.tokens(); ++i) {
    std::uint32_t word = random_word({1, RandomPurpose::sample, 0}, number, static_cast<std::uint64_t>(i));
    batch.tokens.push_back(static_cast<std::int32_t>(word % static_cast<std::uint32_t>(vocabulary)));
    batch.targets.push_back(static_cast<std::int32_t>((word >> 5) % static_cast<std::uint32_t>(vocabulary)));
    batch.positions.push_back(static_cast<std::int32_t>(i % geometry.sequence));
  }
  return batch;
}

double rate_of(const DeviceTraits& device, DType format) {
  for (const auto& [dtype, rate] : device.matmul_rates)
    if (dtype == format) return rate;
  return 0;
}

struct Work {
  double block = 0, head = 0, attention = 0;  // FLOP a token, forward and backward
};

Work work_of(const Plan& plan) {
  Work work;
  double layers = static_cast<double>(plan.model.layers);
  for (const ParameterPlan& parameter : plan.parameters) {
    double count = static_cast<double>(parameter.spec.count());
    if (parameter.spec.group == ParameterGroup::block) work.block += 6 * count * layers;
  }
  work.head = 6.0 * static_cast<double>(plan.model.vocabulary * plan.model.width);
  for (const Op& op : plan.classes.back().evaluate.program.ops)
    if (op.kind == "attention")
      work.attention += 6.0 * layers *
                        static_cast<double>(op.attributes.integer("heads") * op.attributes.integer("head_dim") *
                                            plan.options.geometry.sequence);
  return work;
}

std::string phase_name(Phase phase) {
  return phase == Phase::forward ? "forward" : phase == Phase::recompute ? "recompute" : "backward";
}

}  // namespace

double sol_seconds_per_token(const Plan& plan, const DeviceTraits& device, DType matmul_format) {
  Work work = work_of(plan);
  double format = rate_of(device, matmul_format),
         bf16 = rate_of(device, matmul_format == DType::f32 ? DType::f32 : DType::bf16);
  if (format <= 0 || bf16 <= 0) return 0;
  return work.block / format + (work.head + work.attention) / bf16;
}

BenchResult run_bench(Session& session, const BenchOptions& options) {
  BenchResult result;
  session.device->open(static_cast<int>(session.device_options.ordinal));
  if (options.measure_peaks) result.peaks = measure_peaks(*session.device);
  double begin = now();
  std::int64_t accumulation = session.train.accumulation;
  Engine engine(*session.device, make_plan(session.parts(), session.plan_options()));
  initialise_weights(engine, 1);
  const Geometry& geometry = engine.plan().options.geometry;
  std::vector<Batch> batches;
  for (std::uint32_t number = 0; number < 4; ++number)
    batches.push_back(random_tokens(geometry, engine.plan().model.vocabulary, number));

  StepState state;
  state.learning_rate = 1e-5f;
  state.clip_norm = 1.0f;
  std::vector<double> speeds;
  for (std::int64_t step = 0; step <= options.steps; ++step) {
    double step_begin = now();
    state.step = static_cast<std::uint32_t>(step);
    for (std::int64_t micro_step = 0; micro_step < accumulation; ++micro_step) {
      state.micro_step = static_cast<std::uint32_t>(micro_step);
      engine.micro_step(batches[static_cast<std::size_t>(micro_step) % batches.size()], state);
    }
    engine.update();
    engine.result();
    if (step == 0)
      result.start_seconds = now() - begin;
    else
      speeds.push_back(static_cast<double>(geometry.tokens() * accumulation) / (now() - step_begin));
  }
  std::sort(speeds.begin(), speeds.end());
  result.slowest = speeds.front();
  result.fastest = speeds.back();
  result.tokens_per_second = speeds[speeds.size() / 2];
  result.device_bytes = engine.plan().device_bytes;
  DType format = session.precision->traits().matmul;
  result.sol = result.tokens_per_second * sol_seconds_per_token(engine.plan(), session.device->traits(), format);
  if (result.peaks)
    result.measured_sol =
        result.tokens_per_second *
        sol_seconds_per_token(engine.plan(), with_measured(session.device->traits(), *result.peaks), format);
  Work work = work_of(engine.plan());
  if (double rate = rate_of(session.device->traits(), format); rate > 0)
    result.mfu = result.tokens_per_second * (work.block + work.head + work.attention) / rate;

  std::map<std::string, OpTime> ops;
  for (const LaunchTime& time : engine.profile(batches[0], state)) {
    const std::string& name = time.update ? time.launch->op->kind : time.launch->name;
    OpTime& op = ops[name + (time.update ? "u" : "")];
    op.op = name;
    op.phase = time.update ? "update" : phase_name(time.launch->op->phase);
    op.launches += 1;
    op.milliseconds += time.milliseconds;
    op.flops += time.cost.flops;
    op.bytes += time.cost.bytes;
    op.tensor_core = time.cost.tensor_core;
  }
  for (auto& [name, op] : ops) result.ops.push_back(std::move(op));
  std::sort(result.ops.begin(), result.ops.end(),
            [](const OpTime& a, const OpTime& b) { return a.milliseconds > b.milliseconds; });
  return result;
}

}  // namespace quern
