// LoRA against peft, whose runs tests/goldens/make_lora_goldens.py recorded, and as runs of their own: PEFT's folder
// and the merged model, resumed, over ranks, in every precision, on models that know nothing of it.
#include <cmath>
#include <cstring>
#include <filesystem>
#include <map>
#include <set>

#include <doctest/doctest.h>

#include "end_to_end.h"
#include "golden_models.h"
#include "hf/hf_weights.h"
#include "quern/testkit/refusal.h"
#include "run/export/model_export.h"
#include "run/weights.h"
#include "test_paths.h"
#include "transform/peft_folder.h"

using namespace quern;
using namespace quern::testing;
namespace fs = std::filesystem;

namespace {

const fs::path kGoldens = QUERN_SOURCE_DIR "/tests/goldens";
const Overrides kLora{"adapter.id=lora", "adapter.rank=4", "optimizer.learning_rate=0.01"};

std::map<std::string, Extents> shapes(const std::string& path) {
  std::map<std::string, Extents> shapes;
  const SafetensorsFile file(path);
  for (const StoredTensor& tensor : file.tensors()) shapes[tensor.name] = tensor.extents;
  return shapes;
}

/// The norm of the difference over the norm.
double distance(const std::vector<float>& a, const std::vector<float>& b) {
  REQUIRE(a.size() == b.size());
  double difference = 0, norm = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    difference += (double{a[i]} - b[i]) * (double{a[i]} - b[i]);
    norm += double{b[i]} * b[i];
  }
  return std::sqrt(difference / norm);
}

std::vector<std::int32_t> integers(const SafetensorsFile& file, const std::string& name) {
  const std::vector<std::byte> bytes = file.bytes(file.at(name));
  std::vector<std::int32_t> values(bytes.size() / 4);
  std::memcpy(values.data(), bytes.data(), bytes.size());
  return values;
}

/// A golden model with its adapter, and the run that peft made.
struct LoraGolden {
  explicit LoraGolden(const std::string& name)
      : folder(kGoldens / name), adapter(folder / "lora"), recorded((adapter / "run.safetensors").string()) {}

  std::vector<std::string> targets() const {
    return nlohmann::json::parse(read_text((adapter / "adapter_config.json").string())).at("target_modules");
  }

  fs::path folder, adapter;
  SafetensorsFile recorded;
};

}  // namespace

