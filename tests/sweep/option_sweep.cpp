// Every option at its own bounds: whatever a user writes either runs or is refused with a message. The values of an
// option come from its declaration: minimum, maximum, zero, values just outside, and odd texts; then random pairs of
// them. Each value is given to `config check`, to `data show` if that reads the option, and to two steps of `train`; if
// these fail, also to `plan`. Each is a process with little memory and time.
//
//   option_sweep [PAIRS [SEED]]
//
// Each must end with a documented exit code other than 1, not by a signal, and a failure prints one message of bounded
// length. A run that is not done in time gets SIGTERM, and must end.
#include <fcntl.h>
#include <spawn.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <limits>
#include <random>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "base/files/test_directory.h"
#include "data/tokens/token_file.h"
#include "run/options/run_schemas.h"
#include "test_paths.h"
#include "tiny_config.h"

namespace {

using namespace quern;
namespace fs = std::filesystem;
using Clock = std::chrono::steady_clock;

constexpr std::size_t kLongestMessage = 2000;
constexpr std::size_t kMostChoices = 10;
constexpr rlim_t kMemory = rlim_t{4} << 30;
// SIGTERM is sent after kComputes of processor time, three times what a run that ends takes, or kRuns of wall time, for
// runs that sleep. They must have ended kObeys later.
constexpr std::chrono::milliseconds kComputes{500};
constexpr std::chrono::seconds kRuns{2}, kObeys{60};

/// One setting, and what selects the plugin that it is of.
struct Setting {
  std::string key, value;
  std::vector<std::string> with;
  bool outside = false;  ///< of what the declaration allows
};

// ---- values of a declaration ----

std::string quoted(const std::string& text) { return to_string(OptionValue(text)); }

std::vector<Setting> integers(const OptionSpec& spec) {
  constexpr std::int64_t kLeast = std::numeric_limits<std::int64_t>::min(),
                         kMost = std::numeric_limits<std::int64_t>::max();
  const bool low = std::isfinite(spec.minimum), high = std::isfinite(spec.maximum);
  const std::int64_t least = low ? static_cast<std::int64_t>(spec.minimum) : kLeast;
  const std::int64_t most = high ? static_cast<std::int64_t>(spec.maximum) : kMost;
  std::set<std::int64_t> values{least, most, 0, 1, std::int64_t{1} << 31, std::int64_t{1} << 32, kLeast, kMost};
  if (low) values.insert(least - 1);
  if (high) values.insert(most + 1);
  std::vector<Setting> settings;
  for (std::int64_t value : values) settings.push_back({{}, std::to_string(value), {}, value < least || value > most});
  return settings;
}

std::vector<Setting> reals(const OptionSpec& spec) {
  std::vector<Setting> settings;
  auto add = [&](double value) {
    const bool inside = std::isfinite(value) && (spec.open_minimum ? value > spec.minimum : value >= spec.minimum) &&
                        value <= spec.maximum;
    settings.push_back({{}, to_string(OptionValue(value)), {}, !inside});
  };
  for (double value : {0.0, 1.0, -1.0, 1e-50, 1.2e-38, 3.4e38, 1e39, 1e308, std::nan(""), HUGE_VAL}) add(value);
  for (double bound : {spec.minimum, spec.maximum})
    if (std::isfinite(bound))
      for (double value : {bound, std::nextafter(bound, -HUGE_VAL), std::nextafter(bound, HUGE_VAL)}) add(value);
  return settings;
}

bool contains(const std::vector<std::string>& texts, const std::string& text) {
  return std::find(texts.begin(), texts.end(), text) != texts.end();
}

std::vector<Setting> texts(const OptionSpec& spec) {
  std::vector<Setting> settings;
  // A long list names rows of a table, which have a test of their own: its ends alone.
  for (std::size_t i = 0; i < spec.choices.size(); ++i)
    if (spec.choices.size() <= kMostChoices || i == 0 || i + 1 == spec.choices.size())
      settings.push_back({{}, quoted(spec.choices[i]), {}});
  for (const std::string& odd : {std::string(), std::string("no such"), std::string(100000, 'x'),
                                 std::string("/dev/null"), std::string("a\x01\x7f b"), std::string("../..")})
    settings.push_back({{}, quoted(odd), {}, !spec.choices.empty() && !contains(spec.choices, odd)});
  if (spec.size)
    for (const char* size : {"0", "1", "4611686018427387904", "9223372036854775807", "\"1e30TiB\"", "-1", "\"8EiB\""})
      settings.push_back({{}, size, {}});
  return settings;
}

std::vector<Setting> values_of(const OptionSpec& spec) {
  switch (spec.type) {
    case OptionType::boolean: return {{{}, "true", {}}, {{}, "false", {}}, {{}, "1", {}, true}};
    case OptionType::integer: return integers(spec);
    case OptionType::real: return reals(spec);
    case OptionType::text: return texts(spec);
    default: break;
  }
  std::vector<Setting> settings{{{}, "[]", {}}};
  for (Setting& one : spec.type == OptionType::text_list ? texts(spec) : reals(spec)) {
    one.value = "[" + one.value + "]";
    settings.push_back(std::move(one));
  }
  return settings;
}

/// All of a run's options. A plugin's are swept with the plugin selected; what models declare alike, with the first.
std::vector<Setting> all_settings() {
  std::vector<Setting> all;
  PluginHost host = run_host();
  std::set<std::string> of_models;
  auto add = [&](const std::string& prefix, const std::vector<OptionSpec>& specs, std::vector<std::string> with) {
    for (const OptionSpec& spec : specs) {
      if (prefix.starts_with("model.") && !of_models.insert(spec.key + ": " + describe_expected(spec)).second) continue;
      for (Setting& setting : values_of(spec)) {
        setting.key = prefix + spec.key;
        setting.with = with;
        all.push_back(std::move(setting));
      }
    }
  };
  for (const SectionSchema& schema : run_schemas()) {
    add(schema.name + ".", section_options(schema), {});
    if (schema.plugin_kind.empty()) continue;
    for (const PluginEntry& entry : host.list(schema.plugin_kind)) {
      if (!entry.factory) continue;
      std::vector<std::string> with;
      if (schema.plugin_keys.empty()) with = {schema.name + ".id=" + entry.id};
      if (schema.plugin_kind == "log") with = {"log.sinks=[\"" + entry.id + "\"]"};
      if (schema.plugin_kind == "model")  // what it requires, as the base config has it for another
        for (const std::string field :
             {"vocab_size=64", "hidden_size=32", "intermediate_size=48", "num_hidden_layers=2", "num_attention_heads=4",
              "num_key_value_heads=2", "max_position_embeddings=32", "n_embd=32", "n_layer=2", "n_head=4",
              "n_positions=32", "embed_dim=32", "depth=2", "num_heads=4"})
          for (const OptionSpec& spec : entry.factory->options)
            if (spec.key == field.substr(0, field.find('=')))
              with.push_back(schema.name + "." + entry.id + "." + field);
      add(schema.name + "." + entry.id + ".", entry.factory->options, with);
    }
  }
  return all;
}

// ---- running ----

struct Result {
  int code = 0;          ///< minus the signal
  bool stopped = false;  ///< by our SIGTERM
  bool hung = false;
  std::string message;
  double seconds = 0;
};

std::chrono::nanoseconds processor_time(pid_t process) {
  clockid_t clock{};
  timespec time{};
  if (::clock_getcpuclockid(process, &clock) != 0 || ::clock_gettime(clock, &time) != 0) return {};
  return std::chrono::seconds(time.tv_sec) + std::chrono::nanoseconds(time.tv_nsec);
}

Result run(const std::vector<std::string>& words, const std::string& directory) {
  const std::string errors = directory + "/err";
  const auto begin = Clock::now();
  std::vector<char*> arguments;
  for (const std::string& word : words) arguments.push_back(const_cast<char*>(word.c_str()));
  arguments.push_back(nullptr);
  // A fork would copy the tables of this process, which has all plugins.
  posix_spawn_file_actions_t actions;
  ::posix_spawn_file_actions_init(&actions);
  ::posix_spawn_file_actions_addopen(&actions, 0, "/dev/null", O_RDWR, 0);
  ::posix_spawn_file_actions_addopen(&actions, 1, "/dev/null", O_RDWR, 0);
  ::posix_spawn_file_actions_addopen(&actions, 2, errors.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600);
  ::posix_spawn_file_actions_addchdir_np(&actions, directory.c_str());
  pid_t process = 0;
  const int failure = ::posix_spawn(&process, arguments[0], &actions, nullptr, arguments.data(), environ);
  ::posix_spawn_file_actions_destroy(&actions);
  if (failure != 0) throw std::runtime_error(words[0] + " does not start: " + ::strerror(failure));
  Result result;
  int status = 0;
  while (::waitpid(process, &status, WNOHANG) == 0) {
    const auto so_far = Clock::now() - begin;
    if (!result.stopped && (so_far > kRuns || processor_time(process) > kComputes))
      result.stopped = ::kill(process, SIGTERM) == 0;
    if (!result.hung && so_far > kRuns + kObeys) result.hung = ::kill(process, SIGKILL) == 0;
    std::this_thread::sleep_for(std::chrono::milliseconds(so_far < std::chrono::milliseconds(300) ? 1 : 10));
  }
  result.code = WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
  result.message = read_text(errors);
  result.seconds = std::chrono::duration<double>(Clock::now() - begin).count();
  return result;
}

// Empty: as required.
std::string fault_of(const Result& result) {
  if (result.hung) return "did not stop within " + std::to_string(kObeys.count()) + " s of SIGTERM";
  const int code = result.code;
  if (code < 0) return result.stopped && code == -SIGTERM ? "" : std::string("killed by ") + ::strsignal(-code);
  if (code == 0) return "";
  if (code == 128 + SIGTERM) return result.stopped ? "" : "left with " + std::to_string(code) + " unasked";
  if (code < 2 || code > 6) return "exit code " + std::to_string(code);
  if (result.message.empty()) return "exit code " + std::to_string(code) + " without a message";
  if (result.message.size() >= kLongestMessage)
    return "a message of " + std::to_string(result.message.size()) + " bytes";
  return "";
}

class Sweep {
 public:
  Sweep() {
    TokenFileContent content{.tokens = {}, .mask = {}, .vocabulary = 64, .separator = -1};
    for (int i = 0; i < 13 * 16 + 1; ++i) content.tokens.push_back(i * 7 % 64);
    write_token_file(files_ / "train.tok", content);
    std::ofstream(files_ / "run.toml") << testing::kTinyModel << R"([train]
steps = 2
micro_batch = 2
sequence = 16
[device.cpu]
threads = 1
memory = 1024
[data.tokens]
train = "train.tok"
validation = "train.tok"
[log]
directory = "run"
)";
  }

