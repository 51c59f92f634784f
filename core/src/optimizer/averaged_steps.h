#pragma once
// Weights of steps in a running average: each the square of the largest rate so far, so that steps of a warm-up count
// less (Defazio et al., "The Road Less Scheduled", 2024).

#include <algorithm>

namespace quern {

struct AveragedSteps {
  double largest_rate = 0;
  double weights = 0;  ///< their sum

  /// Of the next step, if it has that rate, in the average over all until then: StepState::average.
  double share(double rate) const {
    const double weight = weight_of(rate);
    return weight > 0 ? weight / (weights + weight) : 0;
  }
  void add(double rate) {
    weights += weight_of(rate);
    largest_rate = std::max(largest_rate, rate);
  }
  bool operator==(const AveragedSteps&) const = default;

 private:
  double weight_of(double rate) const {
    const double largest = std::max(largest_rate, rate);
    return largest * largest;
  }
};

}  // namespace quern
