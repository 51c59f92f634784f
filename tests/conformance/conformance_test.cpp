// Each plugin in broken/ has one fault, and the kit must name the contract that it breaks, with got and want. Sound
// ones of kinds that the tree has no plugin of must pass; the tree's own are checked by a test each (CMakeLists.txt).
#include "conformance/check.h"

#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <iterator>
#include <set>
#include <sstream>

#include <doctest/doctest.h>

#include "base/files/test_directory.h"
#include "conformance/device_ops.h"
#include "quern/testkit/forwarding_device.h"
#include "run/options/run_schemas.h"
#include "test_paths.h"

using namespace quern;
using namespace quern::conformance;

namespace {

const std::filesystem::path kFolder = std::filesystem::path(QUERN_BUILD_DIR) / "tests" / "conformance";

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

/// `only`: parts of contracts' names; empty: all contracts.
Report checked(const std::string& kind, const std::string& id, const std::vector<std::string>& only = {}) {
  PluginHost host = run_host();
  CheckOptions options;
  options.only = only;
  return check(host, (kFolder / kind / ("libquern_" + id + ".so")).string(), options);
}

/// Exactly these contracts are broken, of all or of `only`, and the first says all of `parts`.
void check_broken(const std::string& kind, const std::string& id, const std::vector<std::string>& contracts,
                  const std::vector<std::string>& parts, const std::vector<std::string>& only = {}) {
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

/// Exactly this contract of the plugin is broken with this setting, and says so.
void check_setting(const std::string& kind, const std::string& id, const std::string& setting,
                   const std::string& contract, const std::string& part) {
  PluginHost host = run_host();
  CheckOptions options;
  options.settings = {setting};
  const Report report = check(host, (kFolder / kind / ("libquern_" + id + ".so")).string(), options);
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

/// A device whose kernels do not know an attribute.
class Ignoring final : public testkit::ForwardingDevice {
 public:
  Ignoring(std::shared_ptr<Device> inner, std::string attribute)
      : ForwardingDevice(std::move(inner)), attribute_(std::move(attribute)) {}
  std::unique_ptr<Kernel> prepare(const OpInstance& op) override {
    if (op.kind == "soft_cap") return ForwardingDevice::prepare(op);  // nothing but its cap
    OpInstance plain = op;
    plain.attributes = {};
    for (const auto& [name, value] : op.attributes.all())
      if (name != attribute_) plain.attributes.set(name, value);
    return ForwardingDevice::prepare(plain);
  }

 private:
  std::string attribute_;
};

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

TEST_CASE("a scale of the wrong operand") {
  check_broken("precision", "wrong_scale", {"linear", "odd sizes", "magnitudes", "gradients"},
               {"relative error of y", "got ", "want at most", "e4m3"});
}

TEST_CASE("state that a checkpoint does not have") {
  check_broken("precision", "loses_state", {"save and restore"}, {"after a restart", "got ", "want "});
}

TEST_CASE("infinities that vanish") {
  check_broken("precision", "swallows_infinity", {"infinities"}, {"inf in x", "want one that is not finite"});
}

TEST_CASE("evaluations without biases") {
  check_broken("precision", "no_bias_evaluated", {"linear", "odd sizes", "gradients"},
               {"relative error of y of a linear", "evaluated", "got ", "want at most"});
}

TEST_CASE("a model that sees the future") {
  check_broken("model", "sees_future", {"causal"}, {"targets before and beside position", "bit for bit"});
}

TEST_CASE("a wrong backward rule") {
  check_broken("model", "wrong_gradient", {"gradients"},
               {"gradient of embedding.weight", "got ", "by finite differences"});
}

TEST_CASE("a parameter whose parts do not fill it") {
  check_broken("model", "wrong_shape", {"parameters and shapes"}, {"embedding.weight: rows of its parts"});
}

// All ops of a device take half a minute: its faults are looked for among contracts that they could break.
const std::vector<std::string> kOps{"op "}, kModels{"fusions", "models", "8 bits"},
    kDevice{"memory", "work of the host", "events", "capture", "observation", "timed choices"};

TEST_CASE("an op that writes behind its output") {
  check_broken("device", "overrun", {"op add, swiglu, gelu, sums"}, {"add(", "written behind output 0"}, kOps);
}

TEST_CASE("an op that leaves elements of odd sizes unwritten") {
  check_broken("device", "short_tail", {"op add, swiglu, gelu, sums"}, {"swiglu(", "nan", "want "}, kOps);
}

TEST_CASE("an op that errs at one size, in 8 bits only") {
  check_broken("device", "half_codes", {"fusions", "models"}, {"in e4m3"}, kModels);
}

TEST_CASE("attention that sees beyond its window, and scores and logits without their caps") {
  struct Case {
    const char *attribute, *family;
  };
  PluginHost host = run_host();
  const std::unique_ptr<Device> reference = oracle(host);
  for (const Case& c : {Case{"window", "attention"}, {"cap", "attention"}, {"cap", "soft caps of logits"}}) {
    CAPTURE(c.attribute);
    CAPTURE(c.family);
    const auto family = std::ranges::find(op_families(), c.family, &OpFamily::name);
    REQUIRE(family != op_families().end());
    Ignoring device(oracle(host), c.attribute);
    CHECK_NOTHROW(compare_family(*family, *reference, device.inner()));
    CHECK_THROWS_AS(compare_family(*family, *reference, device), Broken);
  }
}

TEST_CASE("a stream that does not wait for an event") {
  check_broken("device", "no_wait", {"events"}, {"a copy on a stream that waits", "got ", "want 16"}, kDevice);
}

TEST_CASE("a host that does not wait for an event") {
  check_broken("device", "early_host", {"events"}, {"synchronize() of the event", "got ", "want 16"}, kDevice);
}

TEST_CASE("a log sink that keeps events back, and an option without help") {
  check_broken("log", "keeps_back", {"describes itself", "flushes", "no run directory", "events leave nothing"},
               {"help of option unused"});
}

TEST_CASE("a store that rounds offsets") {
  check_broken("offload", "rounds_offset", {"parts of a slot", "streams", "neighbouring parts"}, {"got ", "want "});
}

TEST_CASE("a store that does not wait for the stream") {
  check_broken("offload", "at_once", {"streams"}, {"a get behind a late put on another stream, byte 0"});
}

TEST_CASE("a store whose flush does not wait") {
  check_broken("offload", "never_flushes", {"flush"}, {"a get on another stream behind flush", "want 93"});
}

TEST_CASE("a config.json without one of the options") {
  check_broken("model", "forgets_option", {"config.json"}, {"scale", "other parameters or programs"});
}

TEST_CASE("scratch that launches share") {
  check_sound(checked("model", "shared_scratch"));
  for (const auto& [fault, part] : {std::pair("fault=1", "kernel_copy, launch "),
                                    {"fault=2", "process_copy, launch "},
                                    {"fault=3", "exclusive_copy, launch "}}) {
    PluginHost host = run_host();
    CheckOptions options;
    options.settings = {fault};
    const Report report = check(host, (kFolder / "model" / "libquern_shared_scratch.so").string(), options);
    const std::string text = report.text();
    CAPTURE(text);
    CHECK(report.count(Verdict::broken) == 2);  // own ops in f32 and in bf16
    CHECK(text.find(part) != std::string::npos);
    CHECK(text.find("while other ops run, and the same on another device: got other bits") != std::string::npos);
  }
}

TEST_CASE("a collective that hands on whole packs only") {
  check_broken("communicator", "short_gather", {"all_gather", "buffers used again"}, {"elements of f32", "nan"});
}

TEST_CASE("a sum in another order than it says") {
  check_broken("communicator", "backwards_sum", {"all_reduce sum", "reduce_scatter"},
               {"rank 0 of 3", "all_reduce of ", "elements of f32"});
}

TEST_CASE("a communicator that keeps its faults to itself") {
  check_broken("communicator", "silent",
               {"abort", "a call that differs", "a call that a rank leaves out", "a rank that is late",
                "a rank that is stopped", "a rank that is killed", "a rank that aborts"},
               {"error() after abort()", "got nothing"});
}

TEST_CASE("an update op that looks at more than it states") {
  for (const char* locality : {"element", "row"}) {
    PluginHost host = run_host();
    CheckOptions options;
    options.settings = {"locality=" + std::string(locality)};
    const Report report = check(host, (kFolder / "optimizer" / "libquern_ratio.so").string(), options);
    const std::string text = report.text();
    CAPTURE(text);
    CHECK(report.count(Verdict::broken) == 1);
    CHECK(text.find("op ratio_update_" + std::string(locality) + ", which states locality " + locality) !=
          std::string::npos);
    CHECK(text.find("after a change of gradient's element") != std::string::npos);
  }
}

TEST_CASE("an update that leaves the last element of a tensor") {
  PluginHost host = run_host();
  CheckOptions options;
  options.settings = {"tail=true"};
  const Report report = check(host, (kFolder / "optimizer" / "libquern_ratio.so").string(), options);
  const std::string text = report.text();
  CAPTURE(text);
  CHECK(report.count(Verdict::broken) == 1);
  CHECK(text.find("after a step whose gradients are large everywhere") != std::string::npos);
}

TEST_CASE("bf16 masters that are not rounded by chance, and by one draw for all elements") {
  check_setting("optimizer", "ratio", "masters=nearest", "masters in bf16", "roundings of a bf16 master's elements");
  check_setting("optimizer", "ratio", "masters=one", "masters in bf16", "roundings of a bf16 master's elements");
}

TEST_CASE("trainings that share a counter") {
  PluginHost host = run_host();
  CheckOptions options;
  options.settings = {"shared=true"};
  const Report report = check(host, (kFolder / "optimizer" / "libquern_ratio.so").string(), options);
  const std::string text = report.text();
  CAPTURE(text);
  CHECK(text.find("after three steps with another training beside it") != std::string::npos);
}

TEST_CASE("a store that passes over a put of one byte") {
  check_broken("offload", "drops_byte", {"put and get"}, {"a slot of 1 bytes, byte 0", "got 0"});
}

TEST_CASE("a store that works no longer where memory ran out once") {
  check_broken("offload", "keeps_size", {"memory that runs out"}, {"allocation 1 of the device fails", "got "});
}

TEST_CASE("a store of which all streams share a buffer") {
  check_broken("offload", "one_buffer", {"streams at once"}, {"a put and a get beside another stream's"});
}

TEST_CASE("a store of which ranks share a file") {
  check_broken("offload", "forgets_rank", {"ranks"}, {"a slot of rank 1 before its first put"});
}

TEST_CASE("a store that passes over failing writes and reads, or leaves its file") {
  check_sound(checked("offload", "in_file"));
  check_setting("offload", "in_file", "fault=writes", "writes that fail",
                "files may have 0 bytes, and error() says nothing");
  check_setting("offload", "in_file", "fault=reads", "reads that fail",
                "a get whose reads fail, and error() says nothing");
  check_setting("offload", "in_file", "fault=file", "stores leave nothing", "the run's folder after 200 times");
  PluginHost host = run_host();
  CheckOptions options;
  options.settings = {"fault=ends"};
  const std::string text = check(host, (kFolder / "offload" / "libquern_in_file.so").string(), options).text();
  CAPTURE(text);
  CHECK(text.find("files may have 1048576 bytes, and error() says nothing") != std::string::npos);
  CHECK(text.find("a get from a file that ends early, and error() says nothing") != std::string::npos);
}

TEST_CASE("a store that ends where memory runs out says so, and need do nothing more") {
  check_sound(checked("offload", "gives_up"));
}

TEST_CASE("groups that need an exchange for one rank, or leave something behind") {
  check_setting("communicator", "leaves", "fault=file", "groups leave nothing",
                "open files after 60 times a group of 1");
  check_setting("communicator", "leaves", "fault=memory", "groups leave nothing",
                "allocations of the device by a group that is gone: got 1 not released");
  check_setting("communicator", "leaves", "fault=exchange", "without address or exchange", "bad_function_call");
}

TEST_CASE("an op that is taken only where it adds up is checked there") {
  check_sound(checked("model", "sums_only"));
  for (const auto& [fault, part] :
       {std::pair("fault=1", "heap after 1000 times shift_grad"), {"fault=2", "shift_grad, output 0 that adds up"}}) {
    PluginHost host = run_host();
    CheckOptions options;
    options.settings = {fault};
    const std::string text = check(host, (kFolder / "model" / "libquern_sums_only.so").string(), options).text();
    CAPTURE(text);
    CHECK(text.find(part) != std::string::npos);
  }
}

TEST_CASE("a tensor with a layer's name, or with none") {
  check_setting("model", "wrong_names", "fault=1", "parameters and shapes", "used twice: layers.1.attn_norm.weight");
  check_setting("model", "wrong_names", "fault=2", "parameters and shapes", "a part without a Hugging Face name");
}

TEST_CASE("blocks that have no guard are counted") {
  const Report report = checked("schedule", "many_blocks");
  check_sound(report);
  CHECK(report.text().find(" are not, beyond the most at a time") != std::string::npos);
}

TEST_CASE("a store whose puts wait for the stream") {
  check_broken("offload", "waits", {"calls that enqueue"}, {"9 calls behind work that is late"});
}

TEST_CASE("calls that leave memory or files behind") {
  check_setting("offload", "leaks", "kept=memory", "calls leave nothing", "heap after 1000 times put and get");
  check_setting("offload", "leaks", "kept=unflushed", "calls leave nothing", "heap after 1000 times put and get");
  check_setting("offload", "leaks", "kept=files", "calls leave nothing", "open files after 1000 times");
  check_setting("offload", "leaks", "kept=opened", "stores leave nothing", "open files after 200 times a store opened");
  check_setting("offload", "leaks", "kept=pinned", "stores leave nothing",
                "allocations of the device by a store that is gone: got 1 not released");
}

TEST_CASE("a log sink that loses its events where it cannot write") {
  check_broken("log", "loses_events", {"no run directory"},
               {"a run directory that is not there", "accepted, and its files are lost"});
}

TEST_CASE("a communicator whose abort leaves no fault") {
  check_broken("communicator", "deaf", {"abort"}, {"error() after abort()", "got nothing"});
}

TEST_CASE("a schedule that is no number at one step of ten thousand, with an option that nothing reads") {
  check_broken("schedule", "late_nan", {"factors", "options"}, {"factor of step 8999 of 10000", "nan"});
}

TEST_CASE("gradients that are wrong with another value of an option") {
  check_broken("model", "wrong_when_scaled", {"gradients of variants"}, {"with power = 1.5", "by finite differences"});
}

TEST_CASE("a communicator that takes memory that is not registered") {
  check_broken("communicator", "any_memory", {"memory that is not registered"},
               {"all_reduce of memory that is not registered", "accepted"});
}

TEST_CASE("a store that keeps the size of memory that it has seen") {
  // Others break too where the allocator gives an address again.
  const std::string text = checked("offload", "knows_memory").text();
  CAPTURE(text);
  CHECK(text.find("a put of 5000 bytes at byte 0 of a block, byte 100: got 0") != std::string::npos);
}

TEST_CASE("rounding by chance with one draw for a row, and rounding that is always up") {
  check_setting("precision", "draws_once", "draws=row", "rounding", "roundings in drawn_rows of x");
  check_setting("precision", "draws_once", "draws=none", "rounding", "the mean is");
}

TEST_CASE("integers of fewer steps than their stated format has, and of more") {
  auto report_of = [](const std::string& format, int largest) {
    PluginHost host = run_host();
    CheckOptions options;
    options.settings = {"format=" + format, "largest=" + std::to_string(largest)};
    return check(host, (kFolder / "precision" / "libquern_coarse_codes.so").string(), options);
  };
  check_sound(report_of("i8", 127));
  check_sound(report_of("i4", 7));
  for (const auto& [format, largest] : {std::pair("i8", 12), std::pair("i4", 2)}) {
    const Report report = report_of(format, largest);
    const std::string text = report.text();
    CAPTURE(text);
    const auto first = std::find_if(report.findings().begin(), report.findings().end(),
                                    [](const Finding& finding) { return finding.verdict == Verdict::broken; });
    REQUIRE(first != report.findings().end());
    CHECK(first->contract == "linear");
    CHECK(first->detail.find("relative error of y") != std::string::npos);
    CHECK(first->detail.find(std::string("for ") + format) != std::string::npos);
  }
  const Report beyond = report_of("i4", 9);
  const std::string text = beyond.text();
  CAPTURE(text);
  CHECK(beyond.count(Verdict::broken) == 1);
  CHECK(text.find("at most 7 in magnitude, the largest of its format") != std::string::npos);
}

TEST_CASE("states that grow without bound, and sums that forget what was there or always add") {
  check_sound(checked("model", "bad_state"));
  check_setting("model", "bad_state", "fault=1", "states", "finite numbers");
  // Both own ops in f32 and in bf16; sums that are always added to are not in a checkpoint.
  for (const auto& [fault, contracts] : {std::pair("fault=2", 2), std::pair("fault=3", 3)}) {
    PluginHost host = run_host();
    CheckOptions options;
    options.settings = {fault};
    const Report report = check(host, (kFolder / "model" / "libquern_bad_state.so").string(), options);
    const std::string text = report.text();
    CAPTURE(text);
    CHECK(report.count(Verdict::broken) == contracts);
    CHECK(text.find("bad_state_sums, output 0 that adds up") != std::string::npos);
  }
}

TEST_CASE("an op that is right at some sizes or dtypes only, or keeps memory") {
  check_sound(checked("model", "some_sizes"));
  for (const auto& [fault, op] : std::initializer_list<std::pair<const char*, std::string_view>>{
           {"fault=1", "pack_copy(f32(17, 43)"},
           {"fault=2", "(2387, 43)"},
           {"fault=3", "any_copy(f64(21, 16) ) -> (f64(21, 16) ), which is accepted"},
           {"fault=4", "heap after 1000 times kept_copy"},
           {"fault=5", "element 0 of output 0: got not written, or not finite"}}) {
    PluginHost host = run_host();
    CheckOptions options;
    options.settings = {fault};
    const Report report = check(host, (kFolder / "model" / "libquern_some_sizes.so").string(), options);
    const std::string text = report.text();
    CAPTURE(text);
    CHECK(report.count(Verdict::broken) == (op.starts_with("any") ? 1 : 2));  // own ops in bf16, and in f32
    CHECK(text.find(op) != std::string::npos);
  }
}

TEST_CASE("a maximum that passes over NaN") {
  check_broken("communicator", "drops_nan", {"NaN in a maximum"}, {"all_reduce of maxima", "want nan"});
}

TEST_CASE("a communicator that says nothing of calls that differ or that a peer leaves out") {
  PluginHost host = run_host();
  CheckOptions options;
  options.settings = {"of_calls=true"};
  const Report report = check(host, (kFolder / "communicator" / "libquern_silent.so").string(), options);
  const std::string text = report.text();
  CAPTURE(text);
  CHECK(report.count(Verdict::broken) == 2);
  for (const char* contract : {"a call that differs", "a call that a rank leaves out"})
    CHECK(std::any_of(report.findings().begin(), report.findings().end(), [&](const Finding& finding) {
      return finding.contract == contract && finding.verdict == Verdict::broken &&
             finding.detail.find("got nothing") != std::string::npos;
    }));
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
    return check(host, (kFolder / "model" / "libquern_exchanged_names.so").string(), options).text();
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
