// `quern checkpoint info` and `quern export` on checkpoints of any number of ranks, whole and broken; and runs that
// begin at a checkpoint of another.
#include <filesystem>

#include <doctest/doctest.h>

#include "checkpoint/test_support.h"
#include "end_to_end.h"
#include "test_paths.h"

using namespace quern;
using namespace quern::testing;
namespace fs = std::filesystem;

namespace {

const Overrides kThreeRanks{"parallel.ranks=3", "parallel.communicator=memcpy", "parallel.zero=3"};
const Overrides kRun{"precision.id=e4m3", "train.accumulation=3", "train.steps=4", "train.eval_every=0",
                     "checkpoint.keep_last=0"};

}  // namespace

TEST_CASE("a checkpoint of three ranks is shown and verified, by its path and by its run's") {
  TinyFiles files;
  const std::string run = files.at("run"), checkpoint = checkpoint_path(run, 4);
  REQUIRE(quern_train(files, with(kRun, kThreeRanks)).code == 0);
  for (const std::string& path : {checkpoint, run}) {
    const Outcome text = quern_run({"checkpoint", "info", path, "--verify"});
    CAPTURE(text.out);
    CHECK(text.code == 0);
    for (const char* part : {"step            4, 4 updates, 384 tokens\n", "written by      3 ranks of quern ",
                             "model.id = \"llama\"\n", "precision.id = \"e4m3\"\n", "parallel.ranks = 3\n", "master ",
                             "moment1 ", "moment2 ", "precision ", "tensors-00002-of-00003.safetensors, ",
                             "compared        quern 0.", "plugin llama ", "every file has its checksum\n"})
      CHECK(has(text.out, part));
  }
  CHECK(has(quern_run({"checkpoint", "info", checkpoint}).out, "more by --verify\n"));
  const nlohmann::json json = nlohmann::json::parse(quern_run({"checkpoint", "info", checkpoint, "--json"}).out);
  CHECK(json.at("step") == 4);
  CHECK(json.at("ranks") == 3);
  CHECK(json.at("tokens") == 384);
  CHECK(json.at("settings").at("parallel.shard_weights") == "\"ranks\"");
  CHECK(json.at("files").size() == 3);
  CHECK(json.at("verified") == false);
  const auto& kinds = json.at("kinds");
  CHECK(kinds.at("master").at("elements") == kinds.at("moment1").at("elements"));
  CHECK(kinds.at("master").at("bytes") == 4 * kinds.at("master").at("elements").get<std::int64_t>());
  CHECK(json.at("other_files").empty());
  write_text(checkpoint + "/notes.txt", "mine");
  CHECK(has(quern_run({"checkpoint", "info", checkpoint, "--verify"}).out, "not of it       notes.txt\n"));
}

TEST_CASE("every fault of a checkpoint is an error of its file, and only --verify reads the tensors") {
  TinyFiles files;
  const std::string sound = checkpoint_path(files.at("run"), 4), broken = files.at("broken");
  REQUIRE(quern_train(files, with(kRun, kThreeRanks)).code == 0);
  auto fault = [&](const std::function<void()>& damage, const Overrides& more = {}) {
    fs::remove_all(broken);
    fs::copy(sound, broken);
    damage();
    return quern_run(with({"checkpoint", "info", broken}, more));
  };
  const std::string state = broken + "/state.json", file = broken + "/tensors-00001-of-00003.safetensors";
  for (const std::string name : {"config", "data_state", "device_state", "evaluated", "files", "format", "libraries",
                                 "quern_version", "step", "tokens", "updates", "version", "xxh3"}) {
    CAPTURE(name);
    const bool optional = name == "updates" || name == "evaluated" || name == "tokens" || name == "libraries";
    const Outcome outcome = fault([&] {
      nlohmann::json whole = nlohmann::json::parse(read_text(state));
      REQUIRE(whole.erase(name) == 1);
      if (name == "xxh3")
        write_text(state, whole.dump());
      else
        change_state(broken, [&](nlohmann::json& all) { all.erase(name); });
    });
    if (optional)
      CHECK(outcome.code == 0);
    else
      check_fails(outcome, 3, {state + ": ", "resume from an older checkpoint"});
  }
  check_fails(fault([&] { fs::resize_file(state, 20); }), 3, {state + ": "});
  check_fails(fault([&] { fs::remove(file); }), 3, {file + ": is missing"});
  check_fails(fault([&] { fs::resize_file(file, 100); }), 3, {file + ": is damaged: found 100 bytes"});
  auto flip = [&] {
    std::string bytes = read_text(file);
    bytes.back() ^= 1;
    write_text(file, bytes);
  };
  CHECK(fault(flip).code == 0);
  check_fails(fault(flip, {"--verify"}), 3, {file + ": checksum: found "});
  fs::create_directories(files.at("begun"));
  check_fails(
      quern_run({"checkpoint", "info", files.at("none")}), 3,
      {files.at("none") + ": no checkpoint there, for there is no such directory; train first, or correct the path"});
  check_fails(quern_run({"checkpoint", "info", files.at("begun")}), 3,
              {files.at("begun") + ": no checkpoint there; train first"});
  check_fails(quern_run({"checkpoint", "info"}), 2, {"missing DIR"});
}

