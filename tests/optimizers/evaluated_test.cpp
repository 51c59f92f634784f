// An optimizer that averages: evaluations, samples and exports use the average, and training has the bits of a run that
// does none of these.
#include <doctest/doctest.h>

#include "checkpoint/checkpoint_store.h"
#include "data/tokens/token_file.h"
#include "end_to_end.h"
#include "hf/weight_files.h"
#include "optimizers/eval_loss.h"
#include "ranks/rank_group.h"

using namespace quern;
using namespace quern::testing;

namespace {

const Overrides kAverages{"optimizer.id=schedule_free", "optimizer.learning_rate=0.02", "train.accumulation=2"};

Losses trained(const TinyFiles& files, const std::string& name, const Overrides& overrides) {
  const Outcome outcome = quern_train(files, with(overrides, {files.run(name)}));
  INFO(outcome.err);
  REQUIRE(outcome.code == 0);
  return logged_losses(files.at(name));
}

}  // namespace

TEST_CASE("a run's last loss is its checkpoint's and its export's and they have the average") {
  for (const char* precision : {"fp32", "bf16", "e4m3"}) {
    CAPTURE(precision);
    TinyFiles files;
    const Overrides overrides =
        with(kAverages, {std::string("precision.id=") + precision, "checkpoint.export_dtype=fp32"});
    trained(files, "run", overrides);
    const double last = events(files.at("run"), "end").back().at("val_loss");
    CHECK(eval_loss(files, files.at("run"), overrides) == last);
    CHECK(eval_loss(files, files.at("run") + "/export", overrides) == last);
    std::vector<std::string> notes;
    const Checkpoint checkpoint = checkpoint_at(files.at("run"), notes);
    const std::string exported = files.at("exported");
    REQUIRE(quern_run({"export", files.at("run"), exported}).code == 0);
    CHECK(eval_loss(files, exported, overrides) == last);
    const std::vector<float> average = checkpoint.tensors.read_floats("average/final_norm.weight");
    CHECK(average != checkpoint.tensors.read_floats("master/final_norm.weight"));
    for (const std::string& folder : {files.at("run") + "/export", exported}) {
      const WeightFiles weights(folder);
      CHECK(weights.find("model.norm.weight").file->read_floats("model.norm.weight") == average);
    }
  }
}

TEST_CASE("evaluations and samples change no bit of the training of averaged weights wherever these are") {
  TinyFiles files;
  const Overrides sums = with(kAverages, {"parallel.reduction=reproducible"});
  const Losses want = trained(files, "plain", sums);
  const std::string state = newest_tensors(files.at("plain"));
  const Overrides often{"train.eval_every=1", "sample.every=2", "sample.max_tokens=4", "sample.prompts=[\"1,2,3\"]"};
  std::vector<double> evaluated;
  for (const Overrides& places :
       {Overrides{}, Overrides{"memory.master=host", "memory.moments=host"}, of_ranks(2, "ranks")}) {
    CAPTURE(places);
    const std::string name = "often " + std::to_string(evaluated.size());
    CHECK(trained(files, name, with(with(sums, often), places)) == want);
    CHECK(newest_tensors(files.at(name)) == state);
    CHECK(events(files.at(name), "sample").size() > 0);
    evaluated.push_back(events(files.at(name), "eval").back().at("loss"));
    CHECK(evaluated.back() == doctest::Approx(evaluated.front()).epsilon(1e-12));
  }
}

TEST_CASE("an average needs masters of its dtype") {
  TinyFiles files;
  check_fails(quern_train(files, with(kAverages, {"optimizer.master=bf16"})), 2,
              {"--set optimizer.master: optimizer.master: evaluations", "\"average\""});
}
