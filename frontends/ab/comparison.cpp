#include "ab/comparison.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace quern::ab {

namespace {

constexpr double kNone = std::numeric_limits<double>::quiet_NaN();

std::vector<double> speeds(const Run& run) {
  std::vector<double> values;
  for (const StepRecord& step : run.log.steps) values.push_back(step.tokens_per_second);
  if (values.size() > 1) values.erase(values.begin());
  return values;
}

/// Of the time of each step but the first, if there are others.
std::vector<double> waiting_shares(const Run& run) {
  std::vector<double> shares;
  for (const StepRecord& step : run.log.steps)
    shares.push_back(step.waited * step.tokens_per_second / static_cast<double>(run.log.tokens_per_step));
  if (shares.size() > 1) shares.erase(shares.begin());
  std::erase_if(shares, [](double share) { return !std::isfinite(share); });
  return shares;
}

// A step whose targets are all masked has no loss.
double mean_of_finite(std::vector<double> values) {
  std::erase_if(values, [](double value) { return !std::isfinite(value); });
  return mean_of(values);
}

double final_loss(const Run& run) {
  const auto& steps = run.log.steps;
  std::vector<double> losses;
  for (std::size_t i = steps.size() - std::min(steps.size(), std::max<std::size_t>(1, steps.size() / 10));
       i < steps.size(); ++i)
    losses.push_back(steps[i].loss);
  return mean_of_finite(losses);
}

double validation_loss(const Run& run) { return run.log.validation_loss.value_or(kNone); }

double gradient_norm(const Run& run) {
  std::vector<double> norms;
  for (const StepRecord& step : run.log.steps) norms.push_back(step.gradient_norm);
  return mean_of_finite(norms);
}

template <class OfRun>
Figure figure(const std::vector<Run>& runs, const std::vector<Run>& base, OfRun of_run) {
  std::vector<double> values, differences;
  for (std::size_t i = 0; i < runs.size(); ++i) {
    if (!runs[i].good()) continue;
    values.push_back(of_run(runs[i]));
    if (i < base.size() && base[i].good()) differences.push_back(values.back() - of_run(base[i]));
  }
  return {mean_of(values), deviation_of(values), mean_of(differences), deviation_of(differences)};
}

void compare_speed(ArmFigures& figures, const std::vector<Run>& runs, const std::vector<Run>& base) {
  std::vector<std::vector<double>> by_run;
  std::vector<double> all, ratios, waiting;
  for (std::size_t i = 0; i < runs.size(); ++i) {
    if (!runs[i].good()) continue;
    by_run.push_back(speeds(runs[i]));
    all.insert(all.end(), by_run.back().begin(), by_run.back().end());
    for (double share : waiting_shares(runs[i])) waiting.push_back(share);
    if (base[i].good()) ratios.push_back(median_speed(runs[i]) / median_speed(base[i]));
  }
  figures.tokens_per_second = median_of(all);
  figures.speed_interval = median_interval(by_run);
  figures.speed_ratio = median_of(ratios);
  figures.waiting = median_of(waiting);
  figures.speed_ratio_range = range_of(ratios);
}

ArmFigures figures_of(const ArmRuns& arm, const std::vector<Run>& base) {
  ArmFigures figures;
  figures.name = arm.arm.name;
  compare_speed(figures, arm.runs, base);
  figures.loss = figure(arm.runs, base, final_loss);
  figures.validation_loss = figure(arm.runs, base, validation_loss);
  figures.gradient_norm = figure(arm.runs, base, gradient_norm);
  for (std::size_t i = 0; i < arm.runs.size(); ++i) {
    const Run& run = arm.runs[i];
    figures.good_runs += run.good();
    if (run.good()) {
      figures.device_bytes = std::max(figures.device_bytes, run.log.device_bytes);
      figures.host_bytes = std::max(figures.host_bytes, run.peak_host_bytes);
    }
    figures.first_differences.emplace_back();
    if (run.good() && base[i].good()) figures.first_differences[i] = first_difference(base[i].log, run.log).value_or(0);
  }
  return figures;
}

}  // namespace

double median_speed(const Run& run) { return median_of(speeds(run)); }

std::vector<ArmFigures> compare(const std::vector<ArmRuns>& arms) {
  std::vector<ArmFigures> figures;
  for (const ArmRuns& arm : arms) figures.push_back(figures_of(arm, arms.front().runs));
  return figures;
}

}  // namespace quern::ab
