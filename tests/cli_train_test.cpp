// `quern train` and `quern plan` as a user meets them: what a run leaves, how it fails and with which code.
#include <unistd.h>

#include <cmath>
#include <csignal>
#include <cstddef>
#include <cstring>
#include <filesystem>
#include <limits>
#include <span>

#include <doctest/doctest.h>

#include "base/checksum.h"
#include "checkpoint/checkpoint.h"
#include "data/tokens/token_file.h"
#include "data/tokens/token_header.h"
#include "end_to_end.h"

using namespace quern;
using namespace quern::testing;
namespace fs = std::filesystem;

namespace {

// So small that no weight moves: x - 1e-30 is x for every weight that is not tiny itself.
const std::string kStill = "optimizer.learning_rate=1e-30";

std::string model_config(const TinyFiles& files, const std::string& config_json) {
  return "[model]\nid = \"llama\"\nconfig = \"" + config_json + "\"\n[data.tokens]\ntrain = \"" +
         files.at("train.tok") + "\"\nvalidation = \"" + files.at("validation.tok") +
         "\"\n[train]\nsteps = 1\nmicro_batch = 2\nsequence = 16\n[device.cpu]\nthreads = 1\n[log]\ndirectory = \"" +
         files.at("continued") + "\"\n";
}

}  // namespace

TEST_CASE("a run leaves its log, checkpoints and export") {
  TinyFiles files;
  const std::string run = files.at("run");
  Outcome outcome = quern_train(files, {"log.every=4"});
  CHECK(outcome.code == 0);
  CHECK(outcome.err == "");
  for (const char* part :
       {"device memory", "run    run", "start  ", "step  1/8", "step  4/8", "step  8/8", "eval ", "end  "})
    CHECK(has(outcome.out, part));
  CHECK_FALSE(has(outcome.out, "step  3/8"));

  std::vector<nlohmann::json> log = log_of(run);
  REQUIRE(log.size() > 2);
  CHECK(log.front().at("event") == "run");
  CHECK(log.front().at("tokens_per_step") == 32);
  CHECK(log.front().at("device_bytes") == planned_bytes(files, {}));
  CHECK(log.back().at("event") == "end");
  CHECK(fs::equivalent(log.back().at("export").get<std::string>(), run + "/export"));
  auto steps = events(run, "step");
  REQUIRE(steps.size() == 8);
  for (std::size_t i = 0; i < steps.size(); ++i) {
    CHECK(steps[i].at("step") == i + 1);
    CHECK(steps[i].at("tokens") == (i + 1) * 32);
    for (const char* key : {"loss", "lr", "grad_norm", "tokens_per_second", "time", "eta"})
      CHECK(std::isfinite(steps[i].at(key).get<double>()));
  }
  CHECK(steps.back().at("eta") == 0);
  CHECK(steps.back().at("loss") == log.back().at("loss"));
  const auto start = events(run, "start");
  REQUIRE(start.size() == 1);
  double seconds = 0;
  for (const char* phase : {"device", "plan", "kernels", "memory", "data", "weights", "first_step", "graphs"}) {
    const double of_phase = start[0].at(phase);
    CHECK(of_phase >= 0);
    seconds += of_phase;
  }
  CHECK(start[0].at("seconds").get<double>() == doctest::Approx(seconds));
  std::vector<std::int64_t> evaluated, saved;
  for (const auto& line : events(run, "eval")) evaluated.push_back(line.at("step"));
  for (const auto& line : events(run, "checkpoint")) saved.push_back(line.at("step"));
  CHECK(evaluated == std::vector<std::int64_t>{3, 6, 8});
  CHECK(saved == std::vector<std::int64_t>{3, 6, 8});
  CHECK(fs::exists(run + "/checkpoints/step-00000006"));
  CHECK_FALSE(fs::exists(run + "/checkpoints/step-00000003"));  // keep_last is 2
  CHECK(nlohmann::json::parse(read_text(run + "/export/config.json")).at("torch_dtype") == "float32");
  CHECK(fs::exists(run + "/export/model.safetensors"));

  // The same command again finds nothing left to train: it evaluates and exports what is there.
  std::string weights = read_text(run + "/export/model.safetensors"), tensors = newest_tensors(run);
  CHECK(quern_train(files, {}).code == 0);
  CHECK(events(run, "step").size() == 8);
  CHECK(events(run, "end").back().at("val_loss") == log.back().at("val_loss"));
  CHECK_FALSE(events(run, "end").back().contains("loss"));
  CHECK(read_text(run + "/export/model.safetensors") == weights);
  CHECK(newest_tensors(run) == tensors);
  check_fails(quern_train(files, {"checkpoint.resume=never"}), 2, {"checkpoint.resume", "step-00000008"});
  check_fails(quern_train(files, {"train.steps=5"}), 2, {"train.steps", "found 5, expected at least 8"});
  CHECK(log_of(run).size() > log.size());  // runs that could not start left the log alone
}

