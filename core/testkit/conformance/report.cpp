#include "conformance/report.h"

#include <algorithm>
#include <cstdio>
#include <exception>
#include <utility>

#include "base/format.h"

namespace quern::conformance {

void broken(std::string what, std::string got, std::string want) {
  throw Broken{std::move(what), std::move(got), std::move(want)};
}

void need(bool holds, const std::string& what, const std::string& got, const std::string& want) {
  if (!holds) broken(what, got, want);
}

std::string need_refusal(const std::string& what, ErrorCode code, const std::function<void()>& action) {
  const std::string want = "an Error with exit code " + std::to_string(static_cast<int>(code)) + " that says why";
  try {
    action();
  } catch (const Error& error) {
    need(error.code() == code, what,
         "exit code " + std::to_string(static_cast<int>(error.code())) + ": " + error.what(), want);
    need(*error.what() != 0, what, "an Error without a text", want);
    return error.what();
  }
  broken(what, "accepted", want);
}

std::string number(double value) {
  char text[32];
  std::snprintf(text, sizeof text, "%.3g", value);
  return text;
}

bool Report::contract(const std::string& name, const std::function<std::string()>& body) {
  const auto is_in_name = [&](const std::string& part) { return name.find(part) != std::string::npos; };
  if (only_.empty() || std::any_of(only_.begin(), only_.end(), is_in_name)) return needed(name, body);
  left_out_.push_back(name);
  return true;
}

bool Report::needed(const std::string& name, const std::function<std::string()>& body) {
  Finding finding{subject_, name, Verdict::broken, {}};
  if (progress_) progress_->began(subject_, name);
  try {
    finding.detail = body();
    finding.verdict = Verdict::holds;
  } catch (const Broken& fault) {
    finding.detail = fault.what + ": got " + fault.got + ", want " + fault.want;
  } catch (const Skipped& skipped) {
    finding.verdict = Verdict::skipped;
    finding.detail = skipped.reason;
  } catch (const std::exception& error) {
    finding.detail = std::string("got an exception: ") + error.what() + ", want none";
  } catch (...) {
    finding.detail = "got an exception that is no std::exception, want none";
  }
  for (std::size_t at; (at = finding.detail.find('\n')) != std::string::npos;) finding.detail.replace(at, 1, "; ");
  add(std::move(finding));
  return findings_.back().verdict == Verdict::holds;
}

void Report::need_all_named() const {
  std::vector<std::string> names = left_out_;
  for (const Finding& finding : findings_) names.push_back(finding.contract);
  for (const std::string& part : only_)
    if (std::none_of(names.begin(), names.end(),
                     [&](const auto& name) { return name.find(part) != std::string::npos; }))
      throw Error(ErrorCode::config, {.where = "quern plugins check --contract",
                                      .what = "no contract has this in its name",
                                      .found = part,
                                      .expected = "a part of one of " + format_list(names)});
}

void Report::add(Finding finding) {
  findings_.push_back(std::move(finding));
  if (progress_) progress_->ended(findings_.back());
}

void Report::no_contracts(const std::string& kind) {
  const std::string name = "contracts of its kind";
  if (progress_) progress_->began(subject_, name);
  add({subject_, name, Verdict::skipped, "no contract for kind " + kind + " yet"});
}

int Report::count(Verdict verdict) const {
  return static_cast<int>(std::count_if(findings_.begin(), findings_.end(),
                                        [&](const Finding& finding) { return finding.verdict == verdict; }));
}

int Report::exit_code() const {
  if (refused_) return static_cast<int>(ErrorCode::config);
  if (count(Verdict::broken) > 0) return static_cast<int>(ErrorCode::internal);
  return count(Verdict::skipped) > 0 ? static_cast<int>(ErrorCode::resources) : 0;
}

std::string line_start(const std::string& contract) {
  constexpr std::size_t kWidth = 30;  // beyond the longest name
  return "  " + contract + std::string(contract.size() < kWidth ? kWidth - contract.size() : 1, ' ');
}

std::string line_end(const Finding& finding) {
  std::string verdict = finding.verdict == Verdict::holds    ? "ok"
                        : finding.verdict == Verdict::broken ? "BROKEN"
                                                             : "skipped";
  if (!finding.detail.empty()) verdict += std::string(9 - verdict.size(), ' ') + finding.detail;
  return verdict + "\n";
}

std::string Report::text() const {
  std::string text, subject;
  for (const Finding& finding : findings_) {
    if (finding.subject != subject) text += (text.empty() ? "" : "\n") + finding.subject + "\n";
    subject = finding.subject;
    text += line_start(finding.contract) + line_end(finding);
  }
  return text + "\n" + counts();
}

std::string Report::counts() const {
  return std::to_string(findings_.size()) + " contracts: " + std::to_string(count(Verdict::holds)) + " ok, " +
         std::to_string(count(Verdict::broken)) + " broken, " + std::to_string(count(Verdict::skipped)) + " skipped" +
         (left_out_.empty() ? "" : ", " + std::to_string(left_out_.size()) + " left out") + "\n";
}

}  // namespace quern::conformance
