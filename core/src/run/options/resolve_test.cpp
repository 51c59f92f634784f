// Every kind of finding, all together and in order; and the rule that to_toml() resolves to the same values.
#include "config/resolve.h"

#include <algorithm>
#include <sstream>

#include <doctest/doctest.h>

#include "config/reference.h"
#include "quern/error.h"
#include "quern/testkit/refusal.h"
#include "run/options/run_schemas.h"

using namespace quern;

namespace {

struct NullSink final : LogSink {
  void open(const RunPlace&) override {}
  void write(const LogEvent&) override {}
};

struct SinkOptions {
  std::int64_t every = 10;
  std::string target = "out";
};
struct NetOptions {
  std::int64_t width = 0;
  double theta = 1e4;
  double factor = 1;
  std::string rope = "default";
  std::vector<double> bands;
};

// Two sinks, and a "net" with a model's kind of options; resolving makes nothing, so a sink may stand for it.
PluginHost test_host() {
  auto make = [](const OptionValues&) { return std::make_unique<NullSink>(); };
  OptionTable<SinkOptions> sink;
  sink.add("every", &SinkOptions::every, "steps between writes").at_least(1);
  sink.add("target", &SinkOptions::target, "where | to <file>");
  OptionTable<NetOptions> net;
  net.add("width", &NetOptions::width, "of the stream").at_least(1).required();
  net.add("theta", &NetOptions::theta, "base").above(0);
  net.add("rope_scaling.factor", &NetOptions::factor, "stretch").at_least(1);
  net.add("rope_scaling.rope_type", &NetOptions::rope, "form").one_of({"default", "llama3"});
  net.add("rope_scaling.bands", &NetOptions::bands, "limits");
  Manifest manifest;
  manifest.add<LogSink>("jsonl", "JSON lines", sink.specs(), make);
  manifest.add<LogSink>("console", "for people", {}, make);
  manifest.add<LogSink>("net", "a network", net.specs(), make);
  PluginHost host({});
  host.add_builtins(std::move(manifest));
  return host;
}

struct TrainOptions {
  std::int64_t steps = 100;
  std::int64_t warmup = 10;
  double rate = 3e-4;
  std::string mode = "fast";
};

std::vector<SectionSchema> test_schemas() {
  OptionTable<TrainOptions> train;
  train.add("steps", &TrainOptions::steps, "optimizer steps").at_least(1);
  train.add("warmup", &TrainOptions::warmup, "steps of warm-up").at_least(0);
  train.add("rate", &TrainOptions::rate, "learning rate").above(0).at_most(1);
  train.add("mode", &TrainOptions::mode, "how").one_of({"fast", "exact"});
  std::vector<SectionSchema> schemas = {section_of("train", "The loop.", train)};
  schemas[0].check = [](const OptionValues& values) -> SectionFindings {
    if (values.get<std::int64_t>("warmup") <= values.get<std::int64_t>("steps")) return {};
    return {{"warmup",
             "longer than the run, found " + to_string(*values.find("warmup")) + ", expected at most train.steps"}};
  };
  SectionSchema log;
  log.name = "log";
  log.plugin_kind = "log";
  log.default_id = "console";
  SectionSchema net = section_of("net", "The network.", OptionTable<TrainOptions>());
  struct File {
    std::string config;
  };
  OptionTable<File> file;
  file.add("config", &File::config, "a file with options");
  net.options = file.specs();
  net.plugin_kind = "log";
  net.options_file_key = "config";
  schemas.push_back(log);
  schemas.push_back(net);
  struct Many {
    std::vector<std::string> sinks = {"console"};
    std::string other = "none";
  };
  OptionTable<Many> many;
  many.add("sinks", &Many::sinks, "ids");
  many.add("other", &Many::other, "an id");
  schemas.push_back(section_of("many", "Plugins by several keys.", many));
  schemas.back().plugin_kind = "log";
  schemas.back().plugin_keys = {"sinks", "other"};
  schemas.back().no_plugin = {"none"};
  return schemas;
}

constexpr const char* kNet = "[net]\nid = \"net\"\nnet.width = 8\n";

ResolvedConfig resolved(const std::string& text, std::vector<std::string> overrides = {}) {
  ConfigDocument document = ConfigDocument::parse(text, "run.toml");
  for (const std::string& assignment : overrides) document.set(assignment);
  PluginHost host = test_host();
  return resolve(document, test_schemas(), host);
}

std::string fault(const std::string& text, std::vector<std::string> overrides = {}) {
  return testkit::refusal(ErrorCode::config, [&] { resolved(text, std::move(overrides)); });
}

// With the one section that has a required key in order.
std::string fault_in(const std::string& text) { return fault(text + "\n" + kNet); }

void check_same(const ResolvedConfig& a, const ResolvedConfig& b) {
  for (const char* name : {"train", "log", "net", "many"}) {
    CAPTURE(name);
    CHECK(a.section(name).all() == b.section(name).all());
    REQUIRE(a.ids(name) == b.ids(name));
    for (const std::string& id : a.ids(name))
      CHECK(a.factory_values(name, id).all() == b.factory_values(name, id).all());
  }
}

}  // namespace

