#include "end_to_end.h"

#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <fstream>
#include <sstream>
#include <variant>

#include <doctest/doctest.h>

#include "data/token_file.h"
#include "quern/random.h"
#include "run/run_schemas.h"
#include "tiny_config.h"

namespace quern::testing {

namespace {

constexpr const char* kConfig = R"([train]
steps = 8
micro_batch = 2
sequence = 16
eval_every = 3

[optimizer]
learning_rate = 1e-2

[schedule.cosine]
warmup = 2

[device.cpu]
threads = 1

[checkpoint]
every = 3
)";

// A chain that a small model learns in a few steps, with a little noise.
void write_tokens(const std::string& path, std::int64_t count, std::uint32_t object) {
  TokenFileContent content{.tokens = {}, .mask = {}, .vocabulary = 64, .separator = -1};
  std::int32_t token = 1;
  for (std::int64_t i = 0; i < count; ++i) {
    std::uint32_t word = random_word({5, RandomPurpose::sample, object}, 0, static_cast<std::uint64_t>(i));
    token = word % 8 == 0 ? static_cast<std::int32_t>(word >> 8) & 63 : (token * 5 + 3) & 63;
    content.tokens.push_back(token);
  }
  write_token_file(path, content);
}

/// Keeps the losses, and asks for a stop after a step.
class RecordingSink final : public LogSink {
 public:
  RecordingSink(Losses& losses, std::atomic<int>& stop, std::int64_t stop_after)
      : losses_(losses), stop_(stop), stop_after_(stop_after) {}
  void open(const RunPlace&) override {}
  void write(const LogEvent& event) override {
    if (event.kind != "step") return;
    std::int64_t step = std::get<std::int64_t>(event.fields.at(0).second);
    for (const auto& [key, value] : event.fields)
      if (key == "loss") losses_[step] = std::get<double>(value);
    if (step == stop_after_) stop_ = SIGTERM;
  }

 private:
  Losses& losses_;
  std::atomic<int>& stop_;
  std::int64_t stop_after_;
};

}  // namespace

TinyFiles::TinyFiles() {
  write_tokens(at("train.tok"), 13 * 16 + 1, 1);
  write_tokens(at("validation.tok"), 5 * 16 + 1, 2);
  write_text(config(), std::string(kTinyModel) + kConfig + "\n[data.tokens]\ntrain = \"" + at("train.tok") +
                           "\"\nvalidation = \"" + at("validation.tok") + "\"\n\n[log]\ndirectory = \"" + at("run") +
                           "\"\n");
}

SessionResult train_here(const TinyFiles& files, const Overrides& overrides, std::int64_t stop_after,
                         const std::function<void(Session&)>& change) {
  SessionResult session;
  RunRequests requests;
  PluginHost host = run_host();
  Manifest manifest;
  manifest.add<LogSink>("recording", "keeps losses", {}, [&](const OptionValues&) {
    return std::make_unique<RecordingSink>(session.losses, requests.stop, stop_after);
  });
  host.add_builtins(std::move(manifest));
  ConfigDocument document = ConfigDocument::read(files.config());
  for (const std::string& override : overrides) document.set(override);
  document.set("log.sinks=[\"recording\", \"jsonl\"]");
  ResolvedConfig config = resolve(document, run_schemas(), host);
  Session components(config, host);
  if (change) change(components);
  session.result = Trainer(components, host, requests).run();
  return session;
}

std::int64_t planned_bytes(const TinyFiles& files, const Overrides& overrides) {
  PluginHost host = run_host();
  ConfigDocument document = ConfigDocument::read(files.config());
  for (const std::string& override : overrides) document.set(override);
  ResolvedConfig config = resolve(document, run_schemas(), host);
  Session components(config, host);
  return make_plan(components.parts(), components.plan_options()).device_bytes;
}

std::string newest_tensors(const std::string& run_directory) {
  NewestCheckpoint newest = find_newest(run_directory);
  REQUIRE(newest.checkpoint);
  return read_text(newest.checkpoint->tensors.path());
}