TEST_CASE("20 steps of LoRA have peft's losses and end at its adapter, on packed, biased and transposed weights") {
  for (const std::string name : {"llama_gqa_tied", "qwen2_tied_gqa", "phi3_partial", "gpt2_tied"}) {
    CAPTURE(name);
    const LoraGolden golden(name);
    const auto device = cpu_device();
    PluginRun run(golden.folder, *device);
    const PeftConfig config{.rank = 8, .alpha = 12};
    check_peft_folder(golden.adapter.string(), config);
    auto model = std::make_unique<LoraModel>(std::move(run.model), builtin_ops(),
                                             LoraOptions{.rank = 8, .factor = 12.0 / 8, .targets = golden.targets()});
    const LoraModel& lora = *model;
    run.model = std::move(model);
    run.optimizer = AdamW({.beta1 = 0.9, .beta2 = 0.95, .eps = 1e-8, .weight_decay = 0});
    run.start({2, 12});
    Engine& engine = *run.engine;
    const FirstWeights first =
        first_weights(engine, {.model = golden.folder.string(), .adapter = golden.adapter.string()});
    load_weights(engine, first, Loaded::all);
    engine.refresh();

    const std::vector<std::int32_t> tokens = integers(golden.recorded, "tokens"),
                                    targets = integers(golden.recorded, "targets");
    const std::vector<float> losses = golden.recorded.read_floats("losses");
    StepState state;
    state.learning_rate = 0.01f;
    for (std::uint32_t step = 0; step < losses.size(); ++step) {
      Batch batch;
      for (std::size_t i = 0; i < 24; ++i) {
        batch.tokens.push_back(tokens[step * 24 + i]);
        batch.targets.push_back(targets[step * 24 + i]);
        batch.positions.push_back(static_cast<std::int32_t>(i % 12));
      }
      state.step = state.updates = step;
      engine.micro_step(batch, state);
      engine.update();
      const Engine::StepResult result = engine.result();
      CAPTURE(step);
      CHECK(result.loss.loss_sum / result.loss.valid_tokens == doctest::Approx(losses[step]).epsilon(1e-5));
    }

    TestDirectory out;
    const WeightReader masters = master_reader(engine);
    write_peft_folder(out / "adapter", config, lora, DType::f32, masters);
    const std::string written = out / "adapter/adapter_model.safetensors";
    CHECK(shapes(written) == shapes((golden.adapter / "adapter_model.safetensors").string()));
    const SafetensorsFile after(written);
    for (const StoredTensor& tensor : after.tensors()) {
      CAPTURE(tensor.name);
      // Adam divides by the gradient's size: where that is close to zero, fp32 and float64 part.
      CHECK(distance(after.read_floats(tensor.name), golden.recorded.read_floats("after." + tensor.name)) < 2e-3);
    }
    auto as_set = [](const nlohmann::json& list) { return std::set<std::string>(list.begin(), list.end()); };
    const auto peft = nlohmann::json::parse(read_text((golden.adapter / "adapter_config.json").string())),
               own = nlohmann::json::parse(read_text(out / "adapter/adapter_config.json"));
    CHECK(as_set(own.at("target_modules")) == as_set(peft.at("target_modules")));
    for (const char* key : {"r", "lora_alpha", "peft_type", "task_type", "bias", "fan_in_fan_out"})
      CHECK(own.at(key) == peft.at(key));

    // The merged model is W + factor B A.
    export_weights(masters, first, &lora, out / "merged",
                   {.dtype = DType::f32, .config = "{}", .generation_config = {}, .tokenizer_from = {}});
    const SafetensorsFile merged(out / "merged/model.safetensors"),
        base((golden.folder / "model.safetensors").string());
    CHECK(shapes(out / "merged/model.safetensors") == shapes((golden.folder / "model.safetensors").string()));
    for (const StoredTensor& tensor : base.tensors()) {
      CAPTURE(tensor.name);
      std::vector<float> want = base.read_floats(tensor.name);
      const std::string module = kPeftPrefix + tensor.name.substr(0, tensor.name.rfind('.'));
      if (tensor.name.ends_with(".weight") && after.find(module + ".lora_A.weight")) {
        const std::vector<float> a = after.read_floats(module + ".lora_A.weight"),
                                 b = after.read_floats(module + ".lora_B.weight");
        const std::size_t in = a.size() / 8, rows = b.size() / 8;
        const bool transposed = own.at("fan_in_fan_out");
        for (std::size_t r = 0; r < rows; ++r)
          for (std::size_t c = 0; c < in; ++c) {
            double delta = 0;
            for (std::size_t k = 0; k < 8; ++k) delta += double{b[r * 8 + k]} * a[k * in + c];
            want[transposed ? c * rows + r : r * in + c] += static_cast<float>(1.5 * delta);
          }
      }
      CHECK(distance(merged.read_floats(tensor.name), want) < 1e-6);
    }
  }
}