TEST_CASE("log sinks take their options from the config") {
  TinyFiles files;
  Outcome outcome = quern_train(files, {"log.sinks=[\"jsonl\"]", "log.jsonl.path=" + files.at("elsewhere.jsonl"),
                                        "train.steps=1", "checkpoint.export=false"});
  CHECK(outcome.code == 0);
  CHECK_FALSE(has(outcome.out, "step  1/1"));
  CHECK(has(read_text(files.at("elsewhere.jsonl")), "\"event\":\"end\""));
  CHECK_FALSE(fs::exists(files.at("run") + "/log.jsonl"));
}

TEST_CASE("a run that is not to save at its end leaves its checkpoints before it") {
  TinyFiles files;
  CHECK(quern_train(files, {"checkpoint.at_end=false"}).code == 0);
  CHECK(newest_step(files.at("run")) == 6);
  CHECK(events(files.at("run"), "end").size() == 1);
  const Outcome again = quern_train(files, {"train.steps=6"});
  CHECK(again.code == 0);
  CHECK(
      has(again.out, "warning: all 6 steps are done; raise train.steps to train on, or choose another log.directory"));
  CHECK(quern_train(files, {"checkpoint.at_end=false", "checkpoint.every=0", files.run("other")}).code == 0);
  CHECK(newest_step(files.at("other")) == -1);
  CHECK(fs::exists(files.at("other") + "/export/model.safetensors"));
}

TEST_CASE("plan prints memory and programs without data or a run directory") {
  TinyFiles files;
  fs::remove(files.at("train.tok"));
  Outcome plan = quern_run({"plan", files.config()});
  CHECK(plan.code == 0);
  for (const char* part : {"parameters, 2 layers", "master weights", "optimizer state", "total", "FLOP a token",
                           "state of a rank", "sharded over", "ranks           1\n"})
    CHECK(has(plan.out, part));
  for (const char* pass : {"model", "rotate", "differentiate", "lower", "saved", "fuse", "place"}) {
    CAPTURE(pass);
    Outcome programs = quern_run({"plan", files.config(), "--show", "program", "--pass", pass});
    CHECK(programs.code == 0);
    CHECK(has(programs.out, "rms_norm"));
    CHECK(has(programs.out,
              std::string(pass) == "model" || std::string(pass) == "rotate" || std::string(pass) == "differentiate"
                  ? "linear"
                  : "matmul"));
  }
  check_fails(quern_run({"plan", files.config(), "--show", "program", "--pass", "fuze"}), 2, {"fuze"});
  check_fails(quern_run({"plan", files.config(), "--show", "programs"}), 2, {"programs"});
  CHECK_FALSE(fs::exists(files.at("run")));
}

