// `quern eval` beside the evaluation of the run that made the weights.
#include <cmath>
#include <filesystem>

#include <doctest/doctest.h>

#include "data/tokens/token_file.h"
#include "end_to_end.h"

using namespace quern;
using namespace quern::testing;

namespace {

using nlohmann::json;

/// `quern eval` with --json, REQUIREd to succeed.
json evaluated(const TinyFiles& files, std::vector<std::string> more) {
  const std::string out = files.at("eval.json");
  std::filesystem::remove(out);
  more.insert(more.begin(), {"eval", files.config(), "--json", out});
  const Outcome outcome = quern_run(more);
  CAPTURE(outcome.err);
  REQUIRE(outcome.code == 0);
  return json::parse(read_text(out));
}

double last_validation(const TinyFiles& files) {
  return events(files.at("run"), "end").back().at("val_loss").get<double>();
}

}  // namespace

TEST_CASE("an evaluation has the bits of the run's own, from a checkpoint, and its perplexity is e to the loss") {
  for (const char* precision : {"fp32", "bf16", "e4m3"}) {
    CAPTURE(precision);
    TinyFiles files;
    const std::string id = std::string("precision.id=") + precision;
    REQUIRE(quern_train(files, {id}).code == 0);
    // 5 windows in micro-batches of 2: the last one is partial.
    const json made = evaluated(files, {"--set", id});
    REQUIRE(made.at("files").size() == 1);
    const json& file = made.at("files")[0];
    CHECK(file.at("name") == files.at("validation.tok"));
    CHECK(file.at("loss").get<double>() == last_validation(files));
    CHECK(file.at("perplexity").get<double>() == std::exp(file.at("loss").get<double>()));
    CHECK(file.at("targets") == 5 * 16);
    CHECK(file.at("tokens") == 5 * 16);
    CHECK(file.at("tokens_per_second").get<double>() > 0);
    CHECK(made.at("total").at("loss") == file.at("loss"));
    CHECK(made.at("weights") == files.at("run") + "/checkpoints/step-00000008");
  }
}

TEST_CASE("weights come from a checkpoint, a run's directory or an export, and files from --data") {
  TinyFiles files;
  REQUIRE(quern_train(files, {"checkpoint.export_dtype=fp32"}).code == 0);
  const std::string run = files.at("run"), validation = files.at("validation.tok"), train = files.at("train.tok");
  for (const std::string& from : {run, run + "/checkpoints/step-00000008", run + "/export"}) {
    CAPTURE(from);
    CHECK(evaluated(files, {"--from", from}).at("total").at("loss").get<double>() == last_validation(files));
  }
  const json made = evaluated(files, {"--data", validation + "," + train, "--data", files.at("val*.tok")});
  REQUIRE(made.at("files").size() == 3);
  CHECK(made.at("files")[1].at("name") == train);
  CHECK(made.at("files")[1].at("targets") == 13 * 16);
  CHECK(made.at("files")[0].at("loss") == made.at("files")[2].at("loss"));
  double sum = 0, targets = 0;
  for (const json& file : made.at("files")) {
    sum += file.at("loss").get<double>() * file.at("targets").get<double>();
    targets += file.at("targets").get<double>();
  }
  CHECK(made.at("total").at("targets") == targets);
  CHECK(made.at("total").at("loss").get<double>() == doctest::Approx(sum / targets).epsilon(1e-14));
  // Each target once, however windows are grouped; fp32 matmuls of another micro-batch round otherwise.
  for (const char* size : {"1", "3", "8"})
    CHECK(evaluated(files, {"--set", std::string("train.micro_batch=") + size}).at("total").at("loss").get<double>() ==
          doctest::Approx(last_validation(files)).epsilon(1e-6));
}

TEST_CASE("what quern eval cannot do it says") {
  TinyFiles files;
  auto fails = [&](std::vector<std::string> more, int code, const std::vector<std::string>& parts) {
    more.insert(more.begin(), {"eval", files.config()});
    check_fails(quern_run(more), code, parts);
  };
  fails({}, 3, {"no checkpoint there"});
  REQUIRE(quern_train(files, {}).code == 0);
  fails({"--data", "a.tok,,b.tok"}, 2, {"--data", "an entry is empty"});
  fails({"--data", files.at("none.tok")}, 3, {"none.tok"});
  fails({"--data", files.at("none*.tok")}, 3, {"none*.tok"});
  fails({"--from", files.at("none")}, 3, {"none"});
  fails({"--from", ""}, 2, {"--from: empty"});
  fails({"--set", "data.tokens.validation=[]"}, 2, {"no validation split", "name token files"});
  write_text(files.at("other.json"), "mine");
  fails({"--json", files.at("other.json")}, 4, {"other.json"});
  CHECK(read_text(files.at("other.json")) == "mine");
  // Before the weights are looked for.
  fails({"--json", files.at("none/eval.json"), "--from", files.at("none")}, 4, {"eval.json: cannot be created"});
  TokenFileContent content{.tokens = {}, .mask = {}, .vocabulary = 65, .separator = -1};
  for (int i = 0; i < 33; ++i) content.tokens.push_back(i);
  write_token_file(files.at("large.tok"), content);
  CHECK(quern_run({"eval", files.config(), "--data", files.at("large.tok")}).code == 0);  // no token 64 in it
  content.tokens[32] = 64;
  write_token_file(files.at("large.tok"), content);
  fails({"--data", files.at("large.tok")}, 2,
        {"tokens that the model does not", "found a vocabulary of 64", "least 65"});
  content.vocabulary = 64;
  content.mask.assign(content.tokens.size(), 0);
  write_token_file(files.at("masked.tok"), content);
  fails({"--data", files.at("masked.tok")}, 3, {"masked.tok"});
}
