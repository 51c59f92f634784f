#include "checked.h"

#include <filesystem>

#include <doctest/doctest.h>

#include "run/options/run_schemas.h"
#include "test_paths.h"

namespace quern::conformance {

std::string broken_plugin(const std::string& kind, const std::string& id) {
  const std::filesystem::path folder = std::filesystem::path(QUERN_BUILD_DIR) / "tests" / "conformance";
  return (folder / kind / ("libquern_" + id + ".so")).string();
}

Report checked(const std::string& kind, const std::string& id, const std::vector<std::string>& only) {
  return checked_with(kind, id, {}, only);
}

Report checked_with(const std::string& kind, const std::string& id, const std::vector<std::string>& settings,
                    const std::vector<std::string>& only) {
  PluginHost host = run_host();
  CheckOptions options;
  options.only = only;
  options.settings = settings;
  return check(host, broken_plugin(kind, id), options);
}

void check_broken(const std::string& kind, const std::string& id, const std::vector<std::string>& contracts,
                  const std::vector<std::string>& parts, const std::vector<std::string>& only) {
  const Report report = checked(kind, id, only);
  const std::string text = report.text();
  CAPTURE(text);
  std::vector<std::string> names;
  for (const Finding& finding : report.findings()) {
    if (finding.verdict == Verdict::broken) names.push_back(finding.contract);
    if (finding.verdict != Verdict::broken || names.size() > 1) continue;
    for (const std::string& part : parts) {
      CAPTURE(part);
      CHECK(finding.detail.find(part) != std::string::npos);
    }
  }
  CHECK(names == contracts);
  CHECK(report.exit_code() == static_cast<int>(ErrorCode::internal));
}

void check_setting(const std::string& kind, const std::string& id, const std::string& setting,
                   const std::string& contract, const std::string& part) {
  const Report report = checked_with(kind, id, {setting});
  const std::string text = report.text();
  CAPTURE(text);
  CHECK(report.count(Verdict::broken) == 1);
  for (const Finding& finding : report.findings()) {
    if (finding.verdict != Verdict::broken) continue;
    CHECK(finding.contract == contract);
    CHECK(finding.detail.find(part) != std::string::npos);
  }
}

void check_sound(const Report& report) {
  const std::string text = report.text();
  CAPTURE(text);
  CHECK(report.count(Verdict::holds) > 3);
  CHECK(report.count(Verdict::holds) == static_cast<int>(report.findings().size()));
  CHECK(report.exit_code() == 0);
}

}  // namespace quern::conformance