  void judge(const std::vector<const Setting*>& settings) {
    ++cases_;
    std::vector<std::string> overrides;
    bool outside = false;
    for (const Setting* setting : settings) {
      for (const std::string& with : setting->with) overrides.insert(overrides.end(), {"--set", with});
      outside = outside || setting->outside;
    }
    for (const Setting* setting : settings)
      overrides.insert(overrides.end(), {"--set", setting->key + "=" + setting->value});
    const Result check = one({"config", "check"}, overrides);
    if (outside && check.code != 2) report("`config check` accepts it", check, overrides);
    if (check.code == 2) return;  // all commands read the config in the same way
    if (any(settings, {"data.", "train."})) one({"data", "show"}, overrides);
    fs::remove_all(files_ / "run");
    const Result train = one({"train"}, overrides);
    if (train.code == 0 && settings.size() == 1) return;  // so it is planned
    const Result plan = one({"plan"}, overrides);
    if (train.code == 2 && plan.code == 0 && planned(settings))
      report("`plan` accepts what `train` refuses", train, overrides);
  }

  int end() const {
    std::printf("%d cases, %d runs, %d faults\n", cases_, runs_, faults_);
    return faults_ == 0 ? 0 : 1;
  }

 private:
  // Whether one of the settings is of one of the sections.
  static bool any(const std::vector<const Setting*>& settings, std::initializer_list<const char*> sections) {
    for (const Setting* setting : settings)
      for (const char* section : sections)
        if (setting->key.starts_with(section)) return true;
    return false;
  }

