// Of communicators: what they say, how they join, and then every collective and fault over groups of processes.
#include <algorithm>

#include "conformance/communicator_group.h"
#include "conformance/contracts.h"

namespace quern::conformance {

namespace {

constexpr double kLimit = 60;  // s

std::string joins(const Subject& subject, int size) {
  const RankDirectory scratch(subject, size);
  const auto outcomes = run_ranks(size, kLimit, [&](int rank) {
    Joined joined(subject, scratch.path(), rank, size);
    Communicator& c = *joined.communicator;
    need(c.traits().id == subject.factory.id, "traits().id", c.traits().id, subject.factory.id);
    need(c.rank() == rank && c.size() == size, "rank and size",
         std::to_string(c.rank()) + " of " + std::to_string(c.size()),
         std::to_string(rank) + " of " + std::to_string(size));
    c.barrier();
    if (auto fault = c.error()) broken("error() of a group without a fault", *fault, "nothing");
    c.barrier();
    return std::string();
  });
  std::string refusal;
  for (int rank = 0; rank < size; ++rank) {
    const RankOutcome& outcome = outcomes[static_cast<std::size_t>(rank)];
    if (outcome.kind == RankOutcome::Kind::threw && outcome.code == ErrorCode::config) refusal = outcome.text;
    need(outcome.kind == RankOutcome::Kind::returned || (size > 1 && !refusal.empty()),
         "rank " + std::to_string(rank) + " of " + std::to_string(size), outcome.text,
         size > 1 ? "to join, or a config error" : "to join");
  }
  return refusal;
}

std::string aborts(const Subject& subject) {
  const TestDirectory scratch;
  run_all_ranks(1, kLimit, [&](int rank) -> std::string {
    Joined joined(subject, scratch.path(), rank, 1);
    joined.communicator->abort();
    return "";
  });
  return "";
}

}  // namespace

void check_communicator(Report& report, const Subject& subject) {
  if (!report.contract("connects", [&] { return joins(subject, 1), "one rank on device " + subject.options.device; }))
    return;
  std::vector<int> sizes{1};
  const bool holds = report.contract("connects several ranks", [&]() -> std::string {
    for (const int size : {2, 3, 4}) {
      try {
        if (const std::string refusal = joins(subject, size); !refusal.empty()) {
          need(size == 2, std::to_string(size) + " ranks", refusal, "to join, as fewer did");
          return "refuses 2 ranks: " + refusal;
        }
      } catch (const Skipped& missing) {
        if (size == 2) throw;
        return std::to_string(size - 1) + " ranks; of " + std::to_string(size) + ": " + missing.reason;
      }
      sizes.push_back(size);
    }
    return "2, 3 and 4 ranks";
  });
  if (!holds) sizes = {1};
  check_collectives(report, subject, sizes);
  report.contract("abort", [&] { return aborts(subject); });
  if (sizes.size() > 1) check_communicator_faults(report, subject, std::min(sizes.back(), 3));
}

}  // namespace quern::conformance