TEST_CASE("a run without a whole checkpoint has one next step, whatever asks for it") {
  TinyFiles files;
  const std::string run = files.at("run"), checkpoints = run + "/checkpoints";
  auto tools = [&](const std::string& path, const std::vector<std::string>& parts) {
    for (const Outcome& outcome :
         {quern_run({"checkpoint", "info", path}), quern_run({"export", path, files.at("x")})}) {
      check_fails(outcome, 3, parts);
      CHECK(occurrences(outcome.err, ";") == 1);
    }
  };
  // Killed in its first save: run again, it begins at step 0.
  fs::create_directories(checkpoints + "/.tmp-step-00000002");
  tools(run, {checkpoints + "/.tmp-step-00000002: the run's first checkpoint is not finished; ", "train again"});
  const Outcome again = quern_train(files, {"train.steps=2", "checkpoint.export=false"});
  CHECK(again.code == 0);
  CHECK(has(again.out, "removed " + checkpoints + "/.tmp-step-00000002, left unfinished by an earlier run"));
  tools(checkpoints, {checkpoints + ": no checkpoint, but a place for them; name the run's directory"});
  // Damaged: a new start is asked for, and none is hidden behind another.
  const std::string state = checkpoint_path(run, 2) + "/state.json";
  const std::string next = "; move the run directory away to start a new run";
  write_text(state, "{}");
  tools(run, {"step-00000002: no checkpoint of the run is whole: " + state, next});
  for (const char* resume : {"auto", "never"}) {
    const Outcome outcome = quern_train(files, {"checkpoint.resume=" + std::string(resume)});
    check_fails(outcome, 3, {"step-00000002: no checkpoint of the run is whole: " + state, next});
    CHECK(occurrences(outcome.err, ";") == 1);
  }
  fs::remove(state);
  tools(checkpoint_path(run, 2),
        {"step-00000002: state.json is missing, so it is not whole; name the run's directory"});
}

