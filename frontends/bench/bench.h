#pragma once
// Measures whole training steps and every op in them, on random tokens: what `quern bench` prints.

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "base/files/descriptor.h"
#include "base/phases.h"
#include "bench/peaks.h"
#include "engine/engine.h"
#include "plan/show_schedules.h"
#include "plan/time/step_time.h"
#include "run/session.h"

namespace quern::bench {

/// One op of the programs, over all layers of one micro-step (or of the optimizer step).
struct OpTime {
  std::string op;     ///< kind and result: "matmul qkv"
  std::string phase;  ///< forward, recompute, backward, update
  std::int64_t launches = 0;
  double milliseconds = 0;
  double flops = 0, bytes = 0;
  bool tensor_core = false;
  DType format = DType::f32;  ///< of the operands, where it has matmuls
};

/// Seconds of a schedule's launches alone: as estimated, and measured one by one.
struct ScheduleTime {
  std::string run;
  double estimated = 0, measured = 0;
};

struct BenchResult {
  double tokens_per_step = 0;
  double tokens_per_second = 0;     ///< median over steps
  double slowest = 0, fastest = 0;  ///< of the steps, tokens/s
  StepTime estimated;               ///< of a step, as simulated
  StepTime one_by_one;              ///< the same as measured, launched action by action
  double sol = 0;                   ///< share of the speed of light, see sol_seconds_per_token
  double measured_sol = 0;          ///< the same at the measured peaks, where they were
  double mfu = 0;                   ///< of the peak of the precision's matmul format, the same work
  std::int64_t device_bytes = 0;
  Phases start;  ///< from plan to the end of the first step
  std::vector<ScheduleTime> schedules;
  std::vector<TimelineEvent> timeline;  ///< of a step, launched action by action
  std::vector<OpTime> ops;              ///< one micro-step and one update, slowest first
  std::optional<Peaks> peaks;
  /// Of the timed steps, in their order.
  std::vector<double> step_seconds;
};

struct BenchOptions {
  std::int64_t steps = 5;      ///< to time, after one to warm up
  bool measure_peaks = false;  ///< of the device, before the run
  /// Mean tokens of a document, where the run masks documents: from two thirds of it to four thirds. 0: one a row.
  std::int64_t document_tokens = 0;
};

/// FLOP a training token by operand format: 6 per parameter in a matmul, and 6 layers * width_of_attention * sequence
/// (causal half). Recomputation does not count, nor do the scores that attention's gradient recomputes.
std::map<DType, double> training_work(const Plan& plan);
/// Least seconds a training token can take: each matmul at the peak rate of its own operands' format. Zero when the
/// device does not state the rate of one of them.
double sol_seconds_per_token(const Plan& plan, const DeviceTraits& device);

/// Where a result comes from, for whoever reads it later.
struct BenchOrigin {
  std::vector<std::string> command;
  std::string commit;
};

/// Tokens of a micro-batch, frequent and rare ones as in text: the k-th has a probability of about 1 / (k ln(V)).
Batch text_like_tokens(const Geometry& geometry, std::int64_t vocabulary, std::uint32_t number);
/// The same, and random values of what else the plan's model reads.
Batch batch_for(const Plan& plan, std::uint32_t number);
/// Cuts rows into documents of two thirds to four thirds of `mean` tokens, by `number`; the last of a row may have
/// fewer.
void cut_into_documents(Batch& batch, const Geometry& geometry, std::int64_t mean, std::uint32_t number);

/// Runs whole optimizer steps at the config's learning rate, on batches of which none comes twice within 256 MiB of
/// them, then one with an event around every action.
BenchResult run_bench(Session& session, const BenchOptions& options);

std::string bench_table(const BenchResult& result, const DeviceTraits& device);
std::string bench_json(const BenchResult& result, const Session& session, const BenchOrigin& origin);
/// How the text of bench_json begins.
inline constexpr FileKind kBenchFile{"a file of quern bench", "{\n \"device\": \""};

}  // namespace quern::bench
