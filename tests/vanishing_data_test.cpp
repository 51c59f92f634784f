// Token files that others change, shorten, extend, replace or remove while a run reads them, and lists longer than the
// limit on open files: no step is lost, and the run goes on with the same bits once the file is back.
#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>

#include <doctest/doctest.h>

#include "data/tokens/token_file.h"
#include "data/tokens/token_header.h"
#include "end_to_end.h"
#include "test_paths.h"

using namespace quern;
using namespace quern::testing;
namespace fs = std::filesystem;

namespace {

TokenFileContent content_of(std::size_t count) {
  TokenFileContent content{.tokens = {}, .mask = {}, .vocabulary = 64, .separator = 0};
  for (std::size_t i = 0; i < count; ++i) content.tokens.push_back(static_cast<std::int32_t>(i * 7 % 61));
  return content;
}

/// Writes a token file of zeros whose header states another checksum. It takes no space on the disk.
void write_sparse_file(const std::string& path, std::uint64_t payload_bytes) {
  write_token_file(path, content_of(40));
  std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
  TokenHeader header{};
  file.read(reinterpret_cast<char*>(&header), sizeof header);
  header.token_count = payload_bytes / header.token_bytes;
  file.seekp(0);
  file.write(reinterpret_cast<const char*>(&header), sizeof header);
  file.close();
  fs::resize_file(path, sizeof header);
  fs::resize_file(path, sizeof header + payload_bytes);
}

/// Acts on a run's files after some steps, while the run stands still. Returns how it ended.
Outcome train_and_disturb(const TinyFiles& files, const Overrides& overrides, const std::function<void()>& disturb) {
  Child child(train_arguments(files, overrides));
  while (child.running() && events(files.at("run"), "step").size() < 5) ::usleep(500);
  child.signal(SIGSTOP);
  disturb();
  child.signal(SIGCONT);
  const int code = child.wait();
  return {code, child.out(), child.err()};
}

const std::vector<Overrides> kKinds = {
    {"precision.id=bf16", "checkpoint.background=true"},
    // A step of several micro-batches that moves scales before the data fail.
    {"precision.id=e4m3", "train.accumulation=3", "checkpoint.background=false"},
};

}  // namespace

TEST_CASE("a token file that changes its size during a run ends it with the steps done saved, and no bit is lost") {
  for (const Overrides& kind : kKinds)
    for (std::uintmax_t size : {0, 64, 100000}) {
      CAPTURE(kind[0]);
      CAPTURE(size);
      TinyFiles files;
      const std::string path = files.at("data.tok"), run = files.at("run");
      write_token_file(path, content_of(16 * 200 + 1));
      const std::string good = read_text(path);
      Overrides all = kind;
      for (const char* more :
           {"train.steps=400", "train.eval_every=0", "checkpoint.every=1000", "checkpoint.export=false"})
        all.emplace_back(more);
      all.push_back("data.tokens.train=" + path);
      Outcome outcome = train_and_disturb(files, all, [&] { fs::resize_file(path, size); });
      const std::int64_t step = newest_step(run);
      check_fails(outcome, 3,
                  {path + ": changed while it was read: found " + std::to_string(size) + " bytes, expected " +
                       std::to_string(good.size()) + " bytes",
                   "restore the file", "step " + std::to_string(step) + " is saved"});
      CHECK(step >= 5);
      CHECK(step < 400);
      CHECK(events(run, "step").size() == static_cast<std::size_t>(step));
      check_fails(quern_train(files, all), 3, {path});  // still so: nothing is lost by trying
      write_text(path, good);
      CHECK(quern_train(files, all).code == 0);
      Overrides straight = all;
      straight.push_back(files.run("straight"));
      CHECK(quern_train(files, straight).code == 0);
      CHECK(newest_tensors(run) == newest_tensors(files.at("straight")));
      CHECK(logged_losses(run) == logged_losses(files.at("straight")));
    }
}

TEST_CASE("validation data that fail end the run with the step saved, and it is evaluated once they are back") {
  TinyFiles files;
  const std::string path = files.at("validation.tok"), run = files.at("run"), good = read_text(path);
  const Overrides all{"train.steps=300", "train.eval_every=50", "checkpoint.every=1000", "checkpoint.export=false"};
  Outcome outcome = train_and_disturb(files, all, [&] { fs::resize_file(path, 100); });
  const std::int64_t step = newest_step(run);
  check_fails(outcome, 3, {path + ": changed while it was read", "step " + std::to_string(step) + " is saved"});
  CHECK(step >= 5);
  CHECK(step % 50 == 0);
  CHECK_FALSE(find_newest(run).checkpoint->meta.evaluated);
  write_text(path, good);
  CHECK(quern_train(files, all).code == 0);
  Overrides straight = all;
  straight.push_back(files.run("straight"));
  CHECK(quern_train(files, straight).code == 0);
  CHECK(newest_tensors(run) == newest_tensors(files.at("straight")));
  auto losses = [](const std::string& directory) {
    std::map<std::int64_t, double> losses;
    for (const nlohmann::json& event : events(directory, "eval"))
      CHECK(losses.emplace(event.at("step"), event.at("loss")).second);
    return losses;
  };
  CHECK(losses(run) == losses(files.at("straight")));
}