TEST_CASE("a plan says where state is that stays on the device, or whole, in spite of its key") {
  TinyFiles files;
  const Outcome plan =
      quern_run({"plan", files.config(), "--set", "parallel.ranks=2", "--set", "parallel.communicator=memcpy", "--set",
                 "parallel.zero=1", "--set", "train.accumulation=2", "--set", "memory.master=disk", "--set",
                 "memory.moments=disk"});
  CHECK(plan.code == 0);
  auto row = [&](const std::string& name) {
    const std::size_t begin = plan.out.find("\n  " + name, plan.out.find("state of a rank")) + 1;
    return plan.out.substr(begin, plan.out.find('\n', begin) - begin);
  };
  CHECK(has(row("master weights"), "  disk, "));
  CHECK(has(row("master weights"), " on the device  none"));  // in fp32 ops read the masters themselves
  CHECK(has(row("optimizer state"), "  disk  "));
  CHECK(has(row("optimizer state"), "  ranks, "));  // vectors are whole
  CHECK(row("optimizer state").ends_with(" whole"));
}

TEST_CASE("faults of config and data have their exit codes, before anything is written") {
  TinyFiles files;
  check_fails(quern_train(files, {"train.stepz=3", "train.micro_batch=0", "optimizer.master=fp8"}), 2,
              {"train.stepz: unknown key", "train.micro_batch: out of range", "optimizer.master", "nearest name"});
  check_fails(quern_train(files, {"train.sequence=64"}), 2, {"train.sequence", "64", "at most 32"});
  check_fails(quern_train(files, {"memory.device_budget=lots"}), 2,
              {"memory.device_budget: not a size", "\"lots\"", "GiB"});
  check_fails(quern_train(files, {"parallel.ranks=2"}), 2, {"parallel.communicator", "parallel.ranks = 1"});
  check_fails(quern_train(files, {"memory.moments=nowhere"}), 2,
              {"memory.moments", "no such offload plugin", "`device`"});
  check_fails(quern_train(files, {"model.llama.vocab_size=63"}), 2, {"found a vocabulary of 63", "at least 64"});
  check_fails(quern_train(files, {"data.tokens.train=\"\""}), 2, {"data.tokens.train"});
  check_fails(quern_train(files, {"data.tokens.train=" + files.at("none.tok")}), 3, {"none.tok"});
  check_fails(quern_train(files, {"checkpoint.tokenizer=" + files.at("none")}), 3, {"none", "checkpoint.tokenizer"});
  check_fails(quern_train(files, {"train.from=" + files.at("none")}), 3, {"none"});
  check_fails(quern_run({"train", files.at("none.toml")}), 3, {"none.toml"});
  for (const char* name : {"log.jsonl", "checkpoints", "export"}) CHECK_FALSE(fs::exists(files.at("run") + "/" + name));
}

TEST_CASE("a run that does not fit says what binds, and another in its directory who holds it") {
  TinyFiles files;
  check_fails(quern_train(files, {"memory.device_budget=100KiB"}), 4,
              {"memory.device_budget", "does not fit", "slots", "at most 100 KiB, which is"});
  Child first(train_arguments(files, {"train.steps=1000000", "checkpoint.every=0"}));
  while (first.running() && !has(read_text(files.at("run") + "/log.jsonl"), "\"step\"")) ::usleep(1000);
  check_fails(quern_train(files, {}), 4, {"another run writes into this directory", "process "});
  CHECK(first.running());
  first.signal(SIGTERM);
  CHECK(first.wait() == 143);
}

TEST_CASE("numbers that explode end the run with the last good step as its newest") {
  TinyFiles files;
  const std::string run = files.at("run");
  Overrides explode{"optimizer.learning_rate=1e30", "checkpoint.every=1", "checkpoint.keep_last=0"};
  Outcome outcome = quern_train(files, explode);
  std::int64_t last = newest_step(run);
  REQUIRE(last >= 1);
  REQUIRE(last < 8);
  check_fails(outcome, 5, {"step " + std::to_string(last + 1) + ":", "not finite", "was not applied", "learning_rate"});
  CHECK(events(run, "step").back().at("step") == last);
  CHECK_FALSE(fs::exists(run + "/export"));
  std::string tensors = newest_tensors(run);
  check_fails(quern_train(files, explode), 5, {"step " + std::to_string(last + 1) + ":"});  // again, the same
  CHECK(newest_tensors(run) == tensors);
}

