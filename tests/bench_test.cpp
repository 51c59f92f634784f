// What `quern bench` compares speeds with, and what it trains on.
#include <algorithm>
#include <cmath>
#include <filesystem>

#include <doctest/doctest.h>
#include <nlohmann/json.hpp>

#include "bench/bench.h"
#include "config/document.h"
#include "end_to_end.h"
#include "run/session.h"

using namespace quern;
using namespace quern::bench;
using namespace quern::testing;

namespace {

std::map<DType, double> work(const TinyFiles& files, const Overrides& overrides) {
  const ConfiguredRun run(ConfigDocument::read(files.config(), overrides));
  return training_work(make_plan(run.session.parts(), run.session.plan_options()));
}

/// TinyFiles: width 32, vocabulary 64, a tied head; sequences of 16.
constexpr double kHead = 6.0 * 32 * 64, kAttention = 6.0 * 2 * 32 * 16;

}  // namespace

TEST_CASE("work is counted by the format of each matmul, the head's too") {
  TinyFiles files;
  const auto bf16 = work(files, {"precision.id=bf16"}), whole = work(files, {"precision.id=e4m3"}),
             blocks = work(files, {"precision.id=e4m3", "precision.e4m3.head=bf16"}),
             inner = work(files, {"precision.id=e4m3", "precision.first_layers=1"});
  REQUIRE(bf16.size() == 1);
  const double all = bf16.at(DType::bf16), block = all - kHead - kAttention;
  CHECK(block > 0);
  CHECK(whole.at(DType::bf16) == doctest::Approx(kAttention));
  CHECK(whole.at(DType::e4m3) == doctest::Approx(block + kHead));
  CHECK(blocks.at(DType::bf16) == doctest::Approx(kAttention + kHead));
  CHECK(blocks.at(DType::e4m3) == doctest::Approx(block));
  CHECK(inner.at(DType::e4m3) == doctest::Approx(block / 2 + kHead));
  CHECK(work(files, {"precision.id=bf16", "memory.recompute=[\"block\"]"}) == bf16);
}

TEST_CASE("benched tokens are in the vocabulary, skewed as in text, and no two batches are alike") {
  constexpr std::int64_t kVocabulary = 1000;
  const Geometry geometry{8, 1024};
  const Batch batch = text_like_tokens(geometry, kVocabulary, 0), other = text_like_tokens(geometry, kVocabulary, 1);
  CHECK(batch.tokens != other.tokens);
  CHECK(batch.tokens != batch.targets);
  for (const auto* ids : {&batch.tokens, &batch.targets}) {
    REQUIRE(ids->size() == 8 * 1024);
    CHECK(*std::min_element(ids->begin(), ids->end()) == 0);
    CHECK(*std::max_element(ids->begin(), ids->end()) < kVocabulary);
    const auto first = static_cast<double>(std::count(ids->begin(), ids->end(), 0)) / 8192;
    CHECK(first == doctest::Approx(std::log(2) / std::log(kVocabulary + 1)).epsilon(0.1));
  }
}

TEST_CASE("benched rows are cut into documents of about the mean, where positions begin again") {
  const Geometry geometry{3, 1000};
  Batch batch = text_like_tokens(geometry, 100, 0), again = batch, huge = batch;
  cut_into_documents(batch, geometry, 90, 7);
  cut_into_documents(again, geometry, 90, 7);
  CHECK(batch.documents == again.documents);
  CHECK(batch.documents.size() > 3 * 1000 / 120);
  REQUIRE(batch.documents.back() == 3000);
  std::size_t rows = 0;
  for (std::size_t i = 0; i + 1 < batch.documents.size(); ++i) {
    const std::int32_t begin = batch.documents[i], end = batch.documents[i + 1];
    CHECK(begin < end);
    CHECK(end - begin <= 120);
    if (end % 1000 != 0) CHECK(end - begin >= 60);
    rows += begin % 1000 == 0 ? 1 : 0;
    for (std::int32_t token = begin; token < end; ++token)
      REQUIRE(batch.positions[static_cast<std::size_t>(token)] == token - begin);
  }
  CHECK(rows == 3);
  cut_into_documents(huge, geometry, std::numeric_limits<std::int64_t>::max(), 7);
  CHECK(huge.documents.back() == 3000);
}

