#include "conformance/report.h"

#include <algorithm>
#include <cstdio>
#include <exception>
#include <utility>

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
  Finding finding{subject_, name, Verdict::broken, {}};
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
  findings_.push_back(std::move(finding));
  return findings_.back().verdict == Verdict::holds;
}

void Report::no_contracts(const std::string& kind) {
  findings_.push_back({subject_, "contracts of its kind", Verdict::skipped, "no contract for kind " + kind + " yet"});
  refused_ = true;
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

std::string Report::text() const {
  auto word = [](Verdict verdict) {
    return verdict == Verdict::holds ? "ok" : verdict == Verdict::broken ? "BROKEN" : "skipped";
  };
  std::size_t width = 8;
  for (const Finding& finding : findings_) width = std::max(width, finding.contract.size());
  std::string text, subject;
  for (const Finding& finding : findings_) {
    if (finding.subject != subject) text += (text.empty() ? "" : "\n") + finding.subject + "\n";
    subject = finding.subject;
    text += "  " + finding.contract + std::string(width - finding.contract.size() + 2, ' ');
    std::string verdict = word(finding.verdict);
    if (!finding.detail.empty()) verdict += std::string(9 - verdict.size(), ' ') + finding.detail;
    text += verdict + "\n";
  }
  return text + "\n" + std::to_string(findings_.size()) + " contracts: " + std::to_string(count(Verdict::holds)) +
         " ok, " + std::to_string(count(Verdict::broken)) + " broken, " + std::to_string(count(Verdict::skipped)) +
         " skipped\n";
}

}  // namespace quern::conformance