std::int64_t newest_step(const std::string& run_directory) {
  NewestCheckpoint newest = find_newest(run_directory);
  return newest.checkpoint ? newest.checkpoint->meta.step : -1;
}

std::vector<nlohmann::json> log_of(const std::string& run_directory) {
  std::istringstream text(read_text(run_directory + "/log.jsonl"));
  std::vector<nlohmann::json> lines;
  for (std::string line; std::getline(text, line) && !text.eof();) lines.push_back(nlohmann::json::parse(line));
  return lines;
}

std::vector<nlohmann::json> events(const std::string& run_directory, const std::string& kind) {
  std::vector<nlohmann::json> lines = log_of(run_directory);
  std::erase_if(lines, [&](const nlohmann::json& line) { return line.at("event") != kind; });
  return lines;
}

Losses logged_losses(const std::string& run_directory) {
  Losses losses;
  for (const nlohmann::json& line : events(run_directory, "step")) {
    auto [at, fresh] = losses.emplace(line.at("step").get<std::int64_t>(), line.at("loss").get<double>());
    CAPTURE(at->first);
    REQUIRE((fresh || at->second == line.at("loss").get<double>()));
  }
  return losses;
}

std::string read_text(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

void write_text(const std::string& path, const std::string& text) { std::ofstream(path, std::ios::binary) << text; }

std::size_t occurrences(const std::string& text, const std::string& part) {
  std::size_t count = 0;
  for (std::size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++count;
  return count;
}

// ---- the program ----

Child::Child(std::vector<std::string> arguments, const std::function<void()>& prepare) {
  arguments.insert(arguments.begin(), QUERN_CLI);
  std::vector<char*> words;
  for (std::string& argument : arguments) words.push_back(argument.data());
  words.push_back(nullptr);
  std::string out = directory_ / "out", err = directory_ / "err";
  pid_ = ::fork();
  REQUIRE(pid_ >= 0);
  if (pid_ > 0) return;
  for (auto [path, stream] : {std::pair(out.c_str(), STDOUT_FILENO), std::pair(err.c_str(), STDERR_FILENO)}) {
    int file = ::open(path, O_WRONLY | O_CREAT | O_TRUNC, 0644);
    if (file < 0 || ::dup2(file, stream) < 0) ::_exit(126);
  }
  if (prepare) prepare();
  ::execv(words[0], words.data());
  ::_exit(127);
}

Child::~Child() {
  if (pid_ < 0) return;
  ::kill(pid_, SIGKILL);
  ::waitpid(pid_, &status_, 0);
}

void Child::signal(int number) const {
  if (pid_ > 0) ::kill(pid_, number);
}

bool Child::running() {
  if (pid_ > 0 && ::waitpid(pid_, &status_, WNOHANG) == pid_) pid_ = -1;
  return pid_ > 0;
}

int Child::wait() {
  while (pid_ > 0)
    if (::waitpid(pid_, &status_, 0) == pid_ || errno != EINTR) pid_ = -1;
  return WIFEXITED(status_) ? WEXITSTATUS(status_) : -WTERMSIG(status_);
}

Outcome quern_run(std::vector<std::string> arguments, const std::function<void()>& prepare) {
  Child child(std::move(arguments), prepare);
  int code = child.wait();
  return {code, child.out(), child.err()};
}

std::vector<std::string> train_arguments(const TinyFiles& files, const Overrides& overrides) {
  std::vector<std::string> arguments{"train", files.config()};
  for (const std::string& override : overrides) {
    arguments.push_back("--set");
    arguments.push_back(override);
  }
  return arguments;
}

Outcome quern_train(const TinyFiles& files, const Overrides& overrides) {
  return quern_run(train_arguments(files, overrides));
}

bool has(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

void check_fails(const Outcome& outcome, int code, const std::vector<std::string>& parts) {
  CAPTURE(outcome.err);
  CHECK(outcome.code == code);
  CHECK(occurrences(outcome.err, "quern: error: ") == 1);
  CHECK_FALSE(has(outcome.out, "quern: error"));
  for (const std::string& part : parts) {
    CAPTURE(part);
    CHECK(has(outcome.err, part));
  }
}

}  // namespace quern::testing
