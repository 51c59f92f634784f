#include "data/sources/window_order.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>

#include "data/sources/permutation.h"
#include "quern/error.h"

namespace quern {

namespace {

// Whole numbers in proportion to the weights, with sum `total`: the parts that rounding down leaves go to the largest
// remainders, the first group first.
std::vector<std::uint64_t> shared_out(std::uint64_t total, const std::vector<double>& weights) {
  const double sum = std::accumulate(weights.begin(), weights.end(), 0.0);
  std::vector<std::uint64_t> shares;
  std::vector<double> remainders;
  for (double weight : weights) {
    double exact = static_cast<double>(total) * (weight / sum);
    shares.push_back(static_cast<std::uint64_t>(exact));
    remainders.push_back(exact - std::floor(exact));
  }
  std::vector<std::size_t> by_remainder(weights.size());
  std::iota(by_remainder.begin(), by_remainder.end(), std::size_t{0});
  std::stable_sort(by_remainder.begin(), by_remainder.end(),
                   [&](std::size_t a, std::size_t b) { return remainders[a] > remainders[b]; });
  std::uint64_t given = std::accumulate(shares.begin(), shares.end(), std::uint64_t{0});
  for (std::size_t i = 0; given < total; i = (i + 1) % shares.size(), ++given) ++shares[by_remainder[i]];
  return shares;
}

constexpr double kOne = 0x1p32;  // a window, in the unit of Share::fraction

/// So near a whole number of windows that only the division by the sum of weights keeps them apart.
bool is_whole(double exact) { return std::fabs(exact - std::round(exact)) < 1e-6; }

}  // namespace

WindowOrder::WindowOrder(std::vector<std::uint64_t> windows, const std::vector<double>& weights, bool shuffled,
                         std::uint64_t seed, const std::string& where, OrderRule rule)
    : windows_(std::move(windows)),
      total_(std::accumulate(windows_.begin(), windows_.end(), std::uint64_t{0})),
      shuffled_(shuffled),
      seed_(seed),
      rule_(rule) {
  if (weights.empty()) return;
  const double sum = std::accumulate(weights.begin(), weights.end(), 0.0);
  const std::vector<std::uint64_t> rounded = shared_out(total_, weights);
  std::uint64_t others = 0;  // that a pass takes at most of all but the largest group
  for (std::size_t group = 0; group < windows_.size(); ++group) {
    if (rounded[group] == 0)
      throw Error(ErrorCode::config, {.where = where,
                                      .what = "weight " + std::to_string(group + 1) + " is too small",
                                      .found = "less than one sequence in a pass of " + std::to_string(total_),
                                      .expected = "at least one",
                                      .next = "raise it, or leave that entry out"});
    Share share{rounded[group], 0};
    const double exact = static_cast<double>(total_) * (weights[group] / sum);
    if (rule == OrderRule::second && is_whole(exact))
      share.whole = static_cast<std::uint64_t>(std::llround(exact));
    else if (rule == OrderRule::second)
      share = {static_cast<std::uint64_t>(exact), static_cast<std::uint64_t>((exact - std::floor(exact)) * kOne)};
    even_ = even_ && share.fraction == 0;
    others += share.whole + (share.fraction > 0 ? 1 : 0);
    shares_.push_back(share);
    if (weights[group] > weights[largest_]) largest_ = group;
  }
  const Share& most = shares_[largest_];
  others -= most.whole + (most.fraction > 0 ? 1 : 0);
  if (others > total_)
    throw Error(ErrorCode::config, {.where = where,
                                    .what = "too few sequences for so many entries",
                                    .found = std::to_string(total_) + " in a pass",
                                    .expected = "at least " + std::to_string(others),
                                    .next = "leave entries out, or join them in one"});
}

std::vector<double> WindowOrder::shares() const {
  std::vector<double> shares;
  for (const Share& share : shares_)
    shares.push_back(static_cast<double>(share.whole) + static_cast<double>(share.fraction) / kOne);
  return shares;
}

std::uint64_t WindowOrder::taken(std::size_t group, std::uint64_t passes) const {
  if (even_ || group != largest_) {
    const auto [whole, fraction] = shares_[group];
    return passes * whole + ((passes * fraction + (std::uint64_t{1} << 31)) >> 32);
  }
  std::uint64_t rest = passes * total_;
  for (std::size_t other = 0; other < shares_.size(); ++other)
    if (other != largest_) rest -= taken(other, passes);
  return rest;
}

std::uint64_t WindowOrder::permute(std::uint64_t index, std::uint64_t count, std::uint64_t seed,
                                   std::uint64_t round) const {
  if (!shuffled_) return index;
  return (rule_ == OrderRule::first ? feistel_permuted : permuted)(index, count, seed,
                                                                   static_cast<std::uint32_t>(round));
}

WindowOrder::Window WindowOrder::at(std::uint64_t place) const {
  const std::uint64_t pass = place / total_;
  std::uint64_t slot = permute(place % total_, total_, seed_, pass);
  if (shares_.empty()) return {0, slot};  // each once a pass, in the pass's order
  std::size_t group = 0;
  std::uint64_t before = 0;  // of the group, in earlier passes
  for (;; ++group) {
    before = taken(group, pass);
    const std::uint64_t share = taken(group, pass + 1) - before;
    if (slot < share) break;
    slot -= share;
  }
  const std::uint64_t has = windows_[group], index = before + slot;
  if (even_ && shares_[group].whole == has) return {group, slot};
  // An order of its own for each group: group + 1 times an odd number is never 0, which is the passes' own order.
  return {group, permute(index % has, has, seed_ ^ ((group + 1) * 0x9e3779b97f4a7c15ull), index / has)};
}

}  // namespace quern
