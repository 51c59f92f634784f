// What a check is: which contracts run, settings, expected values, and plugins without a fault. The tree's own are
// checked by a test each (CMakeLists.txt).
#include "checked.h"

#include <cstdint>
#include <fstream>
#include <iterator>
#include <set>
#include <sstream>

#include <doctest/doctest.h>

#include "base/files/test_directory.h"
#include "run/options/run_schemas.h"
#include "test_paths.h"

using namespace quern;
using namespace quern::conformance;

namespace {

/// Names of contracts in docs/conformance.md: in the first columns of its tables, and in italics.
std::set<std::string> documented() {
  std::ifstream page(QUERN_SOURCE_DIR "/docs/conformance.md");
  std::set<std::string> names;
  std::string text;
  for (std::string line; std::getline(page, line);) {
    if (!line.starts_with("| ")) {
      text += line + " ";
      continue;
    }
    std::istringstream cell(line.substr(2, line.find(" |", 2) - 2));
    for (std::string name; std::getline(cell >> std::ws, name, ',');) names.insert(name);
  }
  for (std::size_t at = 0; (at = text.find('*', at)) != text.npos;) {
    const std::size_t end = text.find('*', at + 1);
    if (end == text.npos) break;
    names.insert(text.substr(at + 1, end - at - 1));
    at = end + 1;
  }
  return names;
}

}  // namespace

TEST_CASE("contracts by parts of their names run with those that they need, and unknown ones are refused") {
  PluginHost host = run_host();
  CheckOptions options;
  options.only = {"bf16", "finite"};
  CHECK_THROWS_WITH_AS(check(host, "model/llama", options),
                       doctest::Contains("no contract has this in its name: found finite, expected "), Error);
  options.only = {"bf16", "causal"};
  const Report report = check(host, "model/llama", options);
  std::vector<std::string> names;
  for (const Finding& finding : report.findings()) names.push_back(finding.contract);
  CHECK(names == std::vector<std::string>{"made", "parameters and shapes", "causal", "bf16"});
  CHECK(report.counts() == "4 contracts: 4 ok, 0 broken, 0 skipped, 14 left out\n");
}

TEST_CASE("expected values are written and compared, and a difference is named") {
  const TestDirectory directory;
  const std::string file = directory / "expected.json";
  auto expecting = [&](bool write, std::vector<std::string> settings) {
    PluginHost host = run_host();
    CheckOptions options;
    options.settings = std::move(settings);
    options.expected = file;
    options.write_expected = write;
    return check(host, "schedule/cosine", options);
  };
  auto contents = [&] {
    std::ifstream stream(file);
    return std::string{std::istreambuf_iterator<char>(stream), {}};
  };
  const Report lacking = expecting(false, {});
  CHECK(lacking.text().find("cannot be read") != std::string::npos);
  CHECK(lacking.exit_code() == static_cast<int>(ErrorCode::internal));
  check_sound(expecting(true, {}));
  const std::string once = contents();
  CHECK(once.find("\"schedule/cosine\"") != std::string::npos);
  check_sound(expecting(false, {}));
  check_sound(expecting(true, {}));
  CHECK(contents() == once);  // cases that are there are kept
  const Report other = expecting(false, {"warmup=3"});
  const std::string text = other.text();
  CAPTURE(text);
  CHECK(other.count(Verdict::broken) == 1);
  CHECK(text.find("factors at steps") != std::string::npos);
  std::ofstream(file) << "{\"schedule/cosine\": {\"cases\": [{\"sets\": []}]}}";
  CHECK(expecting(false, {}).text().find("expected \"cases\", each with \"set\"") != std::string::npos);
  std::ofstream(file) << "{";
  CHECK(expecting(false, {}).text().find("is no JSON object") != std::string::npos);
  std::ofstream(file) << "{\"schedule/cosine\": {\"cases\": [{\"set\": [\"no=1\"], \"gives\": {}}]}}";
  CHECK(expecting(false, {}).text().find("no such option") != std::string::npos);
}

