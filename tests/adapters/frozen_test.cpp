// Frozen parameters: the rest trains with the same bits, they cost only the form that ops read, and runs resume and
// share work over ranks as others do.
#include <algorithm>
#include <set>

#include <doctest/doctest.h>

#include "end_to_end.h"
#include "quern/error.h"
#include "quern/testkit/refusal.h"
#include "training_fixture.h"

using namespace quern;
using namespace quern::testing;
using testkit::TinyModelOptions;

namespace {

using Names = std::vector<std::string>;

const Names kAllButHead{"embedding", "attn_norm", "qkv", "q_norm", "k_norm", "o.", "ffn_norm", "up", "down"};

std::string groups(const std::string& tables) { return "train.groups=[" + tables + "]"; }
const std::string kMatricesFrozen = groups(
    "{match=['embedding.weight', 'qkv.weight', 'o.weight', 'gate_up.weight', 'lm_head.weight'], trainable=false}");

PlanOptions options_for(Geometry geometry) {
  PlanOptions options;
  options.geometry = geometry;
  return options;
}

std::set<std::string> parameters_with(const Plan& plan, TensorOwner owner) {
  std::set<std::string> names;
  for (const PlannedTensor& tensor : plan.tensors)
    if (tensor.owner == owner && !tensor.parameter.empty()) names.insert(tensor.parameter);
  return names;
}

std::size_t ops_of(const Plan& plan, Run run, const std::string& kind) {
  const RunSchedule& schedule = plan.schedules[run];
  return static_cast<std::size_t>(
      std::count_if(schedule.actions.begin(), schedule.actions.end(), [&](const Action& action) {
        return action.task >= 0 && plan.schedules.task_of(action).instance.kind.starts_with(kind);
      }));
}

}  // namespace

TEST_CASE(
    "trained parameters have the gradients that they have when all train, and frozen ones no gradient, master or "
    "moments") {
  const Geometry geometry{2, 9};
  for (const Names& frozen :
       {Names{"embedding"}, Names{"qkv", "up", "lm_head"}, kAllButHead, Names{"final_norm", "lm_head"},
        Names{"embedding", "attn_norm", "qkv", "o.", "ffn_norm", "up", "final_norm", "lm_head"}})
    for (TinyModelOptions form : {TinyModelOptions{.layers = 3}, TinyModelOptions{.bias = true, .head_norm = true},
                                  TinyModelOptions{.bias = true, .layer_norm = true}}) {
      CAPTURE(frozen[0]);
      const Batch batch = random_batch(geometry, form.vocabulary, 3);
      TinyRun all(form, options_for(geometry));
      const auto want = all.gradients(batch);
      form.frozen = frozen;
      TinyRun run(form, options_for(geometry));
      std::set<std::string> trained, others;
      for (const ParameterPlan& parameter : run.plan().parameters)
        (parameter.spec.trainable ? trained : others).insert(parameter.spec.name);
      REQUIRE(!trained.empty());
      REQUIRE(!others.empty());
      for (TensorOwner owner : {TensorOwner::master, TensorOwner::gradient, TensorOwner::optimizer})
        CHECK(parameters_with(run.plan(), owner) == trained);
      const auto gradients = run.gradients(batch);
      CHECK(!gradients.empty());
      for (const auto& [name, values] : gradients) {
        CAPTURE(name);
        CHECK(values == want.at(name));
      }
      CHECK(run.plan().device_bytes < all.plan().device_bytes);
      CHECK(run.plan().flops_per_token <= all.plan().flops_per_token);
    }
}

TEST_CASE("nothing is computed below the lowest parameter that trains") {
  const Geometry geometry{2, 9};
  TinyRun head({.layers = 3, .frozen = kAllButHead}, options_for(geometry));
  CHECK(ops_of(head.plan(), Run::first, "attention_grad") == 0);
  CHECK(ops_of(head.plan(), Run::first, "rms_norm_grad") == 1);
  CHECK(std::ranges::find(head.plan().tensors, TensorOwner::activation, &PlannedTensor::owner) ==
        head.plan().tensors.end());
  // Layer 0's norm and projections need no input gradient, and the embedding none at all.
  TinyRun down({.layers = 3, .frozen = {"embedding", "attn_norm", "qkv", "o.", "ffn_norm", "up"}},
               options_for(geometry));
  CHECK(ops_of(down.plan(), Run::first, "attention_grad") == 2);
  CHECK(ops_of(down.plan(), Run::first, "embedding_grad") == 0);
}

