// Faults of token files as a user meets them: one message that names the file or the key, and the exit code. And what
// `quern data show` prints.
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>

#include <doctest/doctest.h>

#include "base/checksum.h"
#include "data/tokens/token_file.h"
#include "data/tokens/token_header.h"
#include "end_to_end.h"

using namespace quern;
using namespace quern::testing;

namespace {

TokenFileContent content_of(std::size_t count) {
  TokenFileContent content{.tokens = {}, .mask = {}, .vocabulary = 64, .separator = 0};
  for (std::size_t i = 0; i < count; ++i) content.tokens.push_back(static_cast<std::int32_t>(i * 7 % 64));
  return content;
}

Outcome train_on(const TinyFiles& files, const std::string& path, Overrides more = {}) {
  more.push_back("data.tokens.train=" + path);
  return quern_train(files, more);
}

}  // namespace

TEST_CASE("a bad token file ends the run with code 3 and its name, before anything is written") {
  TinyFiles files;
  const std::string good = files.at("good.tok"), bad = files.at("bad.tok");
  write_token_file(good, content_of(500));
  const std::string bytes = read_text(good);
  auto refused = [&](const std::string& text, const std::vector<std::string>& parts) {
    write_text(bad, text);
    std::vector<std::string> all = parts;
    all.push_back(bad + ": ");
    check_fails(train_on(files, bad), 3, all);
    CHECK_FALSE(std::filesystem::exists(files.at("run") + "/log.jsonl"));
  };
  refused("", {"not a whole token file", "found 0 bytes"});
  refused(bytes.substr(0, 40), {"not a whole token file", "found 40 bytes"});
  refused(bytes.substr(0, bytes.size() - 8), {"file is truncated", "for 500 tokens", "prepare the data again"});
  refused(bytes + "12345678", {"file is too long"});
  refused("QUERNTOX" + bytes.substr(8), {"not a token file", "another magic number"});
  refused(std::string(2000, '\0'), {"not a token file"});

  TokenFileContent content = content_of(16);
  write_token_file(bad, content);
  check_fails(train_on(files, bad), 3, {bad, "shorter than one sequence", "found 16 tokens, expected at least 17"});
  content = content_of(500);
  content.mask.assign(500, false);
  write_token_file(bad, content);
  check_fails(train_on(files, bad), 3, {bad, "all masked", "check the loss mask"});
  content = content_of(500);
  content.separator = -1;
  write_token_file(bad, content);
  check_fails(train_on(files, bad, {"data.documents=masked"}), 3, {bad, "no separator token", "data.tokens.separator"});
  check_fails(train_on(files, files.at("*.none")), 3, {"data.tokens.train: no file matches", "*.none"});
  CHECK_FALSE(std::filesystem::exists(files.at("run") + "/log.jsonl"));
}

TEST_CASE("faults of the keys that name data have code 2") {
  TinyFiles files;
  const std::string train = files.at("train.tok");
  check_fails(train_on(files, train, {"data.documents=split"}), 2, {"data.documents: not a choice", "masked"});
  check_fails(train_on(files, train, {"data.tokens.weights=[1, 2]"}), 2,
              {"data.tokens.weights", "found 2, expected 1"});
  check_fails(train_on(files, train, {"data.tokens.weights=[0]"}), 2, {"data.tokens.weights: out of range"});
  check_fails(train_on(files, train, {"data.tokens.format=int16"}), 2, {"data.tokens.format", "uint16"});
  check_fails(quern_train(files, {"data.tokens.train=[1, 2]"}), 2, {"data.tokens.train", "a list of texts"});
}

TEST_CASE("a token over the vocabulary ends the run at its batch, with its place in the file") {
  TinyFiles files;
  const std::string path = files.at("bad.tok");
  write_token_file(path, content_of(16 * 20 + 1));
  std::string text = read_text(path);
  text[64 + 2 * 100] = 64;
  const std::uint64_t sum = checksum_of(std::as_bytes(std::span(text)).subspan(64));  // as a faulty writer's would be
  std::copy_n(reinterpret_cast<const char*>(&sum), 8, text.begin() + 32);
  write_text(path, text);
  for (const char* background : {"true", "false"}) {
    const std::string run = files.at(background);
    const Overrides all{"train.steps=20", "log.directory=" + run, "checkpoint.every=2",
                        "checkpoint.background=" + std::string(background)};
    for (int i = 0; i < 2; ++i) {  // the second time it goes on from there, and ends there
      Outcome outcome = train_on(files, path, all);
      const std::int64_t step = newest_step(run);
      REQUIRE(step > 2);
      REQUIRE(step % 2 == 1);  // not one that is saved anyway
      check_fails(outcome, 3,
                  {path, "token 100 is not in the vocabulary", "found 64, expected below 64",
                   "step " + std::to_string(step) + " is saved, and the same command continues"});
      CHECK(events(run, "step").size() == static_cast<std::size_t>(step));
      CHECK(events(run, "checkpoint").size() == static_cast<std::size_t>(step / 2 + 1));
    }
  }
}

