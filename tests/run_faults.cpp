// Faults of token files, checkpoints, and of what a run meets while it trains.
#include <cstring>
#include <filesystem>

#include <doctest/doctest.h>

#include "base/checksum.h"
#include "checkpoint/checkpoint.h"
#include "checkpoint/checkpoint_store.h"
#include "data/token_file.h"
#include "faults.h"

namespace quern::testing {

namespace {

namespace fs = std::filesystem;
using Arguments = std::vector<std::string>;
using Prepare = std::function<Arguments(const TinyFiles&)>;

Arguments train(const TinyFiles& files) { return train_arguments(files, {}); }

Prepare changed_tokens(const std::function<void(std::string&)>& change) {
  return [change](const TinyFiles& files) {
    std::string text = read_text(files.at("train.tok"));
    change(text);
    write_text(files.at("train.tok"), text);
    return train(files);
  };
}

Prepare tokens(const TokenFileContent& content) {
  return [content](const TinyFiles& files) {
    write_token_file(files.at("train.tok"), content);
    return train(files);
  };
}

// A run of 3 steps with a checkpoint, then `change`, then the same run to its end.
Prepare resumed(const std::function<void(const TinyFiles&, const std::string& checkpoint)>& change) {
  return [change](const TinyFiles& files) {
    REQUIRE(quern_train(files, {"train.steps=3", "checkpoint.export=false"}).code == 0);
    change(files, checkpoint_path(files.at("run"), 3));
    return train(files);
  };
}

}  // namespace

std::vector<Fault> token_file_faults() {
  const std::string again = "prepare the data again";
  auto put = [](std::size_t at, const std::string& bytes) {
    return changed_tokens([=](std::string& text) { text.replace(at, bytes.size(), bytes); });
  };
  TokenFileContent masked{std::vector<std::int32_t>(65, 1), std::vector<bool>(65), 64};
  return {
      {"no such file",
       3,
       {"train.tok: cannot be opened", "expected a readable file"},
       [](const TinyFiles& files) {
         fs::remove(files.at("train.tok"));
         return train(files);
       }},
      {"empty",
       3,
       {"train.tok", "found 0 bytes, expected at least the 64 bytes", again},
       changed_tokens([](std::string& text) { text.clear(); })},
      {"another magic number",
       3,
       {"train.tok: not a token file", "expected QUERNTOK or BIN.TOK", "data preparation"},
       put(0, "QUERNTAK")},
      {"another version", 3, {"train.tok: token file version: found 9, expected 1", again}, put(8, "\x09")},
      {"cut short",
       3,
       {"train.tok: file is truncated: found 482 bytes, expected 488", again},
       changed_tokens([](std::string& text) { text.resize(text.size() - 6); })},
      {"no tokens",
       3,
       {"train.tok: token_count: found 0, expected at least one", again},
       put(16, std::string(8, '\0'))},
      {"shorter than one sequence",
       3,
       {"train.tok: shorter than one sequence", "found 16", "expected at least 17"},
       tokens({std::vector<std::int32_t>(16, 1), {}, 64})},
      {"every token masked", 3, {"train.tok: no token of any whole sequence counts", "the loss mask"}, tokens(masked)},
      {"a token over the vocabulary",
       3,
       {"train.tok: token 100 is not in the vocabulary: found 65535", "below 64", again},
       changed_tokens([](std::string& text) {
         text.replace(64 + 2 * 100, 2, "\xff\xff");
         const std::uint64_t sum = checksum_of(std::as_bytes(std::span(text)).subspan(64));
         std::memcpy(&text[32], &sum, 8);  // as a faulty writer's would be
       })},
      {"changed bytes behind the header",
       3,
       {"train.tok: checksum of the payload: found", "the file is damaged"},
       put(64 + 2 * 100, "\x01")},
      {"a vocabulary over the model's",
       2,
       {"run.toml:2:1: model.id", "found 64, expected at least 100", "vocab_size"},
       tokens({std::vector<std::int32_t>(65, 1), {}, 100})},
      {"changed since the checkpoint",
       3,
       {"train.tok: the data changed since the checkpoint", "give the run the data"},
       resumed([](const TinyFiles& files, const std::string&) {
         write_token_file(files.at("train.tok"), {std::vector<std::int32_t>(13 * 16 + 1, 2), {}, 64});
       })},
  };
}

std::vector<Fault> run_faults() {
  return {
      {"a flipped bit in the only checkpoint's tensors",
       3,
       {"step-00000003", "no checkpoint of the run is whole", "tensors.safetensors: checksum",
        "move the run directory"},
       resumed([](const TinyFiles&, const std::string& checkpoint) {
         std::string bytes = read_text(checkpoint + "/tensors.safetensors");
         bytes[bytes.size() - 5] ^= 16;
         write_text(checkpoint + "/tensors.safetensors", bytes);
       })},
      {"a flipped bit in its state.json",
       3,
       {"step-00000003/state.json", "found", "move the run directory"},
       resumed([](const TinyFiles&, const std::string& checkpoint) {
         std::string bytes = read_text(checkpoint + "/state.json");
         bytes[bytes.find("train.tok")] ^= 16;
         write_text(checkpoint + "/state.json", bytes);
       })},
      {"a checkpoint without its tensors",
       3,
       {"tensors.safetensors: is missing", "move the run directory"},
       resumed(
           [](const TinyFiles&, const std::string& checkpoint) { fs::remove(checkpoint + "/tensors.safetensors"); })},
      {"a checkpoint of another model",
       3,
       {"does not fit this run, its parameters differ: 'master/embedding.weight' found F32 (64, 32), expected F32 (64, "
        "64)",
        "model.llama.hidden_size = 64 (was 32)", "resume with the model"},
       [](const TinyFiles& files) {
         resumed([](const TinyFiles&, const std::string&) {})(files);
         return train_arguments(files, {"model.llama.hidden_size=64"});
       }},
      {"checkpoints where the run is to start anew",
       2,
       {"checkpoint.resume", "found", "step-00000003", "choose another log.directory"},
       [](const TinyFiles& files) {
         resumed([](const TinyFiles&, const std::string&) {})(files);
         return train_arguments(files, {"checkpoint.resume=never"});
       }},
      {"a run that is past its end",
       2,
       {"train.steps", "found 2, expected at least 3", "raise it"},
       [](const TinyFiles& files) {
         resumed([](const TinyFiles&, const std::string&) {})(files);
         return train_arguments(files, {"train.steps=2"});
       }},
      {"a device budget that is too small",
       4,
       {"memory.device_budget", "does not fit", "expected at most 100 KiB", "slots"},
       [](const TinyFiles& files) { return train_arguments(files, {"memory.device_budget=100KiB"}); }},
      {"another run in the same directory",
       4,
       {"another run writes into this directory", "process", "wait for it, or choose another log.directory"},
       [](const TinyFiles& files) {
         static std::unique_ptr<RunLock> lock;  // held while the program runs
         lock = std::make_unique<RunLock>(files.at("run"));
         return train(files);
       }},
      {"something else in the place of the export, found at the start",
       4,
       {"run/export", "is there already and is not an export", "README", "move it away"},
       [](const TinyFiles& files) {
         std::filesystem::create_directories(files.at("run") + "/export");
         write_text(files.at("run") + "/export/README", "notes");
         return train_arguments(files, {"checkpoint.export=true"});
       }},
      {"a place for checkpoints that cannot be written, found at the start",
       4,
       {"run/checkpoints: no file can be written there"},
       [](const TinyFiles& files) {
         fs::create_directories(files.at("run"));
         fs::create_directory_symlink("/proc/self/fdinfo", files.at("run") + "/checkpoints");
         return train(files);
       }},
      {"a file in the place of the run directory",
       4,
       {"run", "Not a directory"},
       [](const TinyFiles& files) {
         write_text(files.at("run"), "notes");
         return train(files);
       }},
      {"a loss that explodes",
       5,
       {"step", "not finite", "was not applied", "learning_rate"},
       [](const TinyFiles& files) { return train_arguments(files, {"optimizer.learning_rate=1e30"}); }},
  };
}

}  // namespace quern::testing