TEST_CASE("a frozen weight stays as it was, and a run with some resumes bit for bit, in every precision") {
  for (const Overrides& numbers :
       {Overrides{"precision.id=fp32"}, Overrides{"precision.id=bf16", "optimizer.master=bf16"},
        Overrides{"precision.id=e4m3"}, Overrides{"precision.id=int8"},
        Overrides{"precision.id=e4m3", "precision.last_layers=1", "model.llama.tie_word_embeddings=true"}}) {
    CAPTURE(numbers[0]);
    TinyFiles files;
    const std::string tables =
        numbers.size() < 3 ? kMatricesFrozen : groups("{match=['embedding.weight', 'qkv.weight'], trainable=false}");
    const Overrides common = with(numbers, {"train.steps=8", "checkpoint.every=0", "checkpoint.export=false", tables});
    const SessionResult straight = train_here(files, with(common, {files.run("straight")}));
    SessionResult first = train_here(files, with(common, {files.run("stopped")}), 3);
    first.losses.merge(train_here(files, with(common, {files.run("stopped")})).losses);
    CHECK(first.losses == straight.losses);
    CHECK(straight.losses.at(8) < straight.losses.at(1));
    CHECK(newest_tensors(files.at("stopped")) == newest_tensors(files.at("straight")));
    CHECK_FALSE(has(newest_tensors(files.at("straight")), "qkv.weight"));
    CHECK(planned_bytes(files, common) < planned_bytes(files, with(numbers, {"train.steps=8"})));
  }
}

TEST_CASE("frozen weights in 8 bits take a byte each, beside their scales") {
  TinyFiles files;
  const Overrides small{"precision.id=e4m3",  "train.micro_batch=1",        "train.sequence=16",
                        "checkpoint.every=0", "model.llama.hidden_size=64", "model.llama.intermediate_size=4096"};
  const std::string frozen = groups("{match='gate_up.weight', trainable=false}");
  const std::int64_t all = planned_bytes(files, small), less = planned_bytes(files, with(small, {frozen}));
  // Master, gradient and two moments in fp32 of two layers; the 8-bit values stay, and room to load one matrix in bf16.
  const std::int64_t matrix = std::int64_t{2} * 4096 * 64;
  CHECK(all - less >= 2 * 16 * matrix - 2 * matrix);
}

TEST_CASE("ranks train what one rank trains beside frozen weights, sharded or not") {
  for (const char* precision : {"fp32", "bf16", "e4m3"})
    for (const Overrides& sharding : {Overrides{}, Overrides{"parallel.shard_optimizer=ranks"},
                                      Overrides{"parallel.shard_optimizer=ranks", "parallel.shard_weights=ranks"}}) {
      CAPTURE(precision);
      CAPTURE(sharding.size());
      TinyFiles files;
      Overrides common{std::string("precision.id=") + precision,
                       "train.steps=4",
                       "train.accumulation=4",
                       "parallel.reduction=reproducible",
                       "checkpoint.every=2",
                       "parallel.communicator=memcpy",
                       "device.cpu.streams=shuffled",
                       kMatricesFrozen};
      if (std::string(precision) == "e4m3")
        common = with(common, {"precision.e4m3.activation_scaling=current", "precision.e4m3.gradient_scaling=current"});
      const Outcome one = quern_train(files, with(common, {files.run("one"), "parallel.ranks=1"}));
      INFO(one.err);
      REQUIRE(one.code == 0);
      const Outcome two = quern_train(files, with(with(common, sharding), {files.run("two"), "parallel.ranks=2"}));
      INFO(two.err);
      REQUIRE(two.code == 0);
      CHECK(logged_losses(files.at("two")) == logged_losses(files.at("one")));
      CHECK(read_text(files.at("two/export/model.safetensors")) == read_text(files.at("one/export/model.safetensors")));
    }
}

TEST_CASE("stores have frozen weights, and gradients of what trains beside them") {
  TinyFiles files;
  for (const char* precision : {"bf16", "e4m3"}) {
    const Overrides common{std::string("precision.id=") + precision, "train.steps=5", "checkpoint.export=false",
                           kMatricesFrozen};
    const SessionResult plain = train_here(files, with(common, {files.run(std::string("plain") + precision)}));
    const SessionResult stored = train_here(
        files, with(common, {files.run(std::string("stored") + precision), "memory.weights=host", "memory.master=host",
                             "memory.moments=host", "memory.gradients=host", "device.cpu.streams=shuffled"}));
    CHECK(stored.losses == plain.losses);
    CHECK(newest_tensors(files.at(std::string("stored") + precision)) ==
          newest_tensors(files.at(std::string("plain") + precision)));
  }
}