TEST_CASE("data that changed since the checkpoint end the resumed run, with the name of the file") {
  TinyFiles files;
  const std::string a = files.at("a.tok"), b = files.at("b.tok");
  for (const std::string& path : {a, b}) write_token_file(path, content_of(300));
  const Overrides list{"data.tokens.train=[\"" + a + "\", \"" + b + "\"]", "checkpoint.export=false"};
  CHECK(quern_train(files, list).code == 0);
  TokenFileContent other = content_of(300);
  other.tokens[200] = 5;
  write_token_file(b, other);
  Overrides more = list;
  more.push_back("train.steps=12");
  check_fails(quern_train(files, more), 3, {b + ": ", "changed since the checkpoint: checksum", "start a new run"});
  write_token_file(b, content_of(300));
  CHECK(quern_train(files, more).code == 0);
}

TEST_CASE("a run on several files with weights is the same run after stops, bit for bit") {
  TinyFiles files;
  for (int i = 0; i < 3; ++i)
    write_token_file(files.at("part-" + std::to_string(i) + ".tok"),
                     content_of(static_cast<std::size_t>(16 * (3 + 2 * i) + 5)));
  for (const char* weights : {"[]", "[1, 3]"}) {
    const std::string name = weights;
    const Overrides common{
        "data.tokens.train=[\"" + files.at("part-[01].tok") + "\", \"" + files.at("part-2.tok") + "\"]",
        "data.tokens.weights=" + name, "train.steps=9", "checkpoint.export=false"};
    auto with = [&](const std::string& run) {
      Overrides all = common;
      all.push_back(files.run(run + name));
      return all;
    };
    SessionResult straight = train_here(files, with("straight"));
    Losses losses;
    SessionResult part;
    for (int step = 2; !part.result.finished; step += 3) {
      REQUIRE(step <= 11);
      part = train_here(files, with("stopped"), step);
      losses.merge(part.losses);
    }
    CHECK(losses == straight.losses);
    CHECK(newest_tensors(files.at("stopped" + name)) == newest_tensors(files.at("straight" + name)));
  }
}

TEST_CASE("more than 2^31 tokens train") {
  TinyFiles files;
  const std::string path = files.at("large.tok");
  TokenHeader header{};
  std::copy_n(kTokenFileMagic, 8, header.magic);
  header.version = kTokenFileVersion;
  header.token_count = (std::uint64_t{1} << 31) + 77;
  header.vocab_size = 64;
  header.token_bytes = 2;
  header.separator = -1;
  write_text(path, {reinterpret_cast<const char*>(&header), sizeof header});
  REQUIRE(::truncate(path.c_str(), 64 + static_cast<off_t>(padded_to_8(2 * header.token_count))) == 0);  // a hole
  Outcome outcome = train_on(files, path, {"train.steps=2", "checkpoint.export=false", "data.tokens.verify=false"});
  CAPTURE(outcome.err);
  CHECK(outcome.code == 0);
}

TEST_CASE("data show prints the batch that a run trains on") {
  TinyFiles files;
  const std::string path = files.at("shown.tok");
  TokenFileContent content{.tokens = {}, .mask = {}, .vocabulary = 64, .separator = 2};
  for (int i = 0; i < 4; ++i)
    for (std::int32_t token : {0, 1, 0, 0, 2}) {
      content.tokens.push_back(token);
      content.mask.push_back(content.tokens.size() % 5 >= 3);  // the third and fourth of each document
    }
  write_token_file(path, content);
  write_text(files.at("tokenizer.json"), R"({"model": {"vocab": {"a": 0, "Ġb": 1}}, "decoder": {"type": "ByteLevel"},
    "added_tokens": [{"id": 2, "content": "<end>"}]})");
  std::vector<std::string> arguments{"data", "show", files.config(), "--tokenizer", files.at("tokenizer.json")};
  for (const std::string& set : Overrides{"data.tokens.validation=" + path, "data.documents=masked", "train.sequence=8",
                                          "train.micro_batch=2"}) {
    arguments.push_back("--set");
    arguments.push_back(set);
  }
  for (const char* word : {"--split", "validation"}) arguments.emplace_back(word);
  Outcome outcome = quern_run(arguments);
  CHECK(outcome.err == "");
  CHECK(outcome.code == 0);
  CHECK(outcome.out ==
        "validation, batch 0: 2 x 8 tokens, 5 documents, 6 of 16 targets count\n"
        "row 0\n"
        "  tokens 0 to 4\n"
        "    given    \"a b\"\n"
        "    learned  \"aa\"\n"
        "    given    \"<end>\"\n"
        "  tokens 5 to 7\n"
        "    given    \"a b\"\n"
        "    learned  \"a\"\n"
        "    learned  \"a\", after the row\n"
        "row 1\n"
        "  tokens 0 to 1\n"
        "    given    \"a<end>\"\n"
        "  tokens 2 to 6\n"
        "    given    \"a b\"\n"
        "    learned  \"aa\"\n"
        "    given    \"<end>\"\n"
        "  tokens 7 to 7\n"
        "    given    \"a\"\n");
  check_fails(quern_run({"data", "show", files.config(), "--batch", "-1"}), 2, {"--batch"});
  check_fails(quern_run({"data", "show", files.config(), "--split", "test"}), 2, {"--split", "train or validation"});
  check_fails(quern_run({"data", "show", files.config(), "--tokenizer", path}), 3,
              {path, "not a usable tokenizer.json"});
  Outcome numbers = quern_run({"data", "show", files.config(), "--batch", "20"});
  CHECK(numbers.code == 0);
  CHECK(occurrences(numbers.out, "train, batch 20: 2 x 16 tokens, documents joined, 32 of 32 targets count") == 1);
}
