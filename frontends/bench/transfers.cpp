#include "bench/transfers.h"

#include <algorithm>
#include <vector>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "base/clock.h"
#include "base/format.h"
#include "base/median.h"
#include "bench/bench.h"
#include "data/sources/turns_source.h"
#include "quern/error.h"
#include "run/ready_engine.h"
#include "run/weights.h"

namespace quern::bench {

namespace {

class Steps {
 public:
  Steps(const Session& session, Ranks& ranks, Engine& engine) : session_(session), ranks_(ranks), engine_(engine) {
    state_.learning_rate = static_cast<float>(session.optimizer_options.learning_rate);
    state_.clip_norm = static_cast<float>(session.optimizer_options.clip_norm);
    const Plan& plan = engine.plan();
    for (std::uint32_t number = 0; number < kBatches; ++number) batches_.push_back(batch_for(plan, number));
  }

  /// Median seconds of so many steps after one, which captures graphs.
  double time(std::int64_t steps) {
    std::vector<double> seconds;
    for (std::int64_t i = 0; i <= steps; ++i) seconds.push_back(step());
    seconds.erase(seconds.begin());
    return median_of(std::move(seconds));
  }

  /// The same, of steps whose numbers mean nothing.
  double time_without_transfers(std::int64_t steps) {
    engine_.skip_transfers();
    transfers_ = false;
    return time(steps);
  }

 private:
  static constexpr std::uint32_t kBatches = 64;

  /// Of the slowest rank.
  double step() {
    const std::int64_t accumulation = session_.train.accumulation;
    const int rank = engine_.plan().shards_micro_steps() ? 0 : ranks_.rank();  // then all have as many as rank 0
    const std::vector<std::int64_t> own = turns_of(rank, ranks_.size(), session_.turn(), accumulation);
    const double begin = now();
    for (std::size_t i = 0; i < own.size(); ++i) {
      state_.micro_step = static_cast<std::uint32_t>(own[i]);
      const std::uint64_t number = std::uint64_t{state_.step} * static_cast<std::uint64_t>(accumulation);
      engine_.micro_step(batches_[(number + state_.micro_step) % kBatches], state_,
                         {.first = i == 0, .last = i + 1 == own.size()});
    }
    engine_.update();
    const bool applied = engine_.result().update.apply != 0;
    const double end = now();
    ++state_.step;
    state_.updates = state_.step;
    double slowest = 0;
    for (const std::string& one : ranks_.exchange(std::to_string(end - begin)))
      slowest = std::max(slowest, std::stod(one));
    ranks_.check("step " + std::to_string(state_.step) + " of the bench");
    if (ranks_.any(applied || !transfers_ ? 0 : 1) != 0)
      throw Error(ErrorCode::numerics,
                  {.where = "step " + std::to_string(state_.step) + " of the bench",
                   .what = "loss or gradients are not finite, and the weights stay",
                   .next = "lower optimizer.learning_rate: the speed of such steps means nothing"});
    return slowest;
  }

  const Session& session_;
  Ranks& ranks_;
  Engine& engine_;
  bool transfers_ = true;
  StepState state_;
  std::vector<Batch> batches_;
};

}  // namespace

TransfersResult run_transfers_bench(Session& session, Ranks& ranks, std::int64_t steps) {
  if (session.parallel.reduction == "reproducible")
    throw Error(ErrorCode::config, {.where = session.config.where("parallel", "reduction"),
                                    .what = "reproducible sums cannot be made without transfers",
                                    .found = "\"reproducible\"",
                                    .expected = "\"fast\"",
                                    .next = "add --set parallel.reduction=fast"});
  Phases phases;
  const std::unique_ptr<Engine> engine = ready_engine(
      session, ranks, "", [](std::string_view) {}, phases);
  ranks.join(*session.communicator, *session.device, *engine);
  const FirstWeights weights = first_weights(*engine, {.seed = static_cast<std::uint64_t>(session.train.seed)});
  load_weights(*engine, weights, Loaded::all);
  ranks.together();
  engine->refresh();
  TransfersResult result{.communicator = session.communicator->traits().id,
                         .ranks = ranks.size(),
                         .tokens_per_step = static_cast<double>(session.tokens_per_step())};
  Steps run(session, ranks, *engine);
  result.step = run.time(steps);
  result.without = run.time_without_transfers(steps);
  ranks.leave(*engine);
  return result;
}

std::string transfers_table(const TransfersResult& result, const DeviceTraits& device) {
  return fmt::format(
      "{}, {} ranks of {}\n\n"
      "step               {}, {} tok/s\n"
      "without transfers  {}\n"
      "transfers add      {} ({:.1f}% of a step)\n",
      result.communicator, result.ranks, device.name, format_duration(result.step),
      format_count(result.tokens_per_step / result.step), format_duration(result.without),
      (result.added() < 0 ? "-" : "") + format_duration(std::abs(result.added())), 100 * result.added() / result.step);
}

std::string transfers_json(const TransfersResult& result, const DeviceTraits& device, const std::string& commit) {
  const nlohmann::ordered_json json = {{"transfers_of", result.communicator},
                                       {"device", device.name},
                                       {"ranks", result.ranks},
                                       {"quern", QUERN_VERSION},
                                       {"commit", commit},
                                       {"tokens_per_step", result.tokens_per_step},
                                       {"seconds", result.step},
                                       {"seconds_without_transfers", result.without},
                                       {"unhidden", result.added()}};
  return json.dump(1) + "\n";
}

}  // namespace quern::bench