TEST_CASE("an export has frozen parameters as they were loaded, and a run that starts from it goes on") {
  TinyFiles files;
  const Overrides plain{"train.steps=3", "precision.id=bf16"};
  train_here(files, with(plain, {files.run("first"), "checkpoint.export_dtype=fp32"}));
  const std::string from = files.at("first/export");
  train_here(files, with(plain, {files.run("second"), "checkpoint.export_dtype=fp32", "train.from=" + from,
                                 groups("{match='*', trainable=false}, {match='model.norm.weight', trainable=true}")}));
  const SafetensorsFile before(from + "/model.safetensors"), after(files.at("second/export/model.safetensors"));
  REQUIRE(before.tensors().size() == after.tensors().size());
  for (const StoredTensor& tensor : before.tensors()) {
    CAPTURE(tensor.name);
    CHECK((before.read_floats(tensor.name) == after.read_floats(tensor.name)) == (tensor.name != "model.norm.weight"));
  }
}

TEST_CASE("a run that goes on with other frozen weights says so") {
  TinyFiles files;
  const Overrides plain{"train.steps=1", "checkpoint.export_dtype=fp32"};
  train_here(files, with(plain, {files.run("a")}));
  train_here(files, with(plain, {files.run("b"), "train.seed=5"}));
  const Overrides tuned{"train.steps=4", kMatricesFrozen, files.run("tuned")};
  train_here(files, with(tuned, {"train.from=" + files.at("a/export")}), 2);
  train_here(files, with(tuned, {"train.from=" + files.at("a/export")}), 3);
  CHECK_FALSE(has(read_text(files.at("tuned/log.jsonl")), "frozen weights"));
  train_here(files, with(tuned, {"train.from=" + files.at("b/export")}));
  CHECK(has(read_text(files.at("tuned/log.jsonl")), "changed since the checkpoint: frozen weights = loaded, file "));
}

TEST_CASE("a group's rate and decay hold for its parameters") {
  TinyFiles files;
  const Overrides common{"train.steps=2", "checkpoint.export_dtype=fp32", "optimizer.adamw.weight_decay=0.1"};
  auto trained = [&](const std::string& name, const Overrides& more) {
    train_here(files, with(with(common, more), {files.run(name)}));
    return SafetensorsFile(files.at(name + "/export/model.safetensors")).read_floats("lm_head.weight");
  };
  const auto plain = trained("plain", {});
  CHECK(trained("one", {groups("{match='lm_head.weight', rate=1.0, decay=true}")}) == plain);
  CHECK(trained("half", {groups("{match='lm_head.weight', rate=0.5}")}) != plain);
  CHECK(trained("plain2", {groups("{match='lm_head.weight', decay=false}")}) != plain);
  CHECK(trained("others", {groups("{match='gate_up.weight', rate=0.0}")}) != plain);
  // At rate 0 nothing moves.
  const auto still = trained("still", {groups("{match='lm_head.weight', rate=0.0}")});
  CHECK(trained("still2", {groups("{match='lm_head.weight', rate=0.0}"), "train.steps=5", "schedule.id=constant"}) ==
        still);
}

TEST_CASE("groups that name nothing, a part of a matrix, or all parameters are refused with their line") {
  TinyFiles files;
  auto refused = [&](const std::string& tables, const std::vector<std::string>& parts) {
    testkit::check_refused(ErrorCode::config, parts, [&] { planned_bytes(files, {groups(tables)}); });
  };
  refused("{match='nothing.*', trainable=false}",
          {"train.groups", "no parameter that matches", "nothing.*", "qkv.weight"});
  refused("{match='model.layers.*.self_attn.q_proj.weight', trainable=false}",
          {"matches a part of `qkv.weight`", "k_proj", "name it \"qkv.weight\""});
  refused("{match='model.layers.1.*', trainable=false}", {"matches a part of", "all layers"});
  refused("{match='*', trainable=false}", {"all parameters are frozen"});
  refused("{trainable=false}", {"train.groups.1.match", "missing"});
  refused("{match='*', rates=2.0}", {"train.groups.1.rates", "unknown key", "rate"});
  refused("{match='*', rate=-1.0}", {"train.groups.1.rate", "out of range"});
}
