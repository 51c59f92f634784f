// How groups are made and end: by what they find each other, and that a group that is gone has left nothing behind.
#include "conformance/communicator/communicator_group.h"
#include "conformance/harness/counting_device.h"
#include "conformance/harness/growth.h"

namespace quern::conformance {

namespace {

constexpr double kLimit = 60;  // s
constexpr std::int64_t kCount = 1000;

/// Each rank adds its number, counted from 1.
void need_sum(Communicator& communicator, Device& device, Stream stream) {
  testkit::DeviceMemory memory(device, kCount * sizeof(float));
  memory.write(std::vector<float>(kCount, static_cast<float>(communicator.rank() + 1)).data());
  communicator.register_buffer(memory.data(), memory.bytes());
  communicator.all_reduce({memory.data(), DType::f32, {kCount}}, Reduction::sum, stream);
  device.synchronize(stream);
  communicator.unregister_buffer(memory.data());
  std::vector<float> got(kCount);
  memory.read(got.data());
  const int size = communicator.size();
  for (float value : got)
    need(value == static_cast<float>(size * (size + 1) / 2), "a sum over " + std::to_string(size) + " ranks",
         number(value), number(size * (size + 1) / 2));
}

/// Groups that have only an address, only an exchange, and for one rank neither: they join and sum, or all ranks refuse
/// them as a user's mistake.
std::string with_less(const Subject& subject, const std::vector<int>& sizes) {
  std::string refusal;
  for (const int size : sizes)
    for (const bool address : {true, false})
      for (const bool exchange : {true, false}) {
        if (size > 2 || (address && exchange) || (size == 2 && !address && !exchange)) continue;
        const RankDirectory scratch(subject, size);
        const auto outcomes = run_ranks(size, kLimit, [&](int rank) -> std::string {
          Seat seat(subject, scratch.path(), rank, size);
          if (!address) seat.rendezvous.address = {};
          if (!exchange) seat.rendezvous.exchange = {};
          const auto communicator = subject.make<Communicator>();
          communicator->connect(seat.rendezvous, *seat.device);
          need_sum(*communicator, *seat.device, seat.stream);
          return "";
        });
        const std::string who = std::to_string(size) + (size == 1 ? " rank" : " ranks") +
                                (address ? "" : ", no address") + (exchange ? "" : ", no exchange");
        for (const RankOutcome& outcome : outcomes) {
          const bool refused = outcome.kind == RankOutcome::Kind::threw && outcome.code == ErrorCode::config;
          need(outcome.kind == RankOutcome::Kind::returned || (refused && size > 1), who, outcome.text,
               size > 1 ? "to join and sum, or a config error of all ranks" : "to join and sum");
          need(outcome.kind == outcomes[0].kind, who, "refused by some ranks", "by all or by none");
          if (refused && refusal.empty()) refusal = "; refused: " + who + ": " + outcome.text;
        }
      }
  return std::string(sizes.size() > 1 ? "1 and 2 ranks" : "1 rank") + refusal;
}

/// Groups that are made, sum and are destroyed, one after another in the same processes.
std::string leaves(const Subject& subject, const std::vector<int>& sizes) {
  constexpr Repeats kAlone{.first = 10, .calls = 60};
  // Libraries such as MPI keep lists that grow with their calls.
  constexpr Repeats kPairs{.first = 5, .calls = 15, .most_growth = 100'000},
      kOnGpus{.first = 2, .calls = 10, .most_growth = 100'000};
  std::string text;
  for (const int size : sizes) {
    if (size > 2) break;
    const RankDirectory scratch(subject, size);
    const auto outcomes = run_all_ranks(size, 3 * kLimit, [&](int rank) {
      Seat seat(subject, scratch.path(), rank, size);
      CountingDevice device(std::move(seat.device));
      const std::string address = seat.rendezvous.address;
      int number = 0;
      const std::string done = need_no_growth(
          "a group of " + std::to_string(size) + " that joins, sums and ends",
          [&] {
            seat.rendezvous.address = address + std::to_string(++number);
            auto communicator = subject.make<Communicator>();
            communicator->connect(seat.rendezvous, device);
            need_sum(*communicator, device, seat.stream);
            communicator->barrier();
            communicator.reset();
            need(device.held() == 0, "allocations of the device by a group that is gone",
                 std::to_string(device.held()) + " not released", "none");
          },
          !device.traits().host_addressable ? kOnGpus
          : size == 1                       ? kAlone
                                            : kPairs);
      return done;
    });
    text += (text.empty() ? "" : ", ") + outcomes[0].text;
  }
  return text;
}

}  // namespace

void check_connecting(Report& report, const Subject& subject, const std::vector<int>& sizes) {
  report.contract("without address or exchange", [&] { return with_less(subject, sizes); });
  report.contract("groups leave nothing", [&] { return leaves(subject, sizes); });
}

}  // namespace quern::conformance
