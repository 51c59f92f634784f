// What configs may ask for at their limits: many layers, and messages for settings that cannot be.
#include <filesystem>

#include <ctime>

#include <doctest/doctest.h>

#include "end_to_end.h"

using namespace quern;
using namespace quern::testing;

namespace fs = std::filesystem;

TEST_CASE("10,000 layers are planned and started in seconds") {
  TinyFiles files;
  const Overrides many{"model.llama.num_hidden_layers=10000",
                       "model.llama.hidden_size=8",
                       "model.llama.intermediate_size=8",
                       "model.llama.num_attention_heads=1",
                       "model.llama.num_key_value_heads=1",
                       "train.micro_batch=1",
                       "train.sequence=2",
                       "train.steps=1",
                       "checkpoint.at_end=false",
                       "checkpoint.every=0",
                       "checkpoint.export=false",
                       "data.tokens.validation=[]"};
  // Of this thread alone, and many times what it takes; looking a tensor up among all took minutes.
  const std::clock_t begin = std::clock();
  CHECK(train_here(files, many).result.finished);
  CHECK(static_cast<double>(std::clock() - begin) / CLOCKS_PER_SEC < 60);
}

TEST_CASE("settings that name nothing are config errors at their place") {
  TinyFiles files;
  check_fails(quern_train(files, {"log.directory="}), 2, {"--set log.directory: log.directory: found \"\""});
  check_fails(quern_train(files, {"data.tokens.train=[\"\"]"}), 2,
              {"--set data.tokens.train: data.tokens.train: an entry is empty"});
  check_fails(quern_train(files, {"optimizer.clip_norm=1e-50"}), 2, {"beyond 32-bit numbers, found 1e-50"});
  check_fails(quern_train(files, {"device.ordinal=4294967296"}), 2, {"out of range, found 4294967296"});
  check_fails(quern_train(files, {"device.cpu.memory=9223372036854775807"}), 2, {"out of range"});
}

TEST_CASE("whatever a config quotes, the message is short") {
  TinyFiles files;
  const std::string huge(100000, 'x');
  for (const std::string& setting :
       {"model.id=" + huge, "data.tokens.train=" + huge, huge + "=1", "train." + huge + "=1",
        "log.sinks=[\"" + huge + "\"]", "memory.recompute=[\"" + huge + "\"]", huge}) {
    CAPTURE(setting.substr(0, 40));
    const Outcome outcome = quern_train(files, {setting});
    CHECK((outcome.code == 2 || outcome.code == 3));
    CHECK(outcome.err.size() < 2000);
  }
}

TEST_CASE("a config that cannot be read is refused with the reason") {
  TinyFiles files;
  auto check = [](const std::string& path) { return quern_run({"config", "check", path}); };
  check_fails(check(files.at("none.toml")), 3, {"none.toml: config cannot be read: found No such file or directory"});
  check_fails(check(fs::path(files.config()).parent_path().string()), 3, {"Is a directory"});
  check_fails(check(files.config() + "/run.toml"), 3, {"Not a directory"});
}