TEST_CASE("defaults are filled in, and written keys are known") {
  ResolvedConfig config = resolved(std::string("[train]\nsteps = 7\nwarmup = 7\n") + kNet);
  CHECK(config.section("train").get<std::int64_t>("steps") == 7);
  CHECK(config.section("train").get<double>("rate") == 3e-4);
  CHECK(config.id("log") == "console");
  CHECK(config.plugin_options("net").get<double>("theta") == 1e4);
  CHECK(config.where("train", "steps") == "run.toml:2:1: train.steps");
  CHECK(config.where("net", "net.width").starts_with("run.toml:6:"));
  CHECK(config.where("train", "rate") == "run.toml: train.rate (default)");
  CHECK_THROWS_AS(config.section("nothing"), const Error&);
}

TEST_CASE("nested keys come from tables, inline tables and dotted keys alike") {
  for (const char* text :
       {"[net]\nid = \"net\"\n[net.net]\nwidth = 8\n[net.net.rope_scaling]\nfactor = 2\nbands = [1]\n",
        "[net]\nid = \"net\"\n[net.net]\nwidth = 8\nrope_scaling = { factor = 2, bands = [1] }\n",
        "[net]\nid = \"net\"\n[net.net]\nwidth = 8\nrope_scaling.factor = 2.0\nrope_scaling.bands = [1.0]\n"}) {
    ResolvedConfig config = resolved(text);
    CHECK(config.plugin_options("net").get<double>("rope_scaling.factor") == 2.0);
    CHECK(config.plugin_options("net").get<std::vector<double>>("rope_scaling.bands") == std::vector<double>{1});
  }
}

TEST_CASE("each fault is one line: where, key, what, found, expected, nearest") {
  CHECK(fault_in("[train]\nstep = 3") ==
        "run.toml:2:1: train.step: unknown key, expected one of steps, warmup, rate, mode; nearest name `steps`");
  CHECK(fault_in("[trian]\nsteps = 3") ==
        "run.toml:1:2: trian: unknown section, expected one of train, log, net, many; nearest name `train`");
  CHECK(fault_in("[train]\nsteps = 0") ==
        "run.toml:2:1: train.steps: out of range, found 0, expected an integer of at least 1");
  CHECK(fault_in("[train]\nsteps = \"3\"") ==
        "run.toml:2:1: train.steps: wrong type, found \"3\", expected an integer of at least 1");
  CHECK(fault_in("[train]\nsteps = 2020-01-01") ==
        "run.toml:2:1: train.steps: wrong type, found a date or time, expected an integer of at least 1");
  CHECK(fault_in("[train.steps]\nx = 1") ==
        "run.toml:1:8: train.steps: wrong type, found a table, expected an integer of at least 1");
  CHECK(fault_in("[train]\nmode = \"Exact\"") ==
        "run.toml:2:1: train.mode: not a choice, found \"Exact\", expected one of \"fast\", \"exact\"; nearest name "
        "`exact`");
  CHECK(fault_in("train = 3").starts_with("run.toml:1:1: train: wrong type, found 3, expected a table"));
  CHECK(fault_in("[train]\nsteps = 5") ==
        "run.toml:1:2: train.warmup: longer than the run, found 10, expected at most train.steps");
  CHECK(fault_in("[train]\n\"a b\" = 1").starts_with("run.toml:2:1: train.\"a b\": unknown key"));
}