TEST_CASE("expected values tell two tensors of one size apart by their names") {
  const TestDirectory directory;
  auto text_of = [&](bool write, std::vector<std::string> settings) {
    PluginHost host = run_host();
    CheckOptions options;
    options.settings = std::move(settings);
    options.expected = directory / "expected.json";
    options.write_expected = write;
    return check(host, broken_plugin("model", "exchanged_names"), options).text();
  };
  text_of(true, {"fault=0"});
  CHECK(text_of(false, {"fault=0"}).find("weights by their names") == std::string::npos);
  CHECK(text_of(false, {"fault=1"}).find("weights by their names") != std::string::npos);
}

TEST_CASE("sound plugins of other kinds") {
  check_sound(checked("optimizer", "ratio"));
  check_sound(checked("offload", "sound"));
  check_sound(checked("communicator", "sound"));
  for (const char* builtin : {"optimizer/adamw", "schedule/cosine", "log/jsonl", "log/console"}) {
    CAPTURE(builtin);
    PluginHost host = run_host();
    check_sound(check(host, builtin, {}));
  }
}

TEST_CASE("the page says every contract") {
  const std::set<std::string> names = documented();
  std::vector<Report> reports;
  for (const auto& [kind, id] :
       {std::pair("model", "some_sizes"), std::pair("optimizer", "ratio"), std::pair("log", "loses_events"),
        std::pair("offload", "sound"), std::pair("communicator", "sound")})
    reports.push_back(checked(kind, id));
  PluginHost host = run_host();
  for (const std::string& what :
       {std::string("schedule/cosine"), std::string(QUERN_BUILD_DIR "/plugins/precision/libquern_fp32.so")})
    reports.push_back(check(host, what, {}));
  for (const Report& report : reports)
    for (const Finding& finding : report.findings()) {
      CAPTURE(finding.subject);
      CAPTURE(finding.contract);
      CHECK(names.contains(finding.contract));
    }
}

TEST_CASE("settings reach the plugin, and bad ones are refused") {
  PluginHost host = run_host();
  CheckOptions options;
  options.settings = {"moments=bf16"};
  const Report report = check(host, "optimizer/adamw", options);
  CHECK(report.text().find("moments = \"bf16\"") != std::string::npos);
  CHECK(report.exit_code() == 0);
  options.settings = {"momentum=1"};
  CHECK_THROWS_WITH_AS(check(host, "optimizer/adamw", options), doctest::Contains("momentum"), Error);
}

TEST_CASE("a dataset is checked on data that are named, and skipped without") {
  PluginHost host = run_host();
  const Report skipped = check(host, "data/tokens", {});
  CHECK(skipped.text().find("no data") != std::string::npos);
  CHECK(skipped.exit_code() == static_cast<int>(ErrorCode::resources));
  const TestDirectory directory;
  const std::string file = directory / "tokens.bin";
  std::vector<std::uint16_t> tokens;
  for (std::uint32_t i = 0; i < 1000; ++i) tokens.push_back(static_cast<std::uint16_t>(i * 7919 % 97));
  std::ofstream(file, std::ios::binary).write(reinterpret_cast<const char*>(tokens.data()), 2000);
  CheckOptions options;
  options.settings = {"train=\"" + file + "\"", "validation=\"" + file + "\"", "format=uint16", "separator=5"};
  check_sound(check(host, "data/tokens", options));
}

TEST_CASE("a file that is refused says so and does not pass") {
  PluginHost host = run_host();
  for (const char* path : {"no/such/libquern_file.so", "no/such"}) {
    const Report absent = check(host, path, {});
    CHECK(absent.text().find("found no file, expected a regular file") != std::string::npos);
    CHECK(absent.exit_code() == static_cast<int>(ErrorCode::config));
  }
  const Report misnamed = check(host, std::string(QUERN_BUILD_DIR) + "/build.ninja", {});
  CHECK(misnamed.text().find("expected libquern_<id>.so") != std::string::npos);
  CHECK_THROWS_WITH_AS(check(host, "model/lama", {}), doctest::Contains("llama"), Error);
}
