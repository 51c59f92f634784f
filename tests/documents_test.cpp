// Packed documents, from the token file to the gradients: a document in a packed batch has the loss and the gradient
// that it has alone.
#include <doctest/doctest.h>

#include "data/sources/token_source.h"
#include "end_to_end.h"
#include "quern/error.h"
#include "quern/random.h"
#include "quern/testkit/forwarding_device.h"
#include "quern/testkit/refusal.h"
#include "training_fixture.h"

using namespace quern;
using namespace quern::testing;
using testkit::TinyModelOptions;

namespace {

constexpr std::int32_t kSeparator = 0;

// Documents of the given lengths, separators included, of random tokens of `vocabulary`.
TokenFileContent documents_of(const std::vector<std::int64_t>& lengths, std::int64_t vocabulary, bool masked) {
  TokenFileContent content{.tokens = {}, .mask = {}, .vocabulary = vocabulary, .separator = kSeparator};
  for (std::int64_t length : lengths)
    for (std::int64_t i = 1; i <= length; ++i) {
      std::uint32_t word = random_word({23, RandomPurpose::sample, 0}, 0, content.tokens.size());
      auto token = 1 + static_cast<std::int32_t>(word % static_cast<std::uint32_t>(vocabulary - 1));
      content.tokens.push_back(i == length ? kSeparator : token);
      if (masked) content.mask.push_back(word >> 20 & 3);
    }
  return content;
}

PlanOptions options_for(Geometry geometry, bool documents) {
  PlanOptions options;
  options.geometry = geometry;
  options.documents = documents;
  return options;
}

// Tokens [from, to) of a batch as a batch of one row.
Batch alone(const Batch& packed, std::int32_t from, std::int32_t to) {
  auto part = [&](const std::vector<std::int32_t>& all) {
    return std::vector<std::int32_t>(all.begin() + from, all.begin() + to);
  };
  Batch batch{part(packed.tokens), part(packed.targets), {}, {}};
  for (std::int32_t i = 0; i < to - from; ++i) batch.positions.push_back(i);
  return batch;
}

// The CPU device, but for attention with documents, which it does not have. Plans only.
class NoDocuments : public testkit::ForwardingDevice {
 public:
  NoDocuments() : ForwardingDevice(cpu_device()) {}
  OpSupport query(const OpInstance& op) const override {
    if (op.kind == "attention" && op.inputs.size() > 1 && op.inputs[1].present) return {"no documents here", 0};
    return ForwardingDevice::query(op);
  }
};

// Documents in the tiny run's vocabulary: lengths 1 and more than a sequence of 16 among them.
void write_documents(const TinyFiles& files, const std::string& name, std::int64_t count) {
  std::vector<std::int64_t> lengths;
  for (std::int64_t total = 0; total < count;) {
    lengths.push_back(std::vector<std::int64_t>{5, 1, 9, 40, 1, 1, 16, 17, 3}[lengths.size() % 9]);
    total += lengths.back();
  }
  write_token_file(files.at(name), documents_of(lengths, 64, true));
}

}  // namespace

TEST_CASE("each document of a packed batch has the loss and gradient that it has alone") {
  // Cut at a row's end, of length 1, longer than a row, filling a row exactly.
  const std::vector<std::int64_t> lengths{5, 1, 13, 1, 1, 2, 30, 11, 3, 24, 7, 12, 12, 9};
  TestDirectory directory;
  for (const TinyModelOptions& form :
       {TinyModelOptions{}, TinyModelOptions{.tied = true, .head_norm = true}, TinyModelOptions{.layer_norm = true}})
    for (bool masked : {false, true}) {
      write_token_file(directory / "tokens", documents_of(lengths, form.vocabulary, masked));
      const Geometry geometry{5, 12};
      TokenFileSource source({.entries = {{directory / "tokens"}}, .shuffle = false, .documents = true}, geometry, 1);
      TinyRun packed(form, options_for(geometry, true));
      std::map<std::int64_t, std::unique_ptr<TinyRun>> single;  // by length
      for (int number = 0; number < 2; ++number) {
        Batch batch;
        source.next(batch);
        REQUIRE(batch.documents.size() > 6);
        auto gradients = packed.gradients(batch);
        LossStats all = packed.engine().result().loss;
        std::map<std::string, std::vector<double>> sums;
        double loss = 0, valid = 0;
        for (std::size_t d = 0; d + 1 < batch.documents.size(); ++d) {
          std::int32_t from = batch.documents[d], to = batch.documents[d + 1];
          CAPTURE(from);
          auto& run = single[to - from];
          if (!run) run = std::make_unique<TinyRun>(form, options_for({1, to - from}, false));
          for (auto& [name, values] : run->gradients(alone(batch, from, to))) {
            auto& sum = sums[name];
            sum.resize(values.size());
            for (std::size_t i = 0; i < values.size(); ++i) sum[i] += double{values[i]};
          }
          LossStats own = run->engine().result().loss;
          loss += own.loss_sum;
          valid += own.valid_tokens;
          // The document's loss in the batch: of its targets only.
          Batch only = batch;
          for (std::size_t i = 0; i < only.targets.size(); ++i)
            if (i < static_cast<std::size_t>(from) || i >= static_cast<std::size_t>(to)) only.targets[i] = -1;
          LossStats within = packed.engine().evaluate(only);
          CHECK(within.valid_tokens == own.valid_tokens);
          // fp32 matmuls of other heights: sums in another order.
          CHECK(within.loss_sum == doctest::Approx(own.loss_sum).epsilon(1e-5));
        }
        CHECK(all.valid_tokens == valid);
        CHECK(all.loss_sum == doctest::Approx(loss).epsilon(1e-5));
        for (auto& [name, values] : gradients) {
          CAPTURE(name);
          double largest = 0;
          for (double value : sums[name]) largest = std::max(largest, std::abs(value));
          for (std::size_t i = 0; i < values.size(); ++i)
            REQUIRE(std::abs(double{values[i]} - sums[name][i]) <= 1e-4 * largest);  // likewise, backwards too
        }
      }
    }
}

