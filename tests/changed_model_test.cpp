// A checkpoint goes on with the model and the optimizer that wrote it, or not at all: what differs is listed, and no
// checkpoint of another model is ever removed.
#include <algorithm>
#include <filesystem>
#include <functional>

#include <doctest/doctest.h>

#include "checkpoint/checkpoint_store.h"
#include "end_to_end.h"

using namespace quern;
using namespace quern::testing;
namespace fs = std::filesystem;

namespace {

const Overrides kHalf{"train.steps=4", "checkpoint.every=1", "checkpoint.keep_last=2", "checkpoint.export=false"};

Overrides resumed(const Overrides& more) { return with(with(kHalf, {"train.steps=8"}), more); }

std::vector<std::string> generate_arguments(const TinyFiles& files, const Overrides& overrides) {
  std::vector<std::string> words = train_arguments(files, overrides);
  words[0] = "generate";
  words.insert(words.end(), {"--prompt-tokens", "1,2", "--max-tokens", "2"});
  return words;
}

std::map<std::string, std::string> files_below(const std::string& directory) {
  std::map<std::string, std::string> contents;
  for (const auto& entry : fs::recursive_directory_iterator(directory))
    if (entry.is_regular_file()) contents[entry.path()] = read_text(entry.path());
  return contents;
}

/// Writes the newest checkpoint again as one of the next step, with another meta or another tensor more.
void rewrite_newest(const std::string& run,
                    const std::function<void(CheckpointMeta&, std::vector<NamedView>&)>& change) {
  const NewestCheckpoint newest = find_newest(run);
  const Checkpoint& whole = *newest.checkpoint;
  std::vector<std::vector<std::byte>> storage;
  std::vector<NamedView> tensors;
  for (const StoredTensor& tensor : whole.tensors.tensors()) {
    const auto bytes = whole.tensors.bytes(tensor);
    storage.emplace_back(bytes.begin(), bytes.end());
    tensors.push_back({tensor.name, {storage.back().data(), DType::f32, tensor.extents}});
  }
  CheckpointMeta meta = whole.meta;
  meta.step += 1;
  change(meta, tensors);
  write_checkpoint(run, meta, tensors);
}

}  // namespace

TEST_CASE("a run whose parameters changed is refused with what differs, and every checkpoint stays") {
  struct Change {
    Overrides before, after;
    std::vector<std::string> parts;
  };
  const std::string untied = "model.llama.tie_word_embeddings=false", tied = "model.llama.tie_word_embeddings=true";
  const std::vector<Change> changes{
      {{},
       {"model.llama.num_hidden_layers=1"},
       {"'master/attn_norm.weight/1' found F32 (32), expected none", "num_hidden_layers = 1 (was 2)"}},
      {{}, {"model.llama.num_hidden_layers=3"}, {"/2' found none, expected F32 (32)", " more", "(was 2)"}},
      {{untied}, {tied}, {"master/lm_head.weight' found F32 (64, 32), expected none", "tie_word_embeddings = true"}},
      {{tied}, {untied}, {"master/lm_head.weight' found none, expected F32 (64, 32)"}},
      {{"model.llama.attention_bias=true"}, {}, {"'master/qkv.bias/0' found F32 (64), expected none"}},
      {{"model.llama.vocab_size=72"}, {}, {"'master/embedding.weight' found F32 (72, 32), expected F32 (64, 32)"}},
      {{}, {"optimizer.master=bf16"}, {"found F32 (64, 32), expected BF16 (64, 32)", "optimizer.master = \"bf16\""}},
  };
  for (const Change& change : changes) {
    TinyFiles files;
    const std::string run = files.at("run");
    CAPTURE(change.parts[0]);
    REQUIRE(quern_train(files, with(kHalf, change.before)).code == 0);
    const auto before = files_below(run + "/checkpoints");
    std::vector<std::string> parts = change.parts;
    parts.push_back("step-00000004: does not fit this run, its parameters differ: ");
    check_fails(quern_run(generate_arguments(files, change.after)), 3, parts);
    parts.push_back("or choose another log.directory");
    const Outcome outcome = quern_train(files, resumed(change.after));
    check_fails(outcome, 3, parts);
    CHECK(outcome.err.size() < 2000);
    CHECK(files_below(run + "/checkpoints") == before);
    CHECK(quern_train(files, resumed(change.before)).code == 0);  // what it was goes on
  }
}

TEST_CASE("optimizer state has to fit on resuming, and not for generating") {
  TinyFiles files;
  REQUIRE(quern_train(files, kHalf).code == 0);
  const Overrides bf16{"optimizer.adamw.moments=bf16"};
  check_fails(quern_train(files, resumed(bf16)), 3,
              {"does not fit this run, its optimizer state differs: ", "'moment1/", "found F32", "expected BF16",
               "optimizer.adamw.moments = \"bf16\" (was \"fp32\")"});
  const Outcome same = quern_run(generate_arguments(files, {})), other = quern_run(generate_arguments(files, bf16));
  CHECK(other.code == 0);
  CHECK(other.out == same.out);
  CHECK_FALSE(has(other.err, "changed"));
  const Outcome turned = quern_run(generate_arguments(files, {"model.llama.rope_theta=20000.0"}));
  CHECK(turned.code == 0);  // a model of the same shapes, which is worth a word
  CHECK(occurrences(turned.err, "changed since the checkpoint: model.llama.rope_theta = 20000.0 (was 10000.0)") == 1);
}

