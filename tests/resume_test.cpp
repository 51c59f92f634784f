// A run that was stopped or killed and continued is the run that was not: weights, optimizer state and losses have the
// same bits.
#include <unistd.h>

#include <cmath>
#include <csignal>
#include <cstdlib>
#include <filesystem>

#include <doctest/doctest.h>

#include "end_to_end.h"
#include "quern/random.h"
#include "quern/testkit/forwarding_device.h"
#include "test_paths.h"

using namespace quern;
using namespace quern::testing;

namespace {

const Overrides kFp32{"precision.id=fp32"};
const Overrides kBf16{"precision.id=bf16", "optimizer.master=bf16", "optimizer.gradient=bf16",
                      "optimizer.adamw.moments=bf16"};
const Overrides kTransposed{"precision.id=bf16", "precision.bf16.transposed_weights=kept"};  // of masters in fp32
const Overrides kE4m3{"precision.id=e4m3", "precision.e4m3.history=3"};  // amax histories are state too

std::size_t step_lines(const std::string& run_directory) {
  return occurrences(read_text(run_directory + "/log.jsonl"), "\"event\":\"step\"");
}

/// A device with a choice that it cannot load.
class Choosing final : public testkit::ForwardingDevice {
 public:
  Choosing(std::shared_ptr<Device> inner, int threads) : ForwardingDevice(std::move(inner)), threads_(threads) {}
  std::string save_state() const override { return "{\"threads\": " + std::to_string(threads_) + "}"; }
  void load_state(std::string_view) override {}

 private:
  int threads_;
};

// Waits until the child has logged `count` more steps than `before`, or has ended.
bool await_steps(Child& child, const std::string& run_directory, std::size_t before, std::size_t count) {
  while (child.running()) {
    if (step_lines(run_directory) >= before + count) return true;
    ::usleep(500);
  }
  return false;
}

}  // namespace

TEST_CASE("2N steps are N steps, a stop and N more, bit for bit") {
  // A pass is 6.5 micro-batches: with accumulation 1 the stops are in the first pass, at its end, and in later ones.
  for (const Overrides& numbers : {kFp32, kBf16, kTransposed, kE4m3})
    for (int accumulation : {1, 3}) {
      TinyFiles files;
      for (int half : {1, 5, 7}) {
        CAPTURE(numbers[0]);
        CAPTURE(accumulation);
        CAPTURE(half);
        Overrides common = with(numbers, {"train.accumulation=" + std::to_string(accumulation), "checkpoint.every=0",
                                          "checkpoint.export=false", "train.steps=" + std::to_string(2 * half)});
        std::string a = "straight" + std::to_string(half), b = "stopped" + std::to_string(half);
        SessionResult straight = train_here(files, with(common, {files.run(a)}));
        SessionResult first = train_here(files, with(common, {files.run(b)}), half);
        CHECK(first.result.step == half);
        CHECK_FALSE(first.result.finished);
        CHECK(newest_step(files.at(b)) == half);
        SessionResult second = train_here(files, with(common, {files.run(b)}));
        CHECK(second.result.finished);
        first.losses.merge(second.losses);
        CHECK(first.losses == straight.losses);
        CHECK(straight.losses.size() == static_cast<std::size_t>(2 * half));
        CHECK(newest_tensors(files.at(b)) == newest_tensors(files.at(a)));
      }
    }
}

TEST_CASE("stopped after every step, a run is still the same run") {
  for (const Overrides& numbers : {kFp32, kBf16, kE4m3}) {
    TinyFiles files;
    Overrides common = with(numbers, {"train.steps=9", "checkpoint.export=false"});
    SessionResult straight = train_here(files, with(common, {files.run("straight")}));
    Losses losses;
    SessionResult part;
    for (int step = 1; !part.result.finished; ++step) {
      REQUIRE(step <= 10);  // stopped after the ninth, it still has to evaluate
      part = train_here(files, with(common, {files.run("stopped")}), step);
      losses.merge(part.losses);
    }
    CHECK(losses == straight.losses);
    CHECK(newest_tensors(files.at("stopped")) == newest_tensors(files.at("straight")));
    CHECK(logged_losses(files.at("stopped")) == logged_losses(files.at("straight")));
  }
}

