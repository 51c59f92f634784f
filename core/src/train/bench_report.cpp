#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "log/format.h"
#include "train/bench.h"

namespace quern {

std::string bench_table(const BenchResult& result, const DeviceTraits& device, DType matmul_format) {
  double peak = 0;
  for (const auto& [format, rate] : device.matmul_rates)
    if (format == matmul_format) peak = rate;
  std::string text = fmt::format("{:<44}{:<10}{:>8}{:>10}{:>7}{:>10}{:>11}{:>8}\n", "op", "phase", "launches", "ms",
                                 "share", "TB/s", "TFLOP/s", "of peak");
  double total = 0;
  for (const OpTime& op : result.ops) total += op.milliseconds;
  for (const OpTime& op : result.ops) {
    double seconds = op.milliseconds / 1e3;
    double bandwidth = op.bytes / seconds, arithmetic = op.flops / seconds;
    double share = op.tensor_core ? (peak > 0 ? arithmetic / peak : 0)
                                  : (device.memory_rate > 0 ? bandwidth / device.memory_rate : 0);
    text += fmt::format("{:<44}{:<10}{:>8}{:>10.3f}{:>6.1f}%", op.op.substr(0, 43), op.phase, op.launches,
                        op.milliseconds, 100 * op.milliseconds / total);
    text += op.tensor_core ? fmt::format("{:>10}{:>11.3g}", "", arithmetic / 1e12)
                           : fmt::format("{:>10.3g}{:>11}", bandwidth / 1e12, "");
    text += fmt::format("{:>7.0f}%\n", 100 * share);
  }
  text += fmt::format("\none micro-step and one update, op by op: {:.1f} ms\n", total);
  text += fmt::format(
      "whole steps: {:.1f}k tok/s (from {:.1f}k to {:.1f}k), SOL {:.1f}%, MFU {:.1f}%, device memory {}, start to "
      "first step {}\n",
      result.tokens_per_second / 1e3, result.slowest / 1e3, result.fastest / 1e3, 100 * result.sol, 100 * result.mfu,
      format_bytes(static_cast<double>(result.device_bytes)), format_duration(result.start_seconds));
  return text;
}

std::string bench_json(const BenchResult& result, const Session& session) {
  nlohmann::ordered_json json = {{"device", session.device->traits().name},
                                 {"model", session.config.id("model")},
                                 {"precision", session.config.id("precision")},
                                 {"micro_batch", session.train.micro_batch},
                                 {"sequence", session.train.sequence},
                                 {"accumulation", session.train.accumulation},
                                 {"tokens_per_second", result.tokens_per_second},
                                 {"slowest", result.slowest},
                                 {"fastest", result.fastest},
                                 {"sol", result.sol},
                                 {"mfu", result.mfu},
                                 {"device_bytes", result.device_bytes},
                                 {"start_seconds", result.start_seconds}};
  for (const OpTime& op : result.ops)
    json["ops"].push_back({{"op", op.op},
                           {"phase", op.phase},
                           {"launches", op.launches},
                           {"milliseconds", op.milliseconds},
                           {"flops", op.flops},
                           {"bytes", op.bytes}});
  return json.dump(1) + "\n";
}

}  // namespace quern
