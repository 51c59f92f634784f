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

}  // namespace

WindowOrder::WindowOrder(std::vector<std::uint64_t> windows, const std::vector<double>& weights, bool shuffled,
                         std::uint64_t seed, const std::string& where)
    : windows_(std::move(windows)), begin_{0}, shuffled_(shuffled), seed_(seed) {
  const std::uint64_t total = std::accumulate(windows_.begin(), windows_.end(), std::uint64_t{0});
  if (!weights.empty()) shares_ = shared_out(total, weights);
  for (std::size_t group = 0; group < windows_.size(); ++group) {
    std::uint64_t share = shares_.empty() ? windows_[group] : shares_[group];
    if (share == 0)
      throw Error(ErrorCode::config, {.where = where,
                                      .what = "weight " + std::to_string(group + 1) + " is too small",
                                      .found = "less than one sequence in a pass of " + std::to_string(total),
                                      .expected = "at least one",
                                      .next = "raise it, or leave that entry out"});
    begin_.push_back(begin_.back() + share);
  }
}

WindowOrder::Window WindowOrder::at(std::uint64_t place) const {
  const std::uint64_t pass = place / windows();
  std::uint64_t slot = place % windows();
  if (shuffled_) slot = permuted(slot, windows(), seed_, static_cast<std::uint32_t>(pass));
  auto group = static_cast<std::size_t>(std::upper_bound(begin_.begin(), begin_.end(), slot) - begin_.begin()) - 1;
  std::uint64_t index = slot - begin_[group], has = windows_[group];
  if (shares_.empty() || shares_[group] == has) return {group, index};  // each once a pass, in the pass's order
  index += pass * shares_[group];
  const std::uint64_t round = index / has;
  index %= has;
  // An order of its own for each group: group + 1 times an odd number is never 0, which is the passes' own order.
  if (shuffled_)
    index = permuted(index, has, seed_ ^ ((group + 1) * 0x9e3779b97f4a7c15ull), static_cast<std::uint32_t>(round));
  return {group, index};
}

}  // namespace quern