TEST_CASE("a checkpoint that an older version wrote is resumed, with that version's losses") {
  const Losses of_that_version{{4, 3.9557100608944893},
                               {5, 3.957073152065277},
                               {6, 3.895533211529255},
                               {7, 3.90687345713377},
                               {8, 3.793127305805683}};
  TinyFiles files;
  const std::string checkpoints = files.at("run") + "/checkpoints";
  std::filesystem::create_directories(checkpoints);
  std::filesystem::copy(QUERN_SOURCE_DIR "/tests/checkpoints/step-00000003", checkpoints + "/step-00000003",
                        std::filesystem::copy_options::recursive);
  const SessionResult resumed =
      train_here(files, with(kE4m3, {"optimizer.master=bf16", "optimizer.gradient=bf16", "optimizer.adamw.moments=bf16",
                                     "model.llama.hidden_size=16", "model.llama.intermediate_size=16",
                                     "model.llama.num_attention_heads=2", "model.llama.num_key_value_heads=1",
                                     "model.llama.tie_word_embeddings=true", "checkpoint.export=false"}));
  CHECK(resumed.result.finished);
  REQUIRE(resumed.losses.size() == of_that_version.size());
  for (const auto& [step, loss] : of_that_version) {
    CAPTURE(step);
    REQUIRE(resumed.losses.contains(step));
    // Equal bits where the BLAS has the kernel that it had then; another one's last bits may be quantized to other
    // values.
    CHECK(std::abs(resumed.losses.at(step) - loss) < 1e-3);
    if (resumed.losses.at(step) != loss) MESSAGE("differs by " << resumed.losses.at(step) - loss);
  }
}

TEST_CASE("another checkpoint interval changes no bit") {
  TinyFiles files;
  for (const char* every : {"0", "2"})
    train_here(files, {files.run(every), std::string("checkpoint.every=") + every, "checkpoint.export=false"});
  CHECK(newest_tensors(files.at("0")) == newest_tensors(files.at("2")));
}

TEST_CASE("killed between checkpoints and started again, a run ends with the same bits") {
  for (const Overrides& numbers : {kFp32, kBf16, kE4m3}) {
    TinyFiles files;
    Overrides common =
        with(numbers, {"train.steps=60", "train.accumulation=3", "checkpoint.every=7", "checkpoint.export=false"});
    CHECK(quern_train(files, with(common, {files.run("straight")})).code == 0);
    const std::string run = files.at("killed");
    int kills = 0, code = 1;
    for (std::uint32_t attempt = 0; code != 0; ++attempt) {
      REQUIRE(attempt < 40);
      Child child(train_arguments(files, with(common, {files.run("killed")})));
      std::uint32_t word = random_word({11, RandomPurpose::sample, 0}, 0, attempt);
      // Up to 14 steps on, so that progress is certain over time; then up to 4 ms into a step or a checkpoint.
      if (attempt < 8 && await_steps(child, run, step_lines(run), 1 + word % 14)) {
        ::usleep(word >> 8 & 4095);
        child.signal(SIGKILL);
      }
      code = child.wait();
      CAPTURE(child.err());
      REQUIRE((code == 0 || code == -SIGKILL));
      kills += code == -SIGKILL;
    }
    MESSAGE("killed " << kills << " times");
    CHECK(kills > 0);
    CHECK(newest_step(run) == 60);
    CHECK(newest_tensors(run) == newest_tensors(files.at("straight")));
    CHECK(logged_losses(run) == logged_losses(files.at("straight")));
  }
}

TEST_CASE("a signal saves a checkpoint and leaves with the shell's code for it") {
  for (auto [signal, code] : {std::pair(SIGTERM, 143), std::pair(SIGINT, 130)}) {
    TinyFiles files;
    Child child(train_arguments(files, {"train.steps=1000000", "checkpoint.every=0"}));
    const std::string run = files.at("run");
    REQUIRE(await_steps(child, run, 0, 3));
    child.signal(signal);
    CHECK(child.wait() == code);
    CHECK(child.err() == "");
    std::int64_t last = events(run, "step").back().at("step");
    CHECK(newest_step(run) == last);
    CHECK(events(run, "checkpoint").back().at("step") == last);
    CHECK(child.out().find("stopped at step " + std::to_string(last)) != std::string::npos);
  }
}