TEST_CASE("a token file that is removed or replaced during a run is read on as it was") {
  TinyFiles files;
  const std::string path = files.at("data.tok");
  Overrides all{"data.tokens.train=" + path, "train.steps=300", "train.eval_every=0", "checkpoint.export=false"};
  auto disturbed = [&](const std::string& run, const std::function<void()>& disturb) {
    write_token_file(path, content_of(16 * 200 + 1));
    fs::remove_all(files.at("run"));
    Outcome outcome = train_and_disturb(files, all, disturb);
    CAPTURE(outcome.err);
    CHECK(outcome.code == 0);
    fs::rename(files.at("run"), files.at(run));
  };
  disturbed("straight", [] {});
  disturbed("removed", [&] { fs::remove(path); });
  disturbed("replaced", [&] { write_token_file(path, content_of(40)); });  // by renaming
  for (const char* run : {"removed", "replaced"})
    CHECK(newest_tensors(files.at(run)) == newest_tensors(files.at("straight")));
}

TEST_CASE("changed bytes under a header that is not are refused at the start, on resuming, and behind training") {
  TinyFiles files;
  const std::string path = files.at("data.tok"), run = files.at("run");
  Overrides all{"data.tokens.train=" + path, "train.eval_every=0", "checkpoint.export=false"};
  auto flip = [&](std::streamoff at) {
    std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
    file.seekg(at);
    const auto byte = static_cast<char>(file.get() ^ 1);
    file.seekp(at);
    file.put(byte);
  };
  const std::vector<std::string> refusal{path + ": checksum of the payload: found", "the file is damaged"};
  write_token_file(path, content_of(500));
  flip(64 + 900);
  check_fails(quern_train(files, all), 3, refusal);
  CHECK_FALSE(fs::exists(run + "/log.jsonl"));
  flip(64 + 900);
  CHECK(quern_train(files, all).code == 0);
  flip(64 + 900);
  all.push_back("train.steps=12");
  check_fails(quern_train(files, all), 3, refusal);
  CHECK(newest_step(run) == 8);

  // A large file is checked while the run trains. How large it must be for a step to come first depends on the machine.
  all.back() = "train.steps=1000000";
  all.insert(all.end(), {"log.every=1000", "checkpoint.every=100000"});
  std::int64_t step = 0;
  for (int mebibytes = 64; step <= 0 && mebibytes <= 16384; mebibytes *= 4) {
    const std::string large = files.at("large-" + std::to_string(mebibytes));
    write_sparse_file(path, std::uint64_t(mebibytes) << 20);
    Overrides these = all;
    these.push_back("log.directory=" + large);
    check_fails(quern_train(files, these), 3, refusal);
    step = newest_step(large);
  }
  CHECK(step > 0);
  CHECK(step < 1000000);
}

TEST_CASE("a list of more files than may be open trains") {
  TinyFiles files;
  const std::string first = files.at("part-000.tok");
  write_token_file(first, content_of(40));
  for (int i = 1; i < 150; ++i) fs::copy(first, files.at("part-" + std::to_string(i) + ".tok"));
  std::string command = "ulimit -n 48 && exec " QUERN_BUILD_DIR "/bin/quern";
  for (const std::string& word : train_arguments(
           files, {"data.tokens.train=" + files.at("part-*.tok"), "train.steps=150", "checkpoint.export=false"}))
    command += " '" + word + "'";
  CHECK(std::system((command + " >" + files.at("out") + " 2>&1").c_str()) == 0);
  CHECK(events(files.at("run"), "step").size() == 150);
}

TEST_CASE("data show goes to any batch at once") {
  TinyFiles files;
  Outcome outcome = quern_run({"data", "show", files.config(), "--batch", "1000000000"});
  CAPTURE(outcome.err);
  CHECK(outcome.code == 0);
  CHECK(has(outcome.out, "train, batch 1000000000: 2 x 16 tokens"));
  check_fails(quern_run({"data", "show", files.config(), "--batch", "9223372036854775807"}), 2,
              {"data.tokens.train: number of a batch", "expected below"});
}