TEST_CASE("a run of LoRA resumes bit for bit, keeps the adapter alone, and writes PEFT's folder and the merged model") {
  for (const Overrides& numbers :
       {Overrides{"precision.id=fp32"}, Overrides{"precision.id=bf16", "optimizer.master=bf16"},
        Overrides{"precision.id=e4m3"}, Overrides{"precision.id=int8"}}) {
    CAPTURE(numbers[0]);
    TinyFiles files;
    const Overrides common = with(with(numbers, kLora), {"train.steps=8", "checkpoint.every=0"});
    const SessionResult straight = train_here(files, with(common, {files.run("straight")}));
    SessionResult first = train_here(files, with(common, {files.run("stopped")}), 3);
    first.losses.merge(train_here(files, with(common, {files.run("stopped")})).losses);
    CHECK(first.losses == straight.losses);
    CHECK(straight.losses.at(8) < straight.losses.at(1));
    CHECK(newest_tensors(files.at("stopped")) == newest_tensors(files.at("straight")));
    for (const char* file : {"adapter/adapter_model.safetensors", "export/model.safetensors"})
      CHECK(read_text(files.at("stopped/") + file) == read_text(files.at("straight/") + file));
    CHECK(shapes(files.at("straight/adapter/adapter_model.safetensors")).size() ==
          2 * 2 * 7);  // layers, A and B, linears
    export_checkpoint(files.at("straight"), files.at("exported"), {});
    CHECK(read_text(files.at("exported/model.safetensors")) ==
          read_text(files.at("straight/export/model.safetensors")));
    export_checkpoint(files.at("straight"), files.at("alone"), {"adapter.merge=false"});
    CHECK(read_text(files.at("alone/adapter_model.safetensors")) ==
          read_text(files.at("straight/adapter/adapter_model.safetensors")));
    for (const auto& [name, shape] : shapes(files.at("straight/export/model.safetensors")))
      CHECK_FALSE(has(name, "lora"));
  }
}

TEST_CASE("a run starts from PEFT's folder, and the merged model is the model with its adapter") {
  TinyFiles files;
  const Overrides steps{"train.steps=6", "checkpoint.export_dtype=fp32", "train.eval_every=1"};
  train_here(files, with(steps, {files.run("base")}));
  const Overrides base{"train.from=" + files.at("base/export")};
  train_here(files, with(with(with(steps, base), kLora), {files.run("lora")}));
  // Nothing moves: the first evaluation is of the weights that the run began with.
  const Overrides still{"train.steps=1", "optimizer.learning_rate=1e-30", "checkpoint.export_dtype=fp32",
                        "train.eval_every=1"};
  auto loss = [&](const std::string& name, const Overrides& more) {
    train_here(files, with(with(still, more), {files.run(name)}));
    return events(files.at(name), "eval").front().at("loss").get<double>();
  };
  const double adapted = loss(
      "adapted", with(with(base, {"adapter.id=lora", "adapter.rank=4"}), {"adapter.from=" + files.at("lora/adapter")}));
  const double merged = loss("merged", {"train.from=" + files.at("lora/export")});
  const double plain = loss("plain", base);
  CHECK(adapted == doctest::Approx(merged).epsilon(1e-6));
  CHECK(std::abs(adapted - plain) > 1e-3);
  CHECK(read_text(files.at("adapted/adapter/adapter_model.safetensors")) ==
        read_text(files.at("lora/adapter/adapter_model.safetensors")));
  testkit::check_refused(ErrorCode::input, {"adapter_config.json", "r", "found 4", "8, as adapter.rank"}, [&] {
    planned_bytes(files, with(base, {"adapter.id=lora", "adapter.rank=8", "adapter.from=" + files.at("lora/adapter")}));
  });
}

TEST_CASE("a new adapter begins without a warning, and settings of one that is not used are named") {
  TinyFiles files;
  const Overrides one{"train.steps=1", "checkpoint.export_dtype=fp32"};
  train_here(files, with(one, {files.run("base")}));
  const Overrides base = with(one, {"train.from=" + files.at("base/export")});
  train_here(files, with(with(base, kLora), {files.run("lora")}));
  CHECK(events(files.at("lora"), "warning").empty());
  train_here(files, with(with(base, kLora),
                         {files.run("none"), "adapter.id=none", "adapter.from=" + files.at("lora/adapter")}));
  REQUIRE(events(files.at("none"), "warning").size() == 1);
  CHECK(events(files.at("none"), "warning")[0].at("text") ==
        "adapter.id is none, so that without effect are 'adapter.rank', 'adapter.from'");
  CHECK_FALSE(fs::exists(files.at("none/adapter")));
}