TEST_CASE("a weight that is NaN ends the run, and nothing is saved over it") {
  TinyFiles files;
  const std::string run = files.at("run");
  CHECK(quern_train(files, {"train.steps=3", "checkpoint.export=false"}).code == 0);
  {
    Checkpoint good = read_checkpoint(checkpoint_path(run, 3));
    std::vector<std::vector<float>> memory;
    std::vector<NamedView> tensors;
    for (const StoredTensor& stored : good.tensors.tensors()) {
      memory.push_back(good.tensors.read_floats(stored.name));
      if (stored.name == "master/qkv.weight/1") memory.back()[5] = std::numeric_limits<float>::quiet_NaN();
      tensors.push_back({stored.name, {memory.back().data(), DType::f32, stored.extents}});
    }
    good.meta.step = 4;
    write_checkpoint(run, good.meta, tensors);
  }
  std::string tensors = newest_tensors(run);
  check_fails(quern_train(files, {}), 5, {"step 5:", "not finite", "was not applied"});
  CHECK(newest_step(run) == 4);
  CHECK(newest_tensors(run) == tensors);
}

TEST_CASE("weights and config of an export start another run where the first ended") {
  TinyFiles files;
  CHECK(quern_train(files, {"train.steps=30", "optimizer.learning_rate=2e-2"}).code == 0);
  const std::string exported = files.at("run") + "/export";
  auto ended = log_of(files.at("run")).back();
  CHECK(ended.at("val_loss").get<double>() < 3.5);  // of ln 64 = 4.16 at the start

  // Through the table, and through config.json with another run's token ids.
  CHECK(quern_train(files, {files.run("again"), "train.from=" + exported, "train.steps=1", kStill}).code == 0);
  CHECK(log_of(files.at("again")).back().at("val_loss") == ended.at("val_loss"));  // fp32 all the way: the same bits
  CHECK(read_text(files.at("again") + "/export/model.safetensors") == read_text(exported + "/model.safetensors"));

  nlohmann::json config = nlohmann::json::parse(read_text(exported + "/config.json"));
  CHECK(config.at("eos_token_id").is_null());
  config["bos_token_id"] = 1;
  config["eos_token_id"] = {2, 3};
  config["pad_token_id"] = 64;  // no such token
  write_text(exported + "/config.json", config.dump());
  write_text(files.at("continued.toml"), model_config(files, exported));
  for (const char* dtype : {"fp32", "bf16"}) {
    fs::remove_all(files.at("continued"));
    Outcome outcome = quern_run({"train", files.at("continued.toml"), "--set", "train.from=" + exported, "--set",
                                 kStill, "--set", std::string("checkpoint.export_dtype=") + dtype});
    CAPTURE(outcome.err);
    CHECK(outcome.code == 0);
    CHECK(log_of(files.at("continued")).back().at("val_loss") == ended.at("val_loss"));
    auto written = nlohmann::json::parse(read_text(files.at("continued") + "/export/config.json"));
    CHECK(written.at("bos_token_id") == 1);
    CHECK(written.at("eos_token_id") == nlohmann::json({2, 3}));
    CHECK(written.at("pad_token_id").is_null());
    CHECK(written.at("torch_dtype") == (std::string(dtype) == "fp32" ? "float32" : "bfloat16"));
    CHECK(written.at("hidden_size") == 32);
  }
}