TEST_CASE("an override without a value is an empty text, and refused where that is no value") {
  CHECK(resolved(kNet, {"log.jsonl.target="}).to_toml().find("target = \"\"\n") != std::string::npos);
  CHECK(fault(kNet, {"train.steps="}) ==
        "--set train.steps: train.steps: wrong type, found \"\", expected an integer of at least 1");
  CHECK(fault(kNet, {"train.mode="}).starts_with("--set train.mode: train.mode: not a choice, found \"\""));
  CHECK(fault(kNet, {"train="}).find("train: wrong type, found \"\", expected a table") != std::string::npos);
}

TEST_CASE("plugins: unknown ids, their options, and tables of those not selected") {
  CHECK(fault_in("[log]\nid = \"jsnol\"")
            .starts_with(
                "run.toml:2:1: log.id: no such log plugin: found \"jsnol\", expected one of console, jsonl, net; "
                "nearest name `jsonl`"));
  CHECK(fault_in("[log]\nid = \"jsonl\"\n[log.jsonl]\nevery = 0") ==
        "run.toml:4:1: log.jsonl.every: out of range, found 0, expected an integer of at least 1");
  CHECK(fault_in("[log.jsonl]\nevery = 0").starts_with("run.toml:2:1: log.jsonl.every: out of range"));  // not selected
  CHECK(fault_in("[log.jsonl]\nevery = 3") == "accepted");
  CHECK(fault_in("[log.absent]\nevery = 3").starts_with("run.toml:1:6: log.absent: no such log plugin"));
  CHECK(fault_in("[log.\"../x\"]\nevery = 3").starts_with("run.toml:1:6: log.\"../x\": no such log plugin"));
  CHECK(fault_in("[log]\nid = 3") == "run.toml:2:1: log.id: wrong type, found 3, expected a text");
  CHECK(fault_in("[log]\npath = \"/nowhere/x.so\"").find("/nowhere/x.so: plugin refused: found no file") !=
        std::string::npos);
  CHECK(fault("").find("net.id: missing, expected a text") != std::string::npos);
  CHECK(fault("[net]\nid = \"net\"\n")
            .starts_with("run.toml:1:2: net.net.width: missing, expected an integer of at least 1"));
  CHECK(fault("[net]\nid = \"net\"\nnet.width = 8\nnet.rope_scaling = 4\n")
            .find("net.net.rope_scaling: wrong type, found 4, expected a table with factor, rope_type, bands") !=
        std::string::npos);
  CHECK(fault("[net]\nid = \"net\"\nnet.width = 8\nnet.rope_scaling.fctor = 4\n")
            .find("net.net.rope_scaling.fctor: unknown key, "
                  "expected one of factor, rope_type, bands; nearest name `factor`") != std::string::npos);
  CHECK(fault("[net]\nid = \"net\"\nnet.width = 8\nnet.\"rope_scaling.factor\" = 4\n").find("unknown key") !=
        std::string::npos);
}