  // What of a config a plan is made from, without looking at the data; these have no images.
  static bool planned(const std::vector<const Setting*>& settings) {
    for (const Setting* setting : settings)
      if (setting->key.ends_with(".vocab_size") || setting->key.starts_with("model.vit.") ||
          setting->key == "train.epochs")
        return false;
    return !any(settings, {"data.", "log.", "checkpoint.", "sample."});
  }

  Result one(std::vector<std::string> words, const std::vector<std::string>& overrides) {
    ++runs_;
    words.insert(words.begin(), QUERN_BUILD_DIR "/bin/quern");
    words.push_back("run.toml");
    words.insert(words.end(), overrides.begin(), overrides.end());
    Result result = run(words, files_.path());
    if (const std::string fault = fault_of(result); !fault.empty()) report(words[1] + ": " + fault, result, overrides);
    return result;
  }

  void report(const std::string& fault, const Result& result, const std::vector<std::string>& overrides) {
    ++faults_;
    std::printf("FAULT  %s\n       with", fault.c_str());
    for (const std::string& word : overrides)
      if (word != "--set") std::printf(" %s", word.substr(0, 100).c_str());
    std::printf("\n       %s\n", result.message.substr(0, 400).c_str());
    std::fflush(stdout);
  }

  TestDirectory files_;
  int cases_ = 0, runs_ = 0, faults_ = 0;
};

}  // namespace

int main(int argc, char** argv) {
  const int pairs = argc > 1 ? std::atoi(argv[1]) : 40;
  const unsigned seed = argc > 2 ? static_cast<unsigned>(std::atoi(argv[2])) : 1;
  const std::vector<Setting> settings = all_settings();
  const rlimit memory{kMemory, kMemory}, none{0, 0};  // for the programs
  ::setrlimit(RLIMIT_AS, &memory);
  ::setrlimit(RLIMIT_CORE, &none);
  Sweep sweep;
  for (const Setting& setting : settings) sweep.judge({&setting});
  std::vector<const Setting*> allowed;  // extremes that are refused one by one have nothing to show in pairs
  for (const Setting& setting : settings)
    if (!setting.outside) allowed.push_back(&setting);
  std::mt19937 random(seed);
  for (int pair = 0; pair < pairs; ++pair)
    sweep.judge({allowed[random() % allowed.size()], allowed[random() % allowed.size()]});
  return sweep.end();
}