TEST_CASE("recomputation and a memory budget change no bit") {
  for (const char* precision : {"precision.id=fp32", "precision.id=bf16"}) {
    TinyFiles files;
    Overrides common{precision, "train.accumulation=2", "checkpoint.export=false"};
    auto with = [&](const std::string& name, Overrides more) {
      more.insert(more.end(), common.begin(), common.end());
      more.push_back(files.run(name));
      return more;
    };
    std::int64_t all = planned_bytes(files, common),
                 least = planned_bytes(files, with("x", {"memory.recompute=[\"block\"]"}));
    REQUIRE(least < all);
    CHECK(quern_train(files, with("none", {})).code == 0);
    Losses losses = logged_losses(files.at("none"));
    REQUIRE(losses.size() == 8);
    std::vector<Overrides> choices{{"memory.recompute=[\"swiglu\", \"norm\"]"},
                                   {"memory.recompute=[\"block\"]"},
                                   {"memory.device_budget=" + std::to_string(all - 2048)},
                                   {"memory.device_budget=" + std::to_string((all + least) / 2) + "B"}};
    for (std::size_t i = 0; i < choices.size(); ++i) {
      std::string name = "choice" + std::to_string(i);
      CAPTURE(choices[i][0]);
      CHECK(planned_bytes(files, with(name, choices[i])) < all);
      CHECK(quern_train(files, with(name, choices[i])).code == 0);
      CHECK(logged_losses(files.at(name)) == losses);
      CHECK(newest_tensors(files.at(name)) == newest_tensors(files.at("none")));
    }
  }
}

TEST_CASE("z_loss trains, and is part of the gradient") {
  TinyFiles files;
  std::map<std::string, std::vector<nlohmann::json>> steps;
  for (const char* weight : {"0.0", "0.1"}) {
    CHECK(quern_train(files, {files.run(weight), std::string("train.z_loss=") + weight, "train.steps=20",
                              "checkpoint.export=false"})
              .code == 0);
    steps[weight] = events(files.at(weight), "step");
    CHECK(steps[weight].back().at("loss").get<double>() < steps[weight].front().at("loss").get<double>() - 0.3);
  }
  CHECK(steps["0.0"].front().at("grad_norm") != steps["0.1"].front().at("grad_norm"));
  CHECK(newest_tensors(files.at("0.0")) != newest_tensors(files.at("0.1")));
}

TEST_CASE("an evaluation counts each window of the split once, whatever the micro-batch") {
  TinyFiles files;  // 5 windows: micro-batches of 2 and 3 do not divide them, one of 8 is larger than all
  std::map<int, double> losses;
  for (int micro_batch : {1, 2, 3, 5, 8}) {
    std::string name = std::to_string(micro_batch);
    train_here(files,
               {files.run(name), "train.micro_batch=" + name, "train.steps=1", kStill, "checkpoint.export=false"});
    losses[micro_batch] = events(files.at(name), "eval").back().at("loss");
  }
  // Sums of 80 fp32 losses in other orders, and matmuls of other heights.
  for (auto [micro_batch, loss] : losses) CHECK(loss == doctest::Approx(losses[1]).epsilon(1e-5));
  train_here(files, {files.run("first"), "train.steps=1", "train.eval_batches=1", kStill, "checkpoint.export=false"});
  train_here(files, {files.run("more"), "train.steps=1", "train.eval_batches=99", kStill, "checkpoint.export=false"});
  CHECK(events(files.at("first"), "eval").back().at("loss") != losses[2]);
  CHECK(events(files.at("more"), "eval").back().at("loss") == losses[2]);
}

TEST_CASE("steps whose targets are all masked change nothing and say so") {
  TinyFiles files;
  TokenFileContent content{.tokens = {}, .mask = {}, .vocabulary = 64, .separator = -1};
  for (int i = 0; i < 4 * 16 + 1; ++i) {
    content.tokens.push_back(i % 64);
    content.mask.push_back(i > 2 * 16 && i <= 3 * 16);  // of four windows only the third counts
  }
  write_token_file(files.at("masked.tok"), content);
  Outcome outcome =
      quern_train(files, {"data.tokens.train=" + files.at("masked.tok"), "data.tokens.validation=\"\"",
                          "train.micro_batch=1", "train.steps=4", "checkpoint.every=1", "checkpoint.keep_last=0"});
  CHECK(outcome.code == 0);
  CHECK(events(files.at("run"), "warning").size() == 3);
  nlohmann::json counted;
  for (const nlohmann::json& step : events(files.at("run"), "step")) {
    std::int64_t number = step.at("step");
    CAPTURE(number);
    const bool counts = step.contains("loss");
    CHECK(counts == step.contains("grad_norm"));
    if (counts) counted = step.at("loss");
    if (number == 1) continue;
    std::string here = checkpoint_path(files.at("run"), number), before = checkpoint_path(files.at("run"), number - 1);
    bool moved = read_text(here + "/tensors.safetensors") != read_text(before + "/tensors.safetensors");
    CHECK(moved == counts);
  }
  REQUIRE(counted.is_number());
  CHECK(events(files.at("run"), "end").at(0).at("loss") == counted);
  CHECK(outcome.out.find("nan") == std::string::npos);
}

