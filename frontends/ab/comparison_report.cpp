// The comparison as tables and as JSON.
#include <algorithm>
#include <cmath>
#include <set>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "ab/comparison.h"
#include "base/format.h"

namespace quern::ab {

namespace {

using Json = nlohmann::ordered_json;
using Row = std::vector<std::string>;

constexpr const char* kAbsent = "-";

std::string speed(double value) { return std::isfinite(value) ? format_count(value) : kAbsent; }
std::string number(double value, int digits) { return std::isfinite(value) ? format_fixed(value, digits) : kAbsent; }

// "4.8123 ± 0.0012", the deviation only where there is one.
std::string with_deviation(double value, double deviation, bool sign) {
  if (!std::isfinite(value)) return kAbsent;
  std::string text = sign ? fmt::format("{:+.5f}", value) : fmt::format("{:.4f}", value);
  return std::isfinite(deviation) ? text + fmt::format(" ± {:.5f}", deviation) : text;
}

std::string percent(double ratio) {
  return std::isfinite(ratio) ? fmt::format("{:+.1f}%", 100 * (ratio - 1)) : kAbsent;
}

std::string from_to(const std::string& low, const std::string& high) {
  return low == kAbsent ? low : low + " to " + high;
}

std::string bytes(std::int64_t count) { return count > 0 ? format_bytes(count) : kAbsent; }

std::string first_steps(const ArmFigures& figures) {
  std::set<std::int64_t> steps;
  for (const auto& step : figures.first_differences)
    if (step) steps.insert(*step);
  std::string text;
  for (std::int64_t step : steps) text += (text.empty() ? "" : ", ") + (step > 0 ? std::to_string(step) : "none");
  return text.empty() ? kAbsent : text;
}

std::size_t width_of(const std::string& text) {  // of UTF-8: code points
  return static_cast<std::size_t>(
      std::count_if(text.begin(), text.end(), [](char c) { return (static_cast<unsigned char>(c) & 0xc0) != 0x80; }));
}

// A cell holds what would end it: a value may have a bar or a line end.
std::string cell(std::string text) {
  std::string safe;
  for (char c : text) {
    if (c == '|') safe += '\\';
    safe += static_cast<unsigned char>(c) < 0x20 ? ' ' : c;
  }
  return safe;
}

std::string table(std::vector<Row> rows) {
  std::vector<std::size_t> widths(rows[0].size());
  for (Row& row : rows)
    for (std::size_t i = 0; i < row.size(); ++i) {
      row[i] = cell(row[i]);
      widths[i] = std::max(widths[i], width_of(row[i]));
    }
  std::string text;
  for (std::size_t r = 0; r < rows.size(); ++r) {
    for (std::size_t i = 0; i < widths.size(); ++i) {
      std::string padding(widths[i] - width_of(rows[r][i]), ' ');
      text += i == 0 ? "| " + rows[r][i] + padding : " | " + padding + rows[r][i];
    }
    text += " |\n";
    if (r > 0) continue;
    for (std::size_t i = 0; i < widths.size(); ++i)
      text += (i == 0 ? "| " : " | ") + std::string(widths[i] - (i > 0), '-') + (i > 0 ? ":" : "");
    text += " |\n";
  }
  return text;
}

std::string speed_table(const std::vector<ArmFigures>& arms) {
  std::vector<Row> rows{{"arm", "runs", "tokens/s", "95% interval", "against the first", "least to most",
                         "device memory", "host memory"}};
  const bool ranks =
      std::any_of(arms.begin(), arms.end(), [](const ArmFigures& a) { return std::isfinite(a.waiting); });
  if (ranks) rows[0].push_back("waiting for ranks");
  for (const ArmFigures& arm : arms) {
    bool first = &arm == &arms.front();
    rows.push_back({arm.name, std::to_string(arm.good_runs), speed(arm.tokens_per_second),
                    from_to(speed(arm.speed_interval.low), speed(arm.speed_interval.high)),
                    first ? kAbsent : percent(arm.speed_ratio),
                    first ? kAbsent : from_to(percent(arm.speed_ratio_range.low), percent(arm.speed_ratio_range.high)),
                    bytes(arm.device_bytes), bytes(arm.host_bytes)});
    if (ranks) rows.back().push_back(std::isfinite(arm.waiting) ? fmt::format("{:.1f}%", 100 * arm.waiting) : kAbsent);
  }
  return table(rows);
}

std::string numbers_table(const std::vector<ArmFigures>& arms) {
  std::vector<Row> rows{{"arm", "training loss", "difference", "validation loss", "difference", "gradient norm",
                         "difference", "first step that differs"}};
  for (const ArmFigures& arm : arms) {
    Row row{arm.name};
    for (const Figure* figure : {&arm.loss, &arm.validation_loss, &arm.gradient_norm}) {
      row.push_back(with_deviation(figure->mean, figure->deviation, false));
      row.push_back(&arm == &arms.front() ? kAbsent
                                          : with_deviation(figure->difference, figure->difference_deviation, true));
    }
    row.push_back(&arm == &arms.front() ? kAbsent : first_steps(arm));
    rows.push_back(row);
  }
  const ArmFigures& first = arms.front();
  rows.push_back({"seed to seed, first arm", number(first.loss.deviation, 5), "",
                  number(first.validation_loss.deviation, 5), "", number(first.gradient_norm.deviation, 5), "", ""});
  return table(rows);
}

std::vector<std::string> remarks(const ComparisonHead& head, const std::vector<ArmRuns>& arms) {
  std::vector<std::string> lines;
  std::set<std::int64_t> tokens;
  auto take = [&](const std::string& name, const Run& run) {
    if (run.good()) tokens.insert(run.log.tokens_per_step);
    if (!run.good())
      lines.push_back(
          fmt::format("FAILED: `{}`, seed {}, after step {}, with {}: {}", name, run.seed,
                      run.log.steps.empty() ? 0 : run.log.steps.back().step,
                      run.code > 128 ? fmt::format("signal {}", run.code - 128) : fmt::format("exit code {}", run.code),
                      run.message.empty() ? "no message" : run.message));
  };
  for (const ArmRuns& arm : arms)
    for (const Run& run : arm.runs) take(arm.arm.name, run);
  if (tokens.size() > 1)
    lines.emplace_back(
        "The arms differ in tokens a step: the same step is not the same data, and losses at the end "
        "are not after the same number of tokens.");
  if (head.repeats < 2) lines.emplace_back("One repeat: no spread over seeds, so no difference can be judged.");
  return lines;
}

Json json_number(double value) { return std::isfinite(value) ? Json(value) : Json(nullptr); }

Json json_of(const Figure& figure) {
  return {{"mean", json_number(figure.mean)},
          {"deviation", json_number(figure.deviation)},
          {"difference", json_number(figure.difference)},
          {"difference_deviation", json_number(figure.difference_deviation)}};
}

Json json_of(const Interval& interval) { return Json::array({json_number(interval.low), json_number(interval.high)}); }

Json json_of(const Run& run, const std::optional<std::int64_t>& first_difference) {
  Json json{{"seed", run.seed},
            {"directory", run.directory},
            {"exit_code", run.code},
            {"message", run.message},
            {"steps", run.log.steps.size()},
            {"seconds", run.seconds},
            {"peak_host_bytes", run.peak_host_bytes},
            {"device_bytes", run.log.device_bytes},
            {"tokens_per_step", run.log.tokens_per_step}};
  json["first_difference"] = first_difference ? Json(*first_difference) : Json(nullptr);
  return json;
}

}  // namespace

std::string comparison_markdown(const ComparisonHead& head, const std::vector<ArmRuns>& arms) {
  std::vector<ArmFigures> figures = compare(arms);
  std::string text = fmt::format("# Comparison of {}\n\nquern {}, {} {} of each arm, interleaved.\n\n", head.config,
                                 head.quern, head.repeats, head.repeats == 1 ? "run" : "runs");
  text += speed_table(figures);
  text +=
      "\nTokens/s: median over the steps of all runs without each run's first; the interval is of that median, by "
      "bootstrap over\nruns and their steps. Against the first arm: median, least and most over the repeats of "
      "median speed by median speed.\nDevice memory is the plan's; host memory the process's peak.\n";
  if (std::any_of(figures.begin(), figures.end(), [](const ArmFigures& arm) { return std::isfinite(arm.waiting); }))
    text +=
        "Waiting for ranks: share of a step in which the compute stream waits for collectives, on the rank that waits "
        "least; median. Unhidden:\nhow much longer the median step is than steps with no-op collectives at the run's "
        "end; median over runs.\n";
  text += "\n";
  text += numbers_table(figures);
  text +=
      "\nTraining loss: mean over the last tenth of the steps. Gradient norm: mean over all steps, before clipping. "
      "Differences are\nfrom the first arm's run with the same seed; ± is the sample standard deviation over seeds. "
      "First step that differs: in any\nbit of the loss, for each seed; none: all bits are the same.\n";
  for (const std::string& line : remarks(head, arms)) text += "\n" + line + "\n";
  return text;
}

std::string comparison_json(const ComparisonHead& head, const std::vector<ArmRuns>& arms) {
  Json json{{"config", head.config}, {"quern", head.quern}, {"repeats", head.repeats}, {"arms", Json::array()}};
  std::vector<ArmFigures> figures = compare(arms);
  for (std::size_t i = 0; i < arms.size(); ++i) {
    const ArmFigures& arm = figures[i];
    Json runs = Json::array();
    for (std::size_t r = 0; r < arms[i].runs.size(); ++r)
      runs.push_back(json_of(arms[i].runs[r], arm.first_differences[r]));
    json["arms"].push_back({{"name", arm.name},
                            {"overrides", arms[i].arm.overrides},
                            {"good_runs", arm.good_runs},
                            {"tokens_per_second", json_number(arm.tokens_per_second)},
                            {"tokens_per_second_interval", json_of(arm.speed_interval)},
                            {"speed_ratio", json_number(arm.speed_ratio)},
                            {"speed_ratio_range", json_of(arm.speed_ratio_range)},
                            {"waiting", json_number(arm.waiting)},
                            {"device_bytes", arm.device_bytes},
                            {"peak_host_bytes", arm.host_bytes},
                            {"training_loss", json_of(arm.loss)},
                            {"validation_loss", json_of(arm.validation_loss)},
                            {"gradient_norm", json_of(arm.gradient_norm)},
                            {"runs", runs}});
  }
  return json.dump(1, ' ', false, Json::error_handler_t::replace) + "\n";
}

}  // namespace quern::ab