TEST_CASE("a section may select several plugins, each with its table") {
  ResolvedConfig config = resolved(std::string("[many]\nsinks = [\"jsonl\", \"console\"]\nother = \"jsonl\"\n") +
                                   "[many.jsonl]\nevery = 3\n" + kNet);
  CHECK(config.ids("many") == std::vector<std::string>{"jsonl", "console"});
  CHECK(config.factory_values("many", "jsonl").get<std::int64_t>("every") == 3);
  CHECK(config.factory_values("many", "jsonl").get<std::string>("target") == "out");
  CHECK(config.factory_values("many", "console").all().empty());
  CHECK_THROWS_AS(config.factory_values("many", "net"), const Error&);
  const std::string toml = config.to_toml();
  CHECK(toml.find("\n[many]\nsinks = [\"jsonl\", \"console\"]\nother = \"jsonl\"\n\n[many.jsonl]  # log plugin: built "
                  "in\nevery = 3\ntarget = \"out\"  # default\n\n[many.console]  # log plugin: built in\n") !=
        std::string::npos);
  CHECK(resolved(toml).ids("many") == config.ids("many"));
  CHECK(resolved(kNet).ids("many") == std::vector<std::string>{"console"});
  CHECK(resolved(std::string("[many]\nsinks = []\n") + kNet).ids("many").empty());

  CHECK(fault_in("[many]\nother = \"jsnol\"") ==
        "run.toml:2:1: many.other: no such log plugin: found \"jsnol\", expected one of console, jsonl, net; nearest "
        "name `jsonl`; searched none; `none` needs no plugin");
  CHECK(fault_in("[many]\nsinks = [\"console\", \"console\"]") ==
        "run.toml:2:1: many.sinks: found \"console\" twice, expected it once");
  CHECK(fault_in("[many]\nsinks = [\"\"]").starts_with("run.toml:2:1: many.sinks: no such log plugin: found \"\""));
  CHECK(fault_in("[many]\nsinks = [\"net\"]").find("many.net.width: missing") != std::string::npos);
  CHECK(fault_in("[many]\nid = \"console\"").starts_with("run.toml:2:1: many.id: unknown key"));
  const std::string both = fault_in("[many]\nsinks = [\"jsonl\"]\n[many.jsonl]\nevry = 0\n[many.consol]\n");
  CHECK(both.find("run.toml:4:1: many.jsonl.evry: unknown key, expected one of every, target; nearest name `every`") !=
        std::string::npos);
  CHECK(both.find("run.toml:5:7: many.consol: no such log plugin") != std::string::npos);
}

TEST_CASE("all faults come together, in the document's order, overrides last") {
  std::string text = fault("[zzz]\n[train]\nrate = 2\nsteps = 0\nsped = 1\n[net]\n", {"train.warmup=-1", "log.id=zip"});
  CHECK(text.starts_with("run.toml: 7 errors in the config\nrun.toml:1:2: zzz"));
  std::size_t last = 0;
  for (const char* part :
       {"run.toml:1:2: zzz", "run.toml:3:1: train.rate", "run.toml:4:1: train.steps", "run.toml:5:1: train.sped",
        "run.toml:6:2: net.id", "--set log.id: log.id", "--set train.warmup: train.warmup"}) {
    CAPTURE(part);
    std::size_t at = text.find(part);
    REQUIRE(at != std::string::npos);
    CHECK(at >= last);
    last = at;
  }
}

TEST_CASE("a hostile config gives a message of bounded length") {
  std::string text = "[train]\n";
  for (int i = 0; i < 20000; ++i) text.append("k").append(std::to_string(i)).append(" = 1\n");
  text += "mode = \"" + std::string(100000, 'x') + "\"\n";
  std::string message = fault_in(text);
  CHECK(message.find("and 19901 more") != std::string::npos);
  CHECK(message.size() < 20000);
}