TEST_CASE("bench times steps and ops, beside the device's peaks when asked") {
  TinyFiles files;
  Outcome outcome = quern_run({"bench", files.config(), "--steps", "2", "--measure-peaks", "--json",
                               files.at("out.json"), "--commit", "abc1234"});
  CAPTURE(outcome.err);
  CHECK(outcome.code == 0);
  for (const char* part : {"peaks ", "memory ", "matmul f32 ", "of rated", "of measured", "attention_grad", "adamw",
                           "a step: estimated ", "whole steps: ", "of measured peaks)"})
    CHECK(has(outcome.out, part));
  auto json = nlohmann::json::parse(read_text(files.at("out.json")));
  CHECK(json.at("tokens_per_second") > 0);
  CHECK(json.at("measured_peaks").at("memory") > 1e8);
  CHECK(json.at("measured_peaks").at("f32") > 1e8);
  CHECK(json.at("measured_sol") > 0);
  CHECK(json.at("commit") == "abc1234");
  CHECK(json.at("command").at(2) == files.config());
  CHECK(json.at("step_seconds").size() == 2);
  CHECK(json.at("config").at("train.micro_batch") == json.at("micro_batch"));
  CHECK_FALSE(std::filesystem::exists(files.at("run")));
}

TEST_CASE("bench cuts rows into documents where the run masks them, and says so where it does not") {
  TinyFiles files;
  const Outcome whole =
      quern_run({"bench", files.config(), "--steps", "1", "--document-tokens", "3", "--set", "data.documents=masked"});
  CHECK(whole.err == "");
  CHECK(whole.code == 0);
  CHECK(has(whole.out, "as if each row were one document"));
  const Outcome joined = quern_run({"bench", files.config(), "--steps", "1", "--document-tokens", "3"});
  CHECK(joined.code == 2);
  CHECK(has(joined.err, "--set data.documents=masked"));
}

TEST_CASE("bench products times the matmuls of a model and of given sizes, beside another setting's") {
  TinyFiles files;
  auto bench = [&](std::vector<std::string> more) {
    more.insert(more.begin(), {"bench", "products", files.config()});
    return quern_run(std::move(more));
  };
  const Outcome outcome =
      bench({"--sizes", "64,128x32x256", "--formats", "f32,e4m3,int4", "--scales", "tensor,row,128x128,squares",
             "--beside", "device.cpu.threads=1", "--json", files.at("out.json")});
  CAPTURE(outcome.err);
  REQUIRE(outcome.code == 0);
  for (const char* part :
       {"TFLOP/s", "ratio", "128x128  NT", "squares  TT", "not measured: e4m3 128x128 NN", "not measured: int4",
        "TFLOP/s, and of rated",
        "\n| format | scales  | layout |             64 |     128x32x256 |\n| ------ | ------- | ------ |",
        "\n| e4m3   | squares | TT     | "})
    CHECK(has(outcome.out, part));
  const auto json = nlohmann::json::parse(read_text(files.at("out.json")));
  CHECK(json.at("beside") == "device.cpu.threads=1");
  // Two sizes in four layouts of f32, and of e4m3 with one scale or rows or squares of them; blocks in one layout.
  REQUIRE(json.at("products").size() == 4 * 8 + 2);
  for (const auto& product : json.at("products")) {
    CHECK(product.at("seconds") > 0);
    CHECK(product.at("seconds_beside") > 0);
  }
  const Outcome model = bench({"--sizes", "model", "--formats", "bf16", "--json", files.at("model.json")});
  CAPTURE(model.err);
  REQUIRE(model.code == 0);
  const auto products = nlohmann::json::parse(read_text(files.at("model.json"))).at("products");
  // qkv, the projection, gate_up and down, each with its gradients.
  CHECK(products.size() % 4 == 0);
  CHECK(products.size() >= 4 * 4);
  check_fails(bench({"--sizes", "3x4"}), 2, {"--sizes", "found 3x4"});
  check_fails(bench({"--formats", "i64"}), 2, {"--formats", "found i64"});
  check_fails(bench({"--scales", "column"}), 2, {"--scales", "found column", "128x128"});
}