TEST_CASE("a stop does not wait for the end of a step of many micro-batches, and the step is repeated") {
  for (const Overrides& numbers : {kFp32, kE4m3}) {
    CAPTURE(numbers[0]);
    TinyFiles files;
    Overrides common = with(numbers, {"train.steps=3", "train.accumulation=150", "checkpoint.every=0",
                                      "checkpoint.export=false", "data.tokens.validation=[]"});
    CHECK(quern_train(files, with(common, {files.run("straight")})).code == 0);
    const std::string run = files.at("cut");
    for (int code = -1; code != 0;) {
      const std::size_t before = step_lines(run);
      Child child(train_arguments(files, with(common, {files.run("cut")})));
      if (await_steps(child, run, before, 1)) ::usleep(3000);  // into the step after
      child.signal(SIGTERM);
      code = child.wait();
      REQUIRE((code == 0 || code == 143));
      CHECK(newest_step(run) == static_cast<std::int64_t>(step_lines(run)));
    }
    CHECK(newest_tensors(run) == newest_tensors(files.at("straight")));
    CHECK(logged_losses(run) == logged_losses(files.at("straight")));
  }
  // One that would take hours.
  TinyFiles files;
  Child child(train_arguments(files, {"train.accumulation=1048576", "checkpoint.every=0"}));
  while (child.running() && events(files.at("run"), "run").empty()) ::usleep(1000);
  ::usleep(100000);
  child.signal(SIGTERM);
  CHECK(child.wait() == 143);
  CHECK(newest_step(files.at("run")) == -1);
}

TEST_CASE("a reader of the output that goes away takes nothing of the run with it") {
  TinyFiles files;
  std::string script = "'" QUERN_BUILD_DIR "/bin/quern'";
  for (const std::string& word : train_arguments(files, {"train.steps=30", "checkpoint.every=0", "log.every=1"}))
    script += " '" + word + "'";
  write_text(files.at("run.sh"), script + " 2>/dev/null | head -c 1 >/dev/null; exit ${PIPESTATUS[0]}\n");
  const int status = std::system(("bash '" + files.at("run.sh") + "'").c_str());
  CHECK(WEXITSTATUS(status) == 4);  // said at the end: standard output cannot be written
  CHECK(newest_step(files.at("run")) == 30);
  CHECK(events(files.at("run"), "end").size() == 1);
}

TEST_CASE("a second signal leaves at once, and saves nothing") {
  TinyFiles files;
  const std::string run = files.at("run");
  // A micro-batch so large that it does not end between the two signals.
  Child child(train_arguments(files, {"train.micro_batch=50000", "train.steps=2", "checkpoint.every=0"}));
  while (child.running() && events(run, "run").empty()) ::usleep(1000);
  ::usleep(200000);  // from that event into the first step
  REQUIRE(child.running());
  child.signal(SIGTERM);
  ::usleep(1100000);  // a second signal within a second of the first counts as the first
  CHECK(child.running());
  child.signal(SIGINT);
  CHECK(child.wait() == 130);
  CHECK(child.err() == "");
  CHECK(newest_step(run) == -1);
  CHECK(child.out().find("stopped at step") == std::string::npos);
}

TEST_CASE("leftovers are removed once, damaged checkpoints are passed over, and none whole is an error") {
  TinyFiles files;
  const std::string run = files.at("run");
  train_here(files, {"checkpoint.export=false"});
  std::string want = newest_tensors(run);  // of step 8; 6 is kept too
  std::filesystem::create_directories(run + "/checkpoints/.tmp-step-00000009");
  write_text(run + "/checkpoints/step-00000008/tensors.safetensors", "damaged");
  Outcome again = quern_train(files, {"checkpoint.export=false"});
  CHECK(again.code == 0);
  CHECK(occurrences(again.out, ".tmp-step-00000009") == 1);
  CHECK(occurrences(again.out, "passed over") == 1);
  CHECK(again.out.find("resumed at step 6") != std::string::npos);
  CHECK(newest_tensors(run) == want);
  for (const auto& entry : std::filesystem::directory_iterator(run + "/checkpoints"))
    write_text(entry.path().string() + "/state.json", "{}");
  Outcome none = quern_train(files, {});
  CHECK(none.code == 3);
  CHECK(none.err.find("no checkpoint of the run is whole") != std::string::npos);
}