TEST_CASE("a checkpoint of any number of ranks is exported as its run would, without a device") {
  TinyFiles files;
  const std::string run = files.at("run");
  for (const Overrides& ranks : {Overrides{}, kThreeRanks}) {
    fs::remove_all(run);
    REQUIRE(quern_train(files, with(kRun, ranks)).code == 0);
    const std::string want = read_text(run + "/export/model.safetensors");
    for (const std::string& path : {run, checkpoint_path(run, 4)}) {
      const Outcome outcome = quern_run({"export", path, files.at("out"), "--dtype", "fp32"});
      CAPTURE(outcome.err);
      CHECK(outcome.code == 0);
      CHECK(read_text(files.at("out") + "/model.safetensors") == want);
      CHECK(read_text(files.at("out") + "/config.json") == read_text(run + "/export/config.json"));
    }
    CHECK(quern_run({"export", run, files.at("step-{step}")}).out == files.at("step-4") + "\n");
    CHECK(quern_run({"export", run, files.at("half"), "--dtype=bf16"}).code == 0);
    CHECK(fs::file_size(files.at("half") + "/model.safetensors") < 0.6 * static_cast<double>(want.size()));
    // It trains on, in any way.
    CHECK(quern_train(files, {"train.from=" + files.at("half"), "train.steps=1", files.run("from")}).code == 0);
  }
  check_fails(quern_run({"export", run, files.at("x"), "--to", "onnx"}), 2,
              {"--to: no such format", "expected hf, gguf or peft"});
  check_fails(quern_run({"export", run, files.at("x"), "--to", "peft"}), 2, {run, "has no adapter to write alone"});
  check_fails(quern_run({"export", run, files.at("x"), "--set", "adapter.merge=false"}), 2,
              {"--set adapter.merge: the format says whether an adapter is merged", "found --to hf"});
  check_fails(quern_run({"export", run, files.at("x"), "--dtype=fp8"}), 2, {"checkpoint.export_dtype", "not a choice"});
  check_fails(quern_run({"export", run, files.at("x"), "--set", "model.llama.num_hidden_layers=3"}), 3,
              {"its weights are of another model than its config says", "attn_norm.weight/2"});
  check_fails(quern_run({"export", files.at("none"), files.at("x")}), 3, {"no checkpoint there"});
  CHECK_FALSE(fs::exists(files.at("x")));
}

TEST_CASE("a run begins at an older checkpoint of another, with the bits of that run, or with data from the start") {
  TinyFiles files;
  const std::string from = "checkpoint.from=" + checkpoint_path(files.at("a"), 4);
  const Overrides numbers{"precision.id=e4m3",   "train.accumulation=2",   "train.eval_every=0",
                          "checkpoint.every=2",  "checkpoint.keep_last=0", "checkpoint.export=false",
                          "schedule.id=constant"};
  auto train = [&](const std::string& name, int steps, const Overrides& more) {
    const Outcome outcome =
        quern_train(files, with(with(numbers, more), {files.run(name), "train.steps=" + std::to_string(steps)}));
    CAPTURE(outcome.err);
    CHECK(outcome.code == 0);
    return logged_losses(files.at(name));
  };
  const Losses straight = train("a", 8, {});
  Losses rest = straight;
  std::erase_if(rest, [](const auto& step) { return step.first <= 4; });
  // In two parts: the second goes on at its own checkpoint.
  train("b", 6, {from});
  CHECK(train("b", 8, {from}) == rest);
  CHECK(newest_tensors(files.at("b")) == newest_tensors(files.at("a")));
  CHECK(newest_step(files.at("a")) == 8);
  // Several ranks begin there too.
  const Overrides ranks{"parallel.ranks=2", "parallel.communicator=memcpy", "parallel.zero=2"};
  CHECK(train("c", 6, with(ranks, {from})).size() == 2);
  // Step 5 has the data of step 1, so the position after two steps is the one after step 2.
  auto position = [&](const std::string& name, std::int64_t step) {
    return read_checkpoint(checkpoint_path(files.at(name), step)).meta.data_state;
  };
  const Losses restarted = train("d", 6, {from, "checkpoint.from_data=restart"});
  CHECK(restarted.begin()->first == 5);
  CHECK(restarted != train("b", 8, {from}));
  CHECK(position("d", 6) == position("a", 2));
  CHECK(position("b", 6) == position("a", 6));
  CHECK(train("e", 6, with(ranks, {from, "checkpoint.from_data=restart"})).begin()->first == 5);
  CHECK(position("e", 6) == position("a", 2));
  // Without a step of its own the run is stopped and goes on as well; a run directory gives its newest.
  CHECK(train("f", 10, {"checkpoint.from=" + files.at("a")}).begin()->first == 9);
  check_fails(quern_train(files, with(numbers, {files.run("g"), "train.steps=3", from})), 2,
              {"train.steps", "the run is past that already", "at least 4"});
  check_fails(quern_train(files, with(numbers, {files.run("g"), "checkpoint.from=" + files.at("none")})), 3,
              {"checkpoint.from: " + files.at("none") + ": no checkpoint there", "train.from takes the weights"});
}