TEST_CASE("settings of an adapter that LoRA does not have are refused by name, also unknown ones") {
  TestDirectory out;
  const std::string path = out / "adapter_config.json";
  const auto peft = nlohmann::json::parse(read_text((kGoldens / "llama_gqa_tied/lora/adapter_config.json").string()));
  auto check = [&](const char* key, const nlohmann::json& value) {
    nlohmann::json config = peft;
    config[key] = value;
    write_text(path, config.dump());
    check_peft_folder(out / "", {.rank = 8, .alpha = 12});
  };
  for (const char* key : {"use_dora", "use_qalora", "use_a_kind_of_next_year"}) {
    check(key, false);
    testkit::check_refused(ErrorCode::input, {path, key, "not supported", "found true"}, [&] { check(key, true); });
  }
  testkit::check_refused(ErrorCode::input, {"layer_replication", "[[0,1],[0,1]]"}, [&] {
    check("layer_replication", {{0, 1}, {0, 1}});
  });
  check("init_lora_weights", "gaussian");
  testkit::check_refused(ErrorCode::input, {"init_lora_weights", "pissa_niter_4", "gaussian"},
                         [&] { check("init_lora_weights", "pissa_niter_4"); });
}

TEST_CASE("ranks and stores train an adapter as one device does") {
  for (const char* precision : {"fp32", "e4m3"}) {
    CAPTURE(precision);
    TinyFiles files;
    Overrides common = with(kLora, {std::string("precision.id=") + precision, "train.steps=4", "train.accumulation=4",
                                    "parallel.reduction=reproducible", "parallel.communicator=memcpy"});
    if (std::string(precision) == "e4m3")
      common = with(common, {"precision.e4m3.activation_scaling=current", "precision.e4m3.gradient_scaling=current"});
    auto run = [&](const std::string& name, const Overrides& more) {
      const Outcome outcome = quern_train(files, with(with(common, more), {files.run(name)}));
      INFO(outcome.err);
      REQUIRE(outcome.code == 0);
      return read_text(files.at(name) + "/adapter/adapter_model.safetensors");
    };
    const std::string one = run("one", {"parallel.ranks=1"});
    CHECK(run("two", {"parallel.ranks=2"}) == one);
    CHECK(run("sharded", {"parallel.ranks=2", "parallel.shard_optimizer=ranks"}) == one);
    CHECK(run("all", {"parallel.ranks=2", "parallel.shard_optimizer=ranks", "parallel.shard_weights=ranks"}) == one);
    CHECK(run("both", {"parallel.ranks=2", "parallel.shard_optimizer=ranks", "parallel.shard_weights=ranks",
                       "memory.weights=host"}) == one);
  }
}

TEST_CASE("targets are names, patterns or all linears, and what they miss is refused") {
  TinyFiles files;
  auto trained = [&](const std::string& targets) {
    const std::string name = "run" + std::to_string(std::hash<std::string>{}(targets));
    train_here(files,
               with(kLora, {"train.steps=1", files.run(name), "adapter.targets=" + targets, "adapter.merge=false"}));
    CHECK_FALSE(fs::exists(files.at(name + "/export")));
    return shapes(files.at(name + "/adapter/adapter_model.safetensors")).size();
  };
  CHECK(trained("['q_proj']") == 4);
  CHECK(trained("['q_proj', 'mlp.down_proj']") == 8);
  CHECK(trained("['model.layers.*.mlp.*']") == 12);
  auto refused = [&](const std::string& targets, const std::vector<std::string>& parts) {
    testkit::check_refused(ErrorCode::config, parts,
                           [&] { planned_bytes(files, with(kLora, {"adapter.targets=" + targets})); });
  };
  refused("['lm_head']", {"adapter.targets", "no linear", "lm_head", "q_proj"});
  refused("['model.layers.1.*']", {"1 of 2 layers"});
  refused("[]", {"adapter.targets", "found none"});
}

