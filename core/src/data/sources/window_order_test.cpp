// Properties of the order over files: without weights a permutation a pass, with weights exact shares over passes and
// even use of each group's windows.
#include "data/sources/window_order.h"

#include <algorithm>
#include <map>
#include <numeric>

#include <doctest/doctest.h>

#include "quern/testkit/refusal.h"

using namespace quern;

namespace {

// How often each (group, window) comes in places [from, to).
std::map<std::pair<std::size_t, std::uint64_t>, int> uses(const WindowOrder& order, std::uint64_t from,
                                                          std::uint64_t to) {
  std::map<std::pair<std::size_t, std::uint64_t>, int> count;
  for (std::uint64_t place = from; place < to; ++place) {
    auto [group, index] = order.at(place);
    ++count[{group, index}];
  }
  return count;
}

}  // namespace

TEST_CASE("without weights a pass is every window once, in the files' order or shuffled") {
  for (bool shuffled : {false, true}) {
    WindowOrder order({17}, {}, shuffled, 3, "");
    CHECK(order.windows() == 17);
    CHECK(order.shares().empty());
    for (std::uint64_t pass = 0; pass < 3; ++pass) {
      auto count = uses(order, 17 * pass, 17 * (pass + 1));
      CHECK(count.size() == 17);
    }
    if (!shuffled)
      for (std::uint64_t place = 0; place < 40; ++place) CHECK(order.at(place).index == place % 17);
  }
}

TEST_CASE("what rounding takes from a group in a pass it gets in a later one") {
  for (bool shuffled : {false, true}) {
    WindowOrder order({95, 5, 20}, {117.62, 1.19, 1.19}, shuffled, 11, "");
    CHECK(order.shares()[1] == doctest::Approx(1.19));
    for (std::uint64_t pass = 0; pass < 200; ++pass) {
      std::vector<std::uint64_t> taken(3);
      for (const auto& [window, times] : uses(order, 120 * pass, 120 * (pass + 1)))
        taken[window.first] += static_cast<std::uint64_t>(times);
      CHECK((taken[1] == 1 || taken[1] == 2));
    }
    std::vector<int> taken(3);
    for (const auto& [window, times] : uses(order, 0, 120 * 200)) taken[window.first] += times;
    CHECK(taken == std::vector<int>{120 * 200 - 2 * 238, 238, 238});
  }
}

TEST_CASE("the first rule rounds a share once for all passes") {
  WindowOrder order({95, 5, 20}, {117.62, 1.19, 1.19}, true, 11, "", OrderRule::first);
  CHECK(order.shares() == std::vector<double>{118, 1, 1});
  for (const auto& [window, times] : uses(order, 0, 120 * 5)) CHECK((window.first == 0 || times == 1));
}

TEST_CASE("more entries than their windows can make up for are refused") {
  CHECK(testkit::refusal(ErrorCode::config, [] {
          WindowOrder order({1, 1, 1, 1, 1, 1}, {1.4, 1.4, 1.4, 0.6, 0.6, 0.6}, true, 11, "data.tokens.weights");
        }).starts_with("data.tokens.weights: too few sequences"));
}

TEST_CASE("weights share a pass out exactly, and a group's windows are used evenly over any passes") {
  const std::vector<std::uint64_t> windows{40, 7, 13};
  for (const std::vector<double>& weights :
       std::vector<std::vector<double>>{{1, 1, 1}, {3, 1, 1}, {0.1, 5, 0.2}, {40, 7, 13}, {1e-3, 1e-3, 2e-3}})
    for (bool shuffled : {false, true}) {
      WindowOrder order(windows, weights, shuffled, 11, "");
      CHECK(order.windows() == 60);
      double sum = std::accumulate(weights.begin(), weights.end(), 0.0);
      for (std::uint64_t passes : {1, 2, 3, 10}) {
        auto count = uses(order, 0, 60 * passes);
        for (std::size_t group = 0; group < windows.size(); ++group) {
          int least = 1 << 30, most = 0;
          std::uint64_t total = 0;
          for (std::uint64_t window = 0; window < windows[group]; ++window) {
            int times = count[{group, window}];
            least = std::min(least, times);
            most = std::max(most, times);
            total += static_cast<std::uint64_t>(times);
          }
          CAPTURE(group);
          CHECK(most - least <= 1);
          const double exact = 60 * weights[group] / sum;
          CHECK(order.shares()[group] == doctest::Approx(exact));
          // Half a window at most, and of the largest group what two others leave.
          CHECK(std::abs(static_cast<double>(total) - static_cast<double>(passes) * exact) <= 1);
        }
      }
    }
}

TEST_CASE("weights in proportion to the windows give a pass of every window once") {
  WindowOrder order({40, 7, 13}, {80, 14, 26}, true, 11, "");
  for (const auto& [window, times] : uses(order, 60, 120)) CHECK(times == 1);
}

TEST_CASE("groups, passes and seeds have orders of their own") {
  // Two groups of the same size, each used by half in a pass: their orders differ, and so do seeds'.
  WindowOrder order({100, 100}, {1, 3}, true, 1, ""), other({100, 100}, {1, 3}, true, 2, "");
  std::vector<std::uint64_t> first, second, seeded;
  for (std::uint64_t place = 0; place < 200; ++place) {
    auto [group, index] = order.at(place);
    (group == 0 ? first : second).push_back(index);
    if (other.at(place).group == 0) seeded.push_back(other.at(place).index);
  }
  CHECK(first.size() == 50);
  CHECK(second.size() == 150);
  second.resize(50);
  CHECK(first != second);
  CHECK(seeded.size() == 50);
  CHECK(first != seeded);
}

TEST_CASE("an entry that a pass would take nothing of is refused with its number") {
  CHECK(testkit::refusal(ErrorCode::config, [] {
          WindowOrder order({40, 7, 13}, {1, 1e-6, 1}, true, 11, "data.tokens.weights");
        }).starts_with("data.tokens.weights: weight 2 is too small"));
}
