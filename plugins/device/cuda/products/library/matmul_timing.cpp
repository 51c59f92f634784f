#include "products/library/matmul_timing.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <iterator>
#include <limits>
#include <span>
#include <utility>

#include "products/library/matmul_plan.h"
#include "products/library/matmul_scratch.h"
#include "products/library/matmul_tiles.h"
#include "products/own/own_matmul.h"
#include "quern/error.h"
#include "runtime/check.h"
#include "runtime/hopper_kernels.h"
#include "runtime/timing.h"

namespace quern::cuda {

namespace {

constexpr float kFailed = std::numeric_limits<float>::infinity();

struct Candidate {
  cublasLtMatmulAlgo_t algorithm = {};
  bool listed = false;
  float ms = kFailed;
  bool own = false;  ///< quern's own GEMM, in place of an algorithm
};
using Candidates = std::vector<Candidate>;

void sort_by_time(Candidates& candidates) {
  std::stable_sort(candidates.begin(), candidates.end(),
                   [](const Candidate& x, const Candidate& y) { return x.ms < y.ms; });
}

/// Waits for the launches. A fault there ends the process's use of the GPU, so it says what to avoid.
void finish(CudaContext& context, const MatmulKey& key, const cublasLtMatmulAlgo_t& algorithm) {
  const cudaError_t status = cudaStreamSynchronize(context.setup);
  if (status == cudaSuccess) return;
  throw Error(ErrorCode::resources, {.where = "device cuda",
                                     .what = "a configuration of cuBLASLt's failed for the matmul " + key.text(),
                                     .found = configuration_text(algorithm) + ": " + cudaGetErrorName(status),
                                     .expected = {},
                                     .next = "set device.cuda.matmul_search to \"listed\""});
}

class Stopwatch {
 public:
  Stopwatch(CudaContext& context, const MatmulKey& key, const MatmulPlan& plan, const MatmulScratch& scratch)
      : context_(context), key_(key), plan_(plan), scratch_(scratch), timer_(context.setup) {}

  /// Milliseconds a run, the mean of `runs`, each on the next set of operands; kFailed when the algorithm fails.
  float mean(const Candidate& candidate, int runs) const {
    timer_.start();
    for (int i = 0; i < runs; ++i) {
      if (run(candidate, scratch_.operands(next_++ % scratch_.sets()))) continue;
      cudaGetLastError();  // a launch that was refused is an answer here, not an error to be found later
      return kFailed;
    }
    timer_.stop();
    if (candidate.own) QUERN_CUDA(cudaStreamSynchronize(context_.setup));
    finish(context_, key_, candidate.algorithm);
    return timer_.milliseconds() / static_cast<float>(runs);
  }

  /// The mean of so long, by the time that the candidate has.
  float load(const Candidate& candidate, float ms) const {
    return mean(candidate, std::max(1, static_cast<int>(std::lround(ms / std::max(candidate.ms, 1e-3f)))));
  }
  /// The mean of about so long, of 50 runs at most; kFailed when the algorithm fails.
  float of(const Candidate& candidate, float once, float ms) const {
    return mean(candidate, std::clamp(static_cast<int>(ms / std::max(once, 1e-3f)), 1, 50));
  }

 private:
  bool run(const Candidate& candidate, const MatmulOperands& operands) const {
    if (!candidate.own)
      return plan_.try_run(context_.lt, operands, candidate.algorithm, context_.setup) == CUBLAS_STATUS_SUCCESS;
    hopper_kernels().run_own_matmul(key_, operands, context_.multiprocessors, context_.setup);
    return true;
  }