TEST_CASE("states of a precision that changed are reset with a warning") {
  const Overrides e4m3{"precision.id=e4m3", "precision.e4m3.history=3"}, longer{"precision.id=e4m3"};
  const Overrides bf16{"precision.id=bf16"};
  for (const auto& [before, after] : {std::pair(e4m3, bf16), {bf16, e4m3}, {e4m3, longer}}) {
    TinyFiles files;
    CAPTURE(before[0]);
    CAPTURE(after[0]);
    REQUIRE(quern_train(files, with(kHalf, before)).code == 0);
    CHECK(quern_run(generate_arguments(files, after)).code == 0);
    const Outcome outcome = quern_train(files, resumed(after));
    CAPTURE(outcome.err);
    CHECK(outcome.code == 0);
    CHECK(occurrences(outcome.out, "states that are not in it are reset: '") == 1);
    CHECK(has(outcome.out, "changed since the checkpoint: precision."));
    CHECK(newest_step(files.at("run")) == 8);
    CHECK(fs::exists(checkpoint_path(files.at("run"), 7)));
    CHECK_FALSE(fs::exists(checkpoint_path(files.at("run"), 4)));  // the same parameters
  }
}

TEST_CASE("a checkpoint with tensors that no run writes is refused where they would be lost") {
  TinyFiles files;
  const std::string run = files.at("run");
  REQUIRE(quern_train(files, kHalf).code == 0);
  for (const auto& [name, part] : {std::pair("master/extra", "parameters differ"),
                                   {"ema/embedding.weight", "optimizer state differs"},
                                   {"extra", "precision state differs"}}) {
    float value = 1;
    fs::remove_all(checkpoint_path(run, 5));
    rewrite_newest(run, [&](CheckpointMeta&, std::vector<NamedView>& tensors) {
      tensors.push_back({name, {&value, DType::f32, {1}}});
    });
    check_fails(quern_train(files, resumed({})), 3,
                {std::string(part) + ": '" + name + "' found F32 (1), expected none"});
    CHECK(quern_run(generate_arguments(files, {})).code == (name == std::string("master/extra") ? 3 : 0));
  }
}

TEST_CASE("checkpoints of another model in the directory are neither counted nor removed") {
  TinyFiles files;
  const std::string run = files.at("run");
  const Overrides small{"model.llama.num_hidden_layers=1", files.run("small"), "train.steps=2"};
  REQUIRE(quern_train(files, with(kHalf, small)).code == 0);
  fs::create_directories(run + "/checkpoints");
  for (std::int64_t step : {1, 2}) fs::rename(checkpoint_path(files.at("small"), step), checkpoint_path(run, step));
  const auto before = files_below(run + "/checkpoints");
  check_fails(quern_train(files, kHalf), 3, {"step-00000002: does not fit this run"});
  fs::rename(run + "/checkpoints", files.at("aside"));
  REQUIRE(quern_train(files, with(kHalf, {"train.steps=3"})).code == 0);
  for (std::int64_t step : {1, 2}) {
    fs::remove_all(checkpoint_path(run, step));
    fs::rename(files.at("aside") + fs::path(checkpoint_path("/", step)).filename().string().insert(0, 1, '/'),
               checkpoint_path(run, step));
  }
  CHECK(quern_train(files, with(kHalf, {"train.steps=6"})).code == 0);
  for (const auto& [path, text] : before) CHECK(read_text(path) == text);
  for (std::int64_t step : {3, 4}) CHECK_FALSE(fs::exists(checkpoint_path(run, step)));
  for (std::int64_t step : {5, 6}) CHECK(fs::exists(checkpoint_path(run, step)));
}

TEST_CASE("a resumed run reports a library that is not the one that wrote the checkpoint") {
  TinyFiles files;
  const std::string run = files.at("run");
  REQUIRE(quern_train(files, with(kHalf, {"checkpoint.keep_last=0"})).code == 0);
  const CheckpointMeta meta = read_checkpoint(checkpoint_path(run, 4)).meta;
  std::vector<std::string> names;
  for (const LibraryIdentity& library : meta.libraries) {
    names.push_back(library.name);
    CHECK(library.hash.size() == 16);
    CHECK_FALSE(library.version.empty());
  }
  CHECK(names.front() == "quern");
  for (const char* plugin : {"plugin cpu", "plugin llama", "plugin fp32"})
    CHECK(std::count(names.begin(), names.end(), plugin) == 1);
  rewrite_newest(run, [](CheckpointMeta& meta, std::vector<NamedView>&) {
    for (LibraryIdentity& library : meta.libraries)
      if (library.name == "plugin llama") library.version = "0.0", library.hash = "0123456789abcdef";
  });
  const Outcome outcome = quern_train(files, resumed({}));
  CHECK(outcome.code == 0);
  CHECK(occurrences(outcome.out, "changed since the checkpoint: plugin llama = ") == 1);
  CHECK(occurrences(outcome.out, "(was 0.0, file 0123456789abcdef)") == 1);
  CHECK(occurrences(outcome.out, "changed since the checkpoint: plugin") == 1);
  CHECK(occurrences(outcome.out, "changed since the checkpoint: quern") == 0);
}