TEST_CASE("the first step with a target moves weights by the rate, however many had none before it") {
  bool was_late = false;
  for (int seed = 1; seed <= 4; ++seed) {
    TinyFiles files;
    TokenFileContent content{.tokens = {}, .mask = {}, .vocabulary = 64, .separator = -1};
    for (int i = 0; i < 4 * 16 + 1; ++i) {
      content.tokens.push_back(i % 64);
      content.mask.push_back(i > 2 * 16 && i <= 3 * 16);
    }
    write_token_file(files.at("masked.tok"), content);
    Overrides all{"data.tokens.train=" + files.at("masked.tok"),
                  "data.tokens.validation=\"\"",
                  "train.micro_batch=1",
                  "train.steps=4",
                  "checkpoint.every=1",
                  "checkpoint.keep_last=0",
                  "schedule.id=constant",
                  "optimizer.learning_rate=0.01",
                  "optimizer.adamw.weight_decay=0.0",
                  "train.seed=" + std::to_string(seed)};
    REQUIRE(quern_train(files, all).code == 0);
    std::int64_t counted = 0;
    for (const nlohmann::json& step : events(files.at("run"), "step"))
      if (step.contains("loss")) counted = step.at("step");
    if (counted < 2) continue;  // nothing to compare with
    was_late = true;
    Checkpoint before = read_checkpoint(checkpoint_path(files.at("run"), counted - 1)),
               after = read_checkpoint(checkpoint_path(files.at("run"), counted));
    CHECK(before.meta.updates == 0);
    CHECK(after.meta.updates == 1);
    const std::vector<float> old = before.tensors.read_floats("master/final_norm.weight"),
                             now = after.tensors.read_floats("master/final_norm.weight");
    // Both corrected moments are the gradient's: each element moves by the rate, but where its gradient is near eps.
    float moved = 0;
    for (std::size_t i = 0; i < old.size(); ++i) moved = std::max(moved, std::abs(now[i] - old[i]));
    CHECK(moved == doctest::Approx(0.01).epsilon(1e-3));
  }
  CHECK(was_late);
}

TEST_CASE("data that turn out bad in the middle of a run end it, and what was saved stays") {
  TinyFiles files;
  const std::string run = files.at("run"), data = files.at("train.tok");
  Overrides all{"train.micro_batch=1", "train.steps=13", "checkpoint.every=1", "checkpoint.keep_last=0",
                "checkpoint.export=false"};
  CHECK(quern_train(files, all).code == 0);
  std::string bytes = read_text(data);
  bytes.replace(64 + 2 * 100, 2, "\xff\xff");  // token 100, of window 6, is 65535
  const std::uint64_t sum = checksum_of(std::as_bytes(std::span(bytes)).subspan(64));  // as a faulty writer's would be
  std::memcpy(bytes.data() + offsetof(TokenHeader, checksum), &sum, sizeof sum);
  write_text(data, bytes);
  all.push_back(files.run("broken"));
  check_fails(quern_train(files, all), 3, {"train.tok", "65535"});
  std::int64_t last = newest_step(files.at("broken"));
  REQUIRE(last >= 1);
  REQUIRE(last < 13);
  CHECK(newest_tensors(files.at("broken")) == tensors_of(read_checkpoint(checkpoint_path(run, last))));
}