TEST_CASE("a resumed run tells which settings changed") {
  TinyFiles files;
  const std::string run = files.at("run");
  train_here(files, {"checkpoint.export=false"}, 4);
  CHECK(quern_train(files, {"checkpoint.export=false"}).code == 0);
  // The stopped session wrote elsewhere, which is no change; the sinks are the log's own.
  for (const auto& line : events(run, "warning")) CHECK(line.at("text").get<std::string>().starts_with("resumed at"));
  Outcome more = quern_train(files, {"checkpoint.export=false", "train.steps=10", "model.llama.rope_theta=20000.0"});
  CHECK(more.code == 0);
  CHECK(occurrences(more.out, "changed since the checkpoint: ") == 2);
  CHECK(more.out.find("model.llama.rope_theta = 20000.0 (was 10000.0)") != std::string::npos);
  CHECK(more.out.find("train.steps = 10 (was 8)") != std::string::npos);
  CHECK(newest_step(run) == 10);
}

TEST_CASE("tokens are those that the steps had, also where a resumed run has other batches") {
  TinyFiles files;
  const Overrides base{"checkpoint.export=false", "train.eval_every=1", "checkpoint.every=3"};
  auto train = [&](const Overrides& more) {
    Overrides all = base;
    all.insert(all.end(), more.begin(), more.end());
    REQUIRE(quern_train(files, all).code == 0);
  };
  train({"train.micro_batch=2", "train.steps=3"});
  train({"train.micro_batch=4", "train.steps=5"});
  train({"train.micro_batch=2", "train.accumulation=3", "train.steps=6"});
  const std::int64_t tokens[] = {0, 32, 64, 96, 160, 224, 320};
  for (const char* kind : {"step", "eval", "end"})
    for (const auto& event : events(files.at("run"), kind)) {
      CAPTURE(event.dump());
      CHECK(event.at("tokens") == tokens[event.at("step").get<std::size_t>()]);
    }
  CHECK(events(files.at("run"), "eval").size() == 6);
}

TEST_CASE("a resumed run says what its device no longer does as it did") {
  TinyFiles files;
  const Overrides run{"precision.id=fp32", "train.steps=4", "checkpoint.export=false", files.run("run")};
  auto with_threads = [](int threads) {
    return [threads](Session& session) {
      session.device = std::make_unique<Choosing>(std::shared_ptr<Device>(std::move(session.device)), threads);
    };
  };
  auto told = [&] { return occurrences(read_text(files.at("run") + "/log.jsonl"), "threads = 3 (was 2)"); };
  train_here(files, run, 1, with_threads(2));
  train_here(files, run, 2, with_threads(2));
  CHECK(told() == 0);
  train_here(files, run, 3, with_threads(3));
  CHECK(told() == 1);
}

TEST_CASE("the log names the BLAS kernel, a slow one with the fix, and a resumed run reports another") {
  TinyFiles files;
  auto train = [&files](int steps, const std::function<void()>& prepare) {
    const Outcome outcome = quern_run(train_arguments(files, {"train.steps=" + std::to_string(steps)}), prepare);
    CAPTURE(outcome.err);
    CHECK(outcome.code == 0);
  };
  auto told = [&files](const std::string& text) {
    return occurrences(read_text(files.at("run") + "/log.jsonl"), text);
  };
  train(2, [] { ::setenv("OPENBLAS_CORETYPE", "Prescott", 1); });
  const std::string slow = events(files.at("run"), "run").at(0).at("device");
  if (!has(slow, "OpenBLAS")) return;  // another library names no kernels
  CHECK(slow.ends_with(", Prescott"));
  CHECK(told("unset OPENBLAS_CORETYPE") == (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") ? 1 : 0));
  train(4, [] { ::setenv("OPENBLAS_CORETYPE", "Nehalem", 1); });
  CHECK(std::string(events(files.at("run"), "run").at(1).at("device")).ends_with(", Nehalem"));
  CHECK(told("the device computes otherwise than before the checkpoint") == 1);
  CHECK(told("Nehalem (was OpenBLAS") == 1);
}
