#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "base/format.h"
#include "bench/bench.h"
#include "config/document.h"
#include "plan/time/estimate.h"

namespace quern::bench {

namespace {

/// Share of a device's peak that an op reaches; 0: the peak is not known.
double share_of_peak(const OpTime& op, const DeviceTraits& device) {
  const double peak = op.tensor_core ? matmul_rate(device, op.format) : device.memory_rate;
  const double rate = (op.tensor_core ? op.flops : op.bytes) / (op.milliseconds / 1e3);
  return peak > 0 ? rate / peak : 0;
}

std::string peaks_text(const Peaks& peaks, const DeviceTraits& rated) {
  std::string text = fmt::format("{:<24}{:>12}{:>12}{:>8}\n", "peaks", "measured", "rated", "share");
  auto line = [&](const std::string& name, double measured, double table, const char* unit) {
    text += fmt::format("{:<24}{:>12.4g}{:>12.4g}{:>7.0f}%  {}\n", name, measured / 1e12, table / 1e12,
                        table > 0 ? 100 * measured / table : 0, unit);
  };
  line("memory", peaks.memory_rate, rated.memory_rate, "TB/s");
  for (const auto& [format, rate] : peaks.matmul_rates)
    line("matmul " + std::string(name_of(format)), rate, matmul_rate(rated, format), "TFLOP/s");
  for (const auto& [format, reason] : peaks.left_out)
    text += fmt::format("{:<24}not measured: {}\n", "matmul " + std::string(name_of(format)), reason);
  return text + "\n";
}

/// {"train.steps": 8, ...}
void add_settings(nlohmann::ordered_json& settings, const ConfigNode& node, const std::string& key) {
  if (!node.is_table && node.value) std::visit([&](const auto& value) { settings[key] = value; }, *node.value);
  for (const auto& [name, child] : node.children) add_settings(settings, child, key.empty() ? name : key + "." + name);
}

/// By owner, what kernels wait for in a step: as simulated, and with the step's actions launched one by one.
std::string waits_table(const BenchResult& result) {
  std::map<TensorOwner, std::pair<double, double>> waits;
  for (const auto& [owner, seconds] : result.estimated.unhidden) waits[owner].first = seconds;
  for (const auto& [owner, seconds] : result.one_by_one.unhidden) waits[owner].second = seconds;
  if (waits.empty()) return {};
  std::string text =
      fmt::format("{:<32}{:>12}{:>24}\n", "in a step kernels wait for", "estimated", "launched one by one");
  auto line = [&](std::string_view name, double estimated, double measured) {
    text += fmt::format("  {:<30}{:>12}{:>24}\n", name, format_duration(estimated), format_duration(measured));
  };
  for (const auto& [owner, seconds] : waits) line(name_of(owner), seconds.first, seconds.second);
  line("of", result.estimated.total, result.one_by_one.total);
  return text;
}

}  // namespace

std::string bench_table(const BenchResult& result, const DeviceTraits& device) {
  std::string text;
  DeviceTraits measured;
  if (result.peaks) {
    measured = with_measured(device, *result.peaks);
    text = peaks_text(*result.peaks, device);
  }
  text += fmt::format("{:<44}{:<10}{:>8}{:>10}{:>7}{:>10}{:>11}{:>9}", "op", "phase", "launches", "ms", "share", "TB/s",
                      "TFLOP/s", "of rated");
  text += result.peaks ? fmt::format("{:>13}\n", "of measured") : "\n";
  double total = 0;
  for (const OpTime& op : result.ops) total += op.milliseconds;
  for (const OpTime& op : result.ops) {
    double seconds = op.milliseconds / 1e3;
    text += fmt::format("{:<44}{:<10}{:>8}{:>10.3f}{:>6.1f}%", op.op.substr(0, 43), op.phase, op.launches,
                        op.milliseconds, 100 * op.milliseconds / total);
    text += op.tensor_core ? fmt::format("{:>10}{:>11.3g}", "", op.flops / seconds / 1e12)
                           : fmt::format("{:>10.3g}{:>11}", op.bytes / seconds / 1e12, "");
    text += fmt::format("{:>8.0f}%", 100 * share_of_peak(op, device));
    text += result.peaks ? fmt::format("{:>12.0f}%\n", 100 * share_of_peak(op, measured)) : "\n";
  }
  text += fmt::format("\none micro-step and one update, op by op: {:.1f} ms\n", total);
  for (const ScheduleTime& time : result.schedules)
    if (time.estimated > 0)
      text += fmt::format("{}: estimated {}, measured {}, {:.2f} times\n", time.run, format_duration(time.estimated),
                          format_duration(time.measured), time.measured / time.estimated);
  if (result.estimated.total > 0) {
    const double seconds = result.tokens_per_step / result.tokens_per_second;
    text += fmt::format("a step: estimated {}, measured {}, {:.2f} times\n", format_duration(result.estimated.total),
                        format_duration(seconds), seconds / result.estimated.total);
  }
  text += waits_table(result);
  for (const std::string& slow : slow_texts(result.estimated)) text += "slow: " + slow + "\n";
  std::string of_measured = result.peaks ? fmt::format(" ({:.1f}% of measured peaks)", 100 * result.measured_sol) : "";
  text += fmt::format(
      "whole steps: {} tok/s (from {} to {}), SOL {:.1f}%{}, MFU {:.1f}%, device memory {}\n"
      "start to first step {}\n",
      format_count(result.tokens_per_second), format_count(result.slowest), format_count(result.fastest),
      100 * result.sol, of_measured, 100 * result.mfu, format_bytes(result.device_bytes), result.start.text());
  return text;
}

std::string bench_json(const BenchResult& result, const Session& session, const BenchOrigin& origin) {
  nlohmann::ordered_json json = {{"device", session.device->traits().name},
                                 {"quern", QUERN_VERSION},
                                 {"commit", origin.commit},
                                 {"command", origin.command},
                                 {"model", session.config.id("model")},
                                 {"precision", session.config.id("precision")},
                                 {"micro_batch", session.train.micro_batch},
                                 {"sequence", session.train.sequence},
                                 {"accumulation", session.train.accumulation},
                                 {"tokens_per_second", result.tokens_per_second},
                                 {"slowest", result.slowest},
                                 {"fastest", result.fastest},
                                 {"step_seconds", result.step_seconds},
                                 {"sol", result.sol},
                                 {"mfu", result.mfu},
                                 {"device_bytes", result.device_bytes},
                                 {"start_seconds", result.start.total()}};
  for (const auto& [phase, seconds] : result.start.all()) json["start"][phase] = seconds;
  if (result.peaks) {
    json["measured_sol"] = result.measured_sol;
    json["measured_peaks"]["memory"] = result.peaks->memory_rate;
    for (const auto& [format, rate] : result.peaks->matmul_rates)
      json["measured_peaks"][std::string(name_of(format))] = rate;
  }
  json["estimated"]["seconds"] = result.estimated.total;
  for (const auto& [owner, seconds] : result.estimated.unhidden)
    json["estimated"]["waits"][std::string(name_of(owner))] = seconds;
  json["one_by_one"]["seconds"] = result.one_by_one.total;
  for (const auto& [owner, seconds] : result.one_by_one.unhidden)
    json["one_by_one"]["waits"][std::string(name_of(owner))] = seconds;
  for (const OpTime& op : result.ops)
    json["ops"].push_back({{"op", op.op},
                           {"phase", op.phase},
                           {"launches", op.launches},
                           {"format", op.tensor_core ? std::string(name_of(op.format)) : ""},
                           {"milliseconds", op.milliseconds},
                           {"flops", op.flops},
                           {"bytes", op.bytes}});
  // Read back from its text, so that defaults are in it.
  add_settings(json["config"], ConfigDocument::parse(session.config.to_toml(), "config").root(), "");
  return json.dump(1) + "\n";
}

}  // namespace quern::bench