  CudaContext& context_;
  const MatmulKey& key_;
  const MatmulPlan& plan_;
  const MatmulScratch& scratch_;
  EventTimer timer_;
  mutable std::size_t next_ = 0;
};

constexpr float kNear = 1.1f;  ///< beyond what short runs scatter by

/// All that `whole` accepts and that run, with the times of runs of a third of a millisecond, or of a single one where
/// that is far from the best; the best first. `best_ms` is of those that were timed before. Most need their kernel
/// loaded, some milliseconds each.
Candidates screen(const Stopwatch& watch, const MatmulPlan& whole, cublasLtHandle_t lt,
                  const std::vector<cublasLtMatmulAlgo_t>& algorithms, bool listed, float best_ms) {
  constexpr float kFar = 1.3f;  // beyond what single runs scatter by
  Candidates timed;
  for (const cublasLtMatmulAlgo_t& algorithm : algorithms) {
    Candidate candidate{algorithm, listed};
    if (!whole.accepts(lt, algorithm) || watch.mean(candidate, 1) == kFailed) continue;
    candidate.ms = watch.mean(candidate, 1);
    if (candidate.ms < kFar * best_ms) candidate.ms = watch.of(candidate, candidate.ms, 0.3f);
    best_ms = std::min(best_ms, candidate.ms);
    timed.push_back(candidate);
  }
  sort_by_time(timed);
  return timed;
}

/// Of candidates sorted by time the tiles of the first.
std::vector<std::uint32_t> best_tiles(const Candidates& candidates) {
  constexpr std::size_t kMost = 4;
  std::vector<std::uint32_t> tiles;
  for (const Candidate& candidate : candidates) {
    const std::uint32_t tile = tile_of(candidate.algorithm);
    if (tiles.size() < kMost && std::find(tiles.begin(), tiles.end(), tile) == tiles.end()) tiles.push_back(tile);
  }
  return tiles;
}

/// Candidates beyond the list, sorted by time: a few of each tile, and all of the best tiles.
Candidates screen_unlisted(const Stopwatch& watch, const MatmulPlan& whole, cublasLtHandle_t lt,
                           const UnlistedCandidates& unlisted, const Candidates& listed) {
  Candidates timed = screen(watch, whole, lt, unlisted.first, false, listed.front().ms), all = timed;
  all.insert(all.end(), listed.begin(), listed.end());
  sort_by_time(all);
  const std::vector<std::uint32_t> tiles = best_tiles(all);
  std::vector<cublasLtMatmulAlgo_t> others;
  std::copy_if(unlisted.rest.begin(), unlisted.rest.end(), std::back_inserter(others), [&](const auto& algorithm) {
    return std::find(tiles.begin(), tiles.end(), tile_of(algorithm)) != tiles.end();
  });
  for (const Candidate& candidate : screen(watch, whole, lt, others, false, all.front().ms)) timed.push_back(candidate);
  sort_by_time(timed);
  return timed;
}

/// The best of two rounds of about 3 ms.
float in_bursts(const Stopwatch& watch, const Candidate& candidate, float once) {
  return std::min(watch.of(candidate, once, 3), watch.of(candidate, once, 3));
}
void burst(const Stopwatch& watch, Candidates& candidates) {
  for (Candidate& candidate : candidates) candidate.ms = in_bursts(watch, candidate, candidate.ms);
  sort_by_time(candidates);
}

std::ptrdiff_t count_with_tile(const Candidates& candidates, std::uint32_t tile) {
  return std::count_if(candidates.begin(), candidates.end(),
                       [tile](const Candidate& c) { return tile_of(c.algorithm) == tile; });
}

bool contains(const Candidates& candidates, const Candidate& candidate) {
  return std::any_of(candidates.begin(), candidates.end(),
                     [&](const Candidate& known) { return text_of(known.algorithm) == text_of(candidate.algorithm); });
}

/// Of candidates sorted by time the first few that are near the first and `good`, some of a tile.
Candidates best_of(const Candidates& candidates, const std::function<bool(const Candidate&)>& good) {
  constexpr std::size_t kMost = 12;
  constexpr std::ptrdiff_t kMostOfATile = 4;
  Candidates best;
  for (const Candidate& candidate : candidates) {
    if (best.size() == kMost || candidate.ms > kNear * candidates.front().ms) break;
    if (count_with_tile(best, tile_of(candidate.algorithm)) < kMostOfATile && good(candidate))
      best.push_back(candidate);
  }
  return best;
}

constexpr float kClose = 1.06f;  ///< an eventual winner was 5% behind in bursts

/// Of candidates sorted by time those that may be the best under lasting load: near the first, not all of one tile,
/// whose variants differ little, and the best listed one, so that nothing is lost by having searched.
Candidates finalists(const Candidates& candidates) {
  constexpr std::size_t kMost = 4;
  constexpr std::ptrdiff_t kMostOfATile = 2;
  Candidates taken;
  for (const Candidate& candidate : candidates) {
    if (taken.size() == kMost || candidate.ms > kClose * candidates.front().ms) break;
    if (count_with_tile(taken, tile_of(candidate.algorithm)) < kMostOfATile) taken.push_back(candidate);
  }
  auto is_listed = [](const Candidate& c) { return c.listed; };
  if (std::none_of(taken.begin(), taken.end(), is_listed))
    taken.push_back(*std::find_if(candidates.begin(), candidates.end(), is_listed));
  return taken;
}

/// Times each under load that lasts, in rounds forth and back, so that what changes slowly weighs on all alike. The
/// last round is of those that may still be the best. The best first.
void sustain(const Stopwatch& watch, Candidates& candidates) {
  constexpr float kSettleMs = 20, kWarmMs = 5, kTimedMs = 15;
  constexpr int kRounds = 3;
  constexpr float kBehind = 1.03f;  // beyond what two rounds scatter by
  watch.load(candidates.front(), kSettleMs);
  std::size_t left = candidates.size();
  for (int round = 0; round < kRounds; ++round) {
    for (std::size_t i = 0; i < left; ++i) {
      Candidate& candidate = candidates[round % 2 == 0 ? i : left - 1 - i];
      watch.load(candidate, kWarmMs);
      const float ms = watch.load(candidate, kTimedMs), rounds = static_cast<float>(round);
      candidate.ms = (candidate.ms * rounds + ms) / (rounds + 1);
    }
    if (round + 2 < kRounds) continue;
    sort_by_time(candidates);
    const float most = kBehind * candidates.front().ms;
    while (candidates[left - 1].ms > most) --left;
  }
}

/// Whether the own GEMM is faster than the library's best, by more than timings scatter: where it is near in
/// bursts, in runs of 80 ms, in which the power limit shows.
bool own_is_faster(const Stopwatch& watch, Candidate best) {
  constexpr float kTurnMs = 40, kScatter = 0.995f;
  constexpr float kClear = 1.05f;  // beyond what two turns scatter by
  Candidate own{.own = true};
  watch.mean(own, 1);  // loads the kernel
  own.ms = in_bursts(watch, own, watch.mean(own, 1));
  best.ms = in_bursts(watch, best, best.ms);
  if (own.ms > kClose * best.ms) return false;
  float best_ms = 0, own_ms = 0;
  auto turn = [&](const Candidate& candidate, float& sum) {
    watch.load(candidate, kTurnMs);  // the clock becomes steady
    sum += watch.load(candidate, kTurnMs);
  };
  turn(best, best_ms), turn(own, own_ms);
  if (std::max(own_ms, best_ms) > kClear * std::min(own_ms, best_ms)) return own_ms < best_ms;
  turn(own, own_ms), turn(best, best_ms);
  return own_ms < kScatter * best_ms;
}

/// y's sums after a run into bytes that show what it leaves out; empty when the run fails. As numbers, bytes of 0x42
/// are about 48, of 0xff none.
std::vector<float> sums_of(CudaContext& context, const MatmulPlan& plan, const MatmulKey& key,
                           const MatmulScratch& scratch, const cublasLtMatmulAlgo_t& algorithm) {
  scratch.reset_result(key.accumulate ? 0x42 : 0xff);
  if (plan.try_run(context.lt, scratch.operands(), algorithm, context.setup) == CUBLAS_STATUS_SUCCESS) {
    finish(context, key, algorithm);
    return scratch.signed_row_sums();
  }
  cudaGetLastError();
  return {};
}

/// Whether x is y but for rounding: a step of bf16 is 2^-7 of an element at most, and 8-bit matmuls may accumulate in
/// fewer bits. No row may be far off, since one of many hardly shows in the whole.
bool agrees(std::span<const float> x, std::span<const float> y) {
  constexpr double kWhole = 1e-2, kRow = 0.1;
  double squares = 0, reference = 0, worst = 0;
  for (std::size_t i = 0; i < y.size(); ++i) {
    const double difference = std::abs(double{x[i]} - y[i]);
    if (!std::isfinite(difference)) return false;
    worst = std::max(worst, difference);
    squares += difference * difference;
    reference += double{y[i]} * y[i];
  }
  return squares < kWhole * kWhole * reference &&
         worst * worst * static_cast<double>(y.size()) < kRow * kRow * reference;
}

/// Whether an algorithm gives these sums but for rounding, and the same bits again.
bool gives(std::span<const float> want, CudaContext& context, const MatmulPlan& plan, const MatmulKey& key,
           const MatmulScratch& scratch, const cublasLtMatmulAlgo_t& algorithm) {
  const std::vector<float> got = sums_of(context, plan, key, scratch, algorithm),
                           again = sums_of(context, plan, key, scratch, algorithm);
  return !want.empty() && got.size() == want.size() && got == again && agrees(got, want);
}

/// Its longest dimension, which stays a multiple of 128; false where that is short.
bool halve(MatmulKey& key) {
  std::int64_t& longest = std::max({std::ref(key.m), std::ref(key.n), std::ref(key.k)},
                                   [](std::int64_t& x, std::int64_t& y) { return x < y; });
  if (longest < 256) return false;
  longest = longest / 2 / 128 * 128;
  return true;
}

/// Candidates of a wide search are screened on this: as much of a matmul as takes about a millisecond.
MatmulKey part_to_screen(MatmulKey key) {
  constexpr double kMostFlops = 6e11;
  while (key.flops() > kMostFlops && halve(key)) {
  }
  return key;
}

TimedChoice choose_on(CudaContext& context, const MatmulKey& key, const MatmulScratch& scratch,
                      const std::vector<cublasLtMatmulAlgo_t>& listed, const UnlistedCandidates& unlisted, bool own) {
  const MatmulPlan plan(key);
  const MatmulKey part = unlisted.empty() ? key : part_to_screen(key);
  const MatmulPlan plan_of_part(part);
  const Stopwatch watch(context, key, plan, scratch), watch_part(context, key, plan_of_part, scratch);
  TimedChoice choice{listed.front()};
  Candidates timed = screen(watch_part, plan, context.lt, listed, true, kFailed);
  if (part.flops() < key.flops()) std::erase_if(timed, [&](const Candidate& c) { return watch.mean(c, 1) == kFailed; });
  if (timed.empty()) return choice;
  Candidates candidates = best_of(timed, [](const Candidate&) { return true; });
  choice.tried = timed.size();
  if (!unlisted.empty()) {
    Candidates found = screen_unlisted(watch_part, plan, context.lt, unlisted, timed);
    choice.tried += found.size();
    std::erase_if(found, [&](const Candidate& c) { return c.ms > kNear * timed.front().ms; });
    const std::vector<float> want = sums_of(context, plan, key, scratch, timed.front().algorithm);
    auto same = [&](const Candidate& c) { return gives(want, context, plan, key, scratch, c.algorithm); };
    for (const Candidate& candidate : best_of(found, same))
      if (!contains(candidates, candidate)) candidates.push_back(candidate);
  }
  for (Candidate& candidate : candidates) candidate.ms *= static_cast<float>(key.flops() / part.flops());
  burst(watch, candidates);
  if (!unlisted.empty()) candidates = finalists(candidates);
  if (!unlisted.empty() && candidates.size() > 1) sustain(watch, candidates);
  for (const Candidate& candidate : candidates) choice.finalists.push_back(candidate.algorithm);
  choice.listed_ms =
      std::find_if(candidates.begin(), candidates.end(), [](const Candidate& c) { return c.listed; })->ms;
  if (own) hopper_kernels().load_own_matmul(key), choice.own = own_is_faster(watch, candidates.front());
  choice.algorithm = candidates.front().algorithm;
  choice.ms = candidates.front().ms;
  choice.timed = true;
  return choice;
}

}  // namespace

bool gives_same(CudaContext& context, const MatmulPlan& plan, const MatmulKey& key, const MatmulScratch& scratch,
                const cublasLtMatmulAlgo_t& reference, const cublasLtMatmulAlgo_t& algorithm) {
  return gives(sums_of(context, plan, key, scratch, reference), context, plan, key, scratch, algorithm);
}

TimedChoice choose_by_time(CudaContext& context, const MatmulKey& key, const std::vector<cublasLtMatmulAlgo_t>& listed,
                           const UnlistedCandidates& unlisted, bool own) {
  MatmulKey timed = key;
  for (int attempt = 0; attempt < 5; ++attempt) {
    const MatmulScratch scratch(timed, context.setup, sets_beyond(context.traits.l2_bytes, timed));
    const bool whole = attempt == 0;  // an unlisted one is taken only after its result was seen to be right
    if (scratch) {
      TimedChoice choice =
          choose_on(context, timed, scratch, listed, whole ? unlisted : UnlistedCandidates{}, whole && own);
      choice.whole = whole && choice.timed;
      return choice;
    }
    if (!halve(timed)) break;
  }
  return {listed.front()};
}

}  // namespace quern::cuda