TEST_CASE("an options file excuses required keys, and the factory gets the written values") {
  ResolvedConfig config = resolved("[net]\nid = \"net\"\nconfig = \"dir\"\n[net.net]\ntheta = 5\n");
  OptionValues values = config.factory_values("net");
  CHECK(values.all().size() == 2);
  CHECK(values.get<double>("theta") == 5.0);
  CHECK(values.get<std::string>("config") == "dir");
  check_same(config, resolved(config.to_toml()));
  OptionValues whole = resolved(kNet).factory_values("net");
  CHECK(whole.get<std::string>("config") == "");
  CHECK(whole.all().size() == 6);
}

TEST_CASE("to_toml resolves to the same values, whatever they are") {
  for (const char* text :
       {"", "[train]\nrate = 1e-9\nsteps = 9007199254740993\nmode = \"exact\"\n",
        "[log]\nid = \"jsonl\"\n[log.jsonl]\ntarget = \"a\\\"b\\\\\\n\\u0001 é # x\"\n", "[log.jsonl]\nevery = 4\n"}) {
    CAPTURE(text);
    ResolvedConfig config =
        resolved(std::string(text) + kNet + "net.rope_scaling = { factor = 8, bands = [1.5, -0.0] }\n");
    std::string toml = config.to_toml();
    CAPTURE(toml);
    ResolvedConfig again = resolved(toml);
    check_same(config, again);
    // From then on the text differs only in which values count as defaults.
    CHECK(resolved(again.to_toml()).to_toml() == again.to_toml());
  }
  std::string toml = resolved(kNet).to_toml();
  CHECK(toml.find("[log]  # log plugin: built in\nid = \"console\"  # default\n") != std::string::npos);
  CHECK(toml.find("\nwidth = 8\n") != std::string::npos);
}

TEST_CASE("the reference page is the same every time and shows every option") {
  PluginHost host = test_host();
  std::string page = reference_markdown(test_schemas(), host);
  PluginHost other = test_host();
  CHECK(page == reference_markdown(test_schemas(), other));
  for (const char* part :
       {"## [train]", "| `steps` ", "| an integer of at least 1 ", "### [log.jsonl]", "where \\| to \\<file>",
        "`rope_scaling.factor`", "| required ", "No options.", "JSON lines"}) {
    CAPTURE(part);
    CHECK(page.find(part) != std::string::npos);
  }
}

TEST_CASE("for a terminal, tables wrap to its width and keep every word") {
  OptionSpec spec;
  spec.key = "a_rather_long_name_of_an_option";
  spec.default_value = std::int64_t{3};
  spec.help =
      "what it does, told at such a length that no terminal shows it on one line, with a unit \xc3\xa9 at the end";
  auto words = [](std::string text) {
    std::erase_if(text, [](char c) { return c == ' ' || c == '|' || c == '-' || c == '\n'; });
    std::sort(text.begin(), text.end());
    return text;
  };
  const std::string whole = options_table({spec});
  for (std::size_t columns : {60, 80, 100}) {
    const std::string table = options_table({spec}, columns);
    CHECK(words(table) == words(whole));
    std::istringstream lines(table);
    for (std::string line; std::getline(lines, line);)
      CHECK(std::count_if(line.begin(), line.end(), [](unsigned char c) { return (c & 0xc0) != 0x80; }) <=
            static_cast<std::ptrdiff_t>(columns));
  }
}

TEST_CASE("the schemas of a run are sound") {
  std::vector<std::string> names;
  for (const SectionSchema& schema : run_schemas()) {
    CAPTURE(schema.name);
    CHECK(std::find(names.begin(), names.end(), schema.name) == names.end());
    names.push_back(schema.name);
    CHECK_FALSE(schema.help.empty());
    for (const OptionSpec& spec : section_options(schema)) {
      CAPTURE(spec.key);
      OptionValue value = spec.default_value;
      CHECK(type_of(value) == spec.type);
      if (!spec.required) CHECK(check_option(spec, value).value_or("") == "");
      CHECK_FALSE(spec.help.empty());
    }
  }
}