TEST_CASE("bench transfers times steps with and without transfers between ranks") {
  TinyFiles files;
  auto bench = [&](std::vector<std::string> more) {
    more.insert(more.begin(), {"bench", "transfers", files.config(), "--steps", "2"});
    for (const char* setting : {"device.cpu.threads=1", "train.accumulation=5", "parallel.communicator=memcpy"})
      more.insert(more.end(), {"--set", setting});
    return quern_run(std::move(more));
  };
  for (const char* precision : {"fp32", "e4m3"}) {
    CAPTURE(precision);
    const Outcome outcome =
        bench({"--set", "parallel.ranks=3", "--set", "parallel.shard_optimizer=ranks", "--set",
               "precision.id=" + std::string(precision), "--json", files.at("out.json"), "--commit", "abc1234"});
    CAPTURE(outcome.err);
    REQUIRE(outcome.code == 0);
    CHECK(has(outcome.out, "memcpy, 3 ranks"));
    CHECK(has(outcome.out, "transfers add"));
    const auto json = nlohmann::json::parse(read_text(files.at("out.json")));
    CHECK(json.at("commit") == "abc1234");
    CHECK(json.at("seconds_without_transfers") > 0);
    CHECK(json.at("unhidden").get<double>() ==
          doctest::Approx(json.at("seconds").get<double>() - json.at("seconds_without_transfers").get<double>()));
  }
  CHECK_FALSE(std::filesystem::exists(files.at("run") + "/log.jsonl"));
  check_fails(bench({}), 2, {"parallel.ranks", "found 1, expected 2 or more"});
  check_fails(bench({"--set", "parallel.ranks=2", "--set", "parallel.reduction=reproducible"}), 2,
              {"parallel.reduction", "found \"reproducible\"", "parallel.reduction=fast"});
}

TEST_CASE("bench comm times every collective between ranks, and what slows it") {
  TinyFiles files;
  auto bench = [&](std::vector<std::string> more) {
    more.insert(more.begin(), {"bench", "comm", files.config(), "--set", "device.cpu.threads=1"});
    return quern_run(std::move(more));
  };
  auto rate = [&](std::vector<std::string> more) {
    more.insert(more.end(), {"--set", "parallel.ranks=3", "--set", "parallel.communicator=memcpy", "--sizes",
                             "100,1MiB", "--json", files.at("out.json"), "--commit", "abc1234"});
    const Outcome outcome = bench(std::move(more));
    CAPTURE(outcome.err);
    REQUIRE(outcome.code == 0);
    CHECK(has(outcome.out, "memcpy, 3 ranks"));
    CHECK(has(outcome.out, "a large bf16 GEMM"));
    const auto json = nlohmann::json::parse(read_text(files.at("out.json")));
    CHECK(json.at("commit") == "abc1234");
    REQUIRE(json.at("collectives").size() == 6 * 2);
    for (const auto& time : json.at("collectives")) CHECK(time.at("seconds") > 0);
    CHECK(json.at("collectives")[0].at("bytes") == 3 * 112);
    const auto& gather = json.at("collectives")[5];
    CHECK(gather.at("collective") == "all_gather");
    return gather.at("bus_rate").get<double>();
  };
  CHECK(rate({}) > 0);
  CHECK(rate({"--throttle", "100MB/s"}) < 105e6);
  check_fails(bench({}), 2, {"parallel.ranks", "found 1, expected 2 or more"});
  check_fails(bench({"--sizes", "3x"}), 2, {"--sizes", "found 3x"});
  check_fails(bench({"--throttle", "fast"}), 2, {"--throttle", "found fast", "8GB/s"});
  check_fails(bench({"--throttle", "24"}), 2, {"--throttle", "found 24 bytes a second", "8GB/s"});
  check_fails(bench({"--set", "parallel.ranks=4", "--set", "train.accumulation=4", "--set", "parallel.machines=2",
                     "--set", "parallel.communicator=memcpy"}),
              2, {"parallel.machines", "one group", "found 2"});
  check_fails(bench({"--communicators", "memcpy,mpi", "--json", files.at("out.json")}), 2, {"--json", "one"});
}