TEST_CASE("joined, the same file gives other losses") {
  TestDirectory directory;
  const Geometry geometry{5, 12};
  write_token_file(directory / "tokens", documents_of({5, 1, 13, 1, 1, 2, 30, 11, 3}, 37, false));
  double losses[2];
  for (bool documents : {false, true}) {
    TokenFileSource source({.entries = {{directory / "tokens"}}, .shuffle = false, .documents = documents}, geometry,
                           1);
    TinyRun run({}, options_for(geometry, documents));
    Batch batch;
    source.next(batch);
    losses[documents] = run.engine().evaluate(batch).loss_sum;
  }
  CHECK(std::abs(losses[0] - losses[1]) > 1e-3);
}

TEST_CASE("offsets that are not documents are stopped before a kernel trusts them") {
  const Geometry geometry{2, 8};
  TinyRun run({}, options_for(geometry, true));
  Batch batch = random_batch(geometry, 37, 1);
  for (const std::vector<std::int32_t>& good : {std::vector<std::int32_t>{}, {0, 8, 16}, {0, 1, 2, 8, 15, 16}}) {
    batch.documents = good;
    run.engine().evaluate(batch);
  }
  for (const std::vector<std::int32_t>& bad : {std::vector<std::int32_t>{0},
                                               {0, 16},
                                               {0, 8},
                                               {0, 8, 17},
                                               {1, 8, 16},
                                               {0, 8, 8, 16},
                                               {0, 9, 16},
                                               {0, 8, 5, 16},
                                               {0, -1, 8, 16}}) {
    batch.documents = bad;
    CHECK_THROWS_AS(run.engine().evaluate(batch), Error);
  }
}

TEST_CASE("a device without attention within documents is refused when it is planned") {
  testkit::TinyModel model;
  testkit::PlainPrecision precision;
  AdamW optimizer{AdamWOptions{}};
  NoDocuments device;
  std::vector<OpSpec> custom_ops;
  PlanParts parts{model, precision, device, optimizer, custom_ops};
  make_plan(parts, options_for({2, 8}, false));
  testkit::check_refused(ErrorCode::resources, {"no documents here", "data.documents = \"joined\""}, [&] {
    make_plan(parts, options_for({2, 8}, true));
  });
}

TEST_CASE("a run on packed documents is the same run after stops, bit for bit") {
  TinyFiles files;
  write_documents(files, "documents.tok", 13 * 16 + 1);
  write_documents(files, "held_out.tok", 5 * 16 + 1);
  const Overrides common{"data.documents=masked", "data.tokens.train=" + files.at("documents.tok"),
                         "data.tokens.validation=" + files.at("held_out.tok"), "train.accumulation=2",
                         "checkpoint.export=false"};
  auto with = [&](Overrides more) {
    more.insert(more.end(), common.begin(), common.end());
    return more;
  };
  SessionResult straight = train_here(files, with({files.run("straight")}));
  CHECK(straight.losses.size() == 8);
  Losses losses;
  SessionResult part;
  for (int step = 1; !part.result.finished; step += 2) {
    REQUIRE(step <= 9);
    part = train_here(files, with({files.run("stopped")}), step);
    losses.merge(part.losses);
  }
  CHECK(losses == straight.losses);
  CHECK(newest_tensors(files.at("stopped")) == newest_tensors(files.at("straight")));
  // Joined it would be another run, and a run does not go from one to the other.
  Overrides changed = with({files.run("stopped"), "train.steps=9"});
  changed.push_back("data.documents=joined");
  Outcome outcome = quern_train(files, changed);
  CAPTURE(outcome.err);
  CHECK(outcome.code == 3);
  CHECK(outcome.err.find("data.documents or the separator changed since the checkpoint") != std::string::npos);
}
