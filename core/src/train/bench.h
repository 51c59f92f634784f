#pragma once
// Measures whole training steps and every op in them, on random tokens: what `quern bench` prints.

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "train/engine.h"
#include "train/peaks.h"
#include "train/session.h"

namespace quern {

/// One op of the programs, over all layers of one micro-step (or of the optimizer step).
struct OpTime {
  std::string op;     ///< kind and result: "matmul qkv"
  std::string phase;  ///< forward, recompute, backward, update
  std::int64_t launches = 0;
  double milliseconds = 0;
  double flops = 0, bytes = 0;
  bool tensor_core = false;
};

struct BenchResult {
  double tokens_per_second = 0;     ///< median over steps
  double slowest = 0, fastest = 0;  ///< of the steps, tokens/s
  double sol = 0;                   ///< share of the speed of light, see sol_seconds_per_token
  double measured_sol = 0;          ///< the same at the measured peaks, where they were
  double mfu = 0;                   ///< of the matmul format's peak, 6 FLOP a parameter and token plus attention
  std::int64_t device_bytes = 0;
  double start_seconds = 0;  ///< from plan to the end of the first step
  std::vector<OpTime> ops;   ///< one micro-step and one update, slowest first
  std::optional<Peaks> peaks;
};

struct BenchOptions {
  std::int64_t steps = 5;      ///< to time, after one to warm up
  bool measure_peaks = false;  ///< of the device, before the run
};

/// Least seconds a training token can take: 6 FLOP per block parameter at the matmul format's peak, and 6 per LM-head
/// parameter and 6 layers * width_of_attention * sequence (causal half) at bf16's. Zero when the device has no rates.
double sol_seconds_per_token(const Plan& plan, const DeviceTraits& device, DType matmul_format);

/// Runs whole optimizer steps, then one with an event around every launch.
BenchResult run_bench(Session& session, const BenchOptions& options);

std::string bench_table(const BenchResult& result, const DeviceTraits& device, DType matmul_format);
std::string bench_json(const BenchResult& result, const Session& session);

}  // namespace quern