TEST_CASE(
    "dropout is part of training alone, resumes, and is the same recomputed, over ranks and where weights are "
    "sharded") {
  TinyFiles files;
  // From an adapter whose B is not zero.
  train_here(files, with(kLora, {"train.steps=3", files.run("begin")}));
  const Overrides common = with(kLora, {"precision.id=bf16", "train.steps=4", "train.accumulation=4",
                                        "train.eval_every=1", "parallel.reduction=reproducible",
                                        "parallel.communicator=memcpy", "adapter.from=" + files.at("begin/adapter")});
  const Overrides dropout = with(common, {"adapter.dropout=0.25"});
  auto adapter = [&](const std::string& name) {
    return read_text(files.at(name + "/adapter/adapter_model.safetensors"));
  };
  const SessionResult straight = train_here(files, with(dropout, {files.run("straight")}));
  train_here(files, with(dropout, {files.run("stopped")}), 2);
  train_here(files, with(dropout, {files.run("stopped")}));
  CHECK(adapter("stopped") == adapter("straight"));
  train_here(files, with(dropout, {files.run("recomputed"), "memory.recompute=['block']"}));
  CHECK(adapter("recomputed") == adapter("straight"));
  auto by_ranks = [&](const std::string& name, const Overrides& more) {
    const Outcome outcome = quern_train(files, with(with(dropout, more), {files.run(name)}));
    INFO(outcome.err);
    REQUIRE(outcome.code == 0);
    return adapter(name);
  };
  CHECK(by_ranks("two", {"parallel.ranks=2"}) == adapter("straight"));
  CHECK(by_ranks("sharded", {"parallel.ranks=2", "parallel.shard_optimizer=ranks", "parallel.shard_weights=ranks"}) ==
        adapter("straight"));

  const SessionResult plain = train_here(files, with(common, {files.run("plain")}));
  CHECK(plain.losses.at(1) != straight.losses.at(1));
  const Overrides still{"optimizer.learning_rate=1e-30"};  // each step has another mask, and evaluations none
  train_here(files, with(with(dropout, still), {files.run("still")}));
  train_here(files, with(with(common, still), {files.run("still_plain")}));
  for (std::size_t i = 0; i < 4; ++i)
    CHECK(events(files.at("still"), "eval")[i].at("loss") == events(files.at("still_plain"), "eval")[i].at("loss"));
  const auto config = nlohmann::json::parse(read_text(files.at("straight/adapter/adapter_config.json")));
  CHECK(config.at("lora_dropout") == 0.25);
}

TEST_CASE("Muon steps along the heads of an adapter's queries, keys and values, and other adapters have none") {
  TinyFiles files;
  const Overrides muon = with(kLora, {"train.steps=3", "optimizer.id=muon"});
  const Overrides heads = with(muon, {"optimizer.muon.split=heads"});
  const SessionResult whole = train_here(files, with(muon, {files.run("whole"), "adapter.targets=['q_proj']"}));
  const SessionResult split = train_here(files, with(heads, {files.run("split"), "adapter.targets=['q_proj']"}));
  CHECK(split.losses.at(1) == whole.losses.at(1));
  CHECK(split.losses.at(3) != whole.losses.at(3));
  testkit::check_refused(ErrorCode::config, {"optimizer.muon.split", "heads"},
                         [&] { planned_bytes(files, with(heads, {"adapter.targets=['o_proj']"})); });
}

TEST_CASE("groups name an adapter's parameters and the base's, and rsLoRA scales by the root of the rank") {
  TinyFiles files;
  const Overrides common = with(kLora, {"train.steps=3"});
  const SessionResult plain = train_here(files, with(common, {files.run("plain")}));
  const SessionResult norms = train_here(
      files, with(common, {files.run("norms"), "train.groups=[{match='*norm.weight', trainable=true, rate=0.1}]"}));
  CHECK(has(read_text(files.at("norms/log.jsonl")),
            "the adapter's folder lacks the parameters that train beside it ('attn_norm.weight', 'ffn_norm.weight', "
            "'final_norm.weight'); the merged export has them"));
  CHECK(norms.losses.at(1) == plain.losses.at(1));
  CHECK(norms.losses.at(3) != plain.losses.at(3));
  // alpha / sqrt(4) = 2 alpha / 4.
  const SessionResult root =
      train_here(files, with(common, {files.run("root"), "adapter.rslora=true", "adapter.alpha=8"}));
  CHECK(root.losses == plain.losses);
}
