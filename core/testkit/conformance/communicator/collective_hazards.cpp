#include "conformance/communicator/collective_hazards.h"

#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <limits>

namespace quern::conformance::collectives {

int maximum_of_nan(Joined& group) {
  constexpr std::int64_t kCount = 1021;
  Communicator& c = *group.communicator;
  const int size = c.size();
  const Case one{.dtype = DType::f32, .counts = Sizes(static_cast<std::size_t>(size), kCount), .equal = true};
  const std::int64_t whole = one.whole();
  auto value = [&](int rank, std::int64_t i) {
    if (i % (size + 2) == rank) return std::numeric_limits<double>::quiet_NaN();
    if (i % 3 == 0) return -std::numeric_limits<double>::infinity();
    return i % 31 == 1 ? std::numeric_limits<double>::infinity() : -1.0 - static_cast<double>((i + rank) % 5);
  };
  Bytes own(static_cast<std::size_t>(whole) * 4);
  for (std::int64_t i = 0; i < whole; ++i) put_value(own, one.dtype, i, value(c.rank(), i));
  auto need_maxima = [&](const Bytes& got, std::int64_t begin, const std::string& call) {
    for (std::int64_t i = begin; i < begin + static_cast<std::int64_t>(got.size() / 4); ++i) {
      const double element = value_of(got, one.dtype, i - begin);
      double want = value(0, i);
      for (int rank = 1; rank < size; ++rank) {
        const double other = value(rank, i);
        want = std::isnan(want) || other < want ? want : other;
      }
      need(std::isnan(want) ? std::isnan(element) : element == want, call + ", element " + std::to_string(i),
           number(element), number(want));
    }
  };
  const std::int64_t begin = one.before(c.rank());
  Buffers buffers(group, one, whole, kCount);
  buffers.write(group, buffers.in(), own);
  c.reduce_scatter(buffers.in(), buffers.out(), {}, Reduction::maximum, group.stream);
  need_maxima(buffers.read(group, buffers.out()), begin, "reduce_scatter of maxima");
  c.all_reduce(buffers.in(), Reduction::maximum, group.stream);
  need_maxima(buffers.read(group, buffers.in()), 0, "all_reduce of maxima");
  buffers.need_untouched(group);
  return 2;
}

int again_and_again(Joined& group) {
  constexpr int kRounds = 60;
  Communicator& c = *group.communicator;
  Device& device = *group.device;
  const Case one{.dtype = DType::u8, .counts = Sizes(static_cast<std::size_t>(c.size()), 1021), .equal = true};
  Buffers buffers(group, one, 1021, one.whole());
  for (int round = 0; round < kRounds; ++round) {
    auto byte = [round](int rank) { return static_cast<std::uint8_t>(1 + round * 4 + rank); };
    if (round % c.size() == c.rank() && round % 3 == 0) ::usleep(2000);
    device.fill(buffers.in().data, byte(c.rank()), buffers.in().bytes(), group.stream);
    c.all_gather(buffers.in(), buffers.out(), {}, group.stream);
    device.fill(buffers.in().data, 0, buffers.in().bytes(), group.stream);
    const Bytes got = buffers.read(group, buffers.out());
    device.fill(buffers.out().data, 0, buffers.out().bytes(), group.stream);
    for (int rank = 0; rank < c.size(); ++rank)
      need(std::count(got.begin() + rank * 1021, got.begin() + (rank + 1) * 1021, byte(rank)) == 1021,
           "rank " + std::to_string(rank) + "'s slab in round " + std::to_string(round), "other bytes",
           std::to_string(byte(rank)));
  }
  return 1;
}

int root_ahead(Joined& group) {
  constexpr int kRounds = 16;
  Communicator& c = *group.communicator;
  for (const std::int64_t bytes : {std::int64_t{1021}, std::int64_t{2} << 20}) {
    const Case one{.dtype = DType::u8, .counts = {bytes}, .equal = true};
    Buffers buffers(group, one, bytes, 0);
    for (int root = 0; root < c.size(); ++root)
      for (int round = 0; round < kRounds; ++round) {
        const auto byte = static_cast<std::uint8_t>(1 + root * kRounds + round);
        if (c.rank() == root)
          group.device->fill(buffers.in().data, byte, buffers.in().bytes(), group.stream);
        else
          ::usleep(1000);
        c.broadcast(buffers.in(), root, group.stream);
        if (c.rank() == root) continue;
        const Bytes got = buffers.read(group, buffers.in());
        need(std::count(got.begin(), got.end(), byte) == bytes,
             std::to_string(bytes) + " bytes from rank " + std::to_string(root) + " in round " + std::to_string(round),
             "other bytes", std::to_string(byte));
      }
  }
  return 1;
}

int captured(Joined& group) {
  constexpr int kLaunches = 3;
  Communicator& c = *group.communicator;
  if (!c.traits().can_capture || !group.device->traits().can_capture) return 0;
  const Case one{.dtype = DType::f32, .counts = Sizes(static_cast<std::size_t>(c.size()), 1021), .equal = true};
  Buffers buffers(group, one, 1021, one.whole());
  auto work = [&] {
    c.all_gather(buffers.in(), buffers.out(), {}, group.stream);
    c.all_reduce(buffers.out(), Reduction::sum, group.stream);
  };
  work();
  group.device->synchronize(group.stream);
  const std::unique_ptr<Graph> graph = group.device->capture(group.stream, work);
  for (int launch = 0; launch < kLaunches; ++launch) {
    Bytes want;
    for (int rank = 0; rank < c.size(); ++rank) {
      const Bytes slab = data_of(one.dtype, rank, launch, 1021);
      want.insert(want.end(), slab.begin(), slab.end());
    }
    for (std::int64_t i = 0; i < one.whole(); ++i) {
      const auto each = static_cast<float>(value_of(want, one.dtype, i));
      float sum = each;
      for (int rank = 1; rank < c.size(); ++rank) sum += each;
      put_value(want, one.dtype, i, static_cast<double>(sum));
    }
    buffers.write(group, buffers.in(), data_of(one.dtype, c.rank(), launch, 1021));
    graph->launch(group.stream);
    need_sums(buffers.read(group, buffers.out()), want, one, group, "a captured all_gather and all_reduce");
  }
  buffers.need_untouched(group);
  return kLaunches;
}

}  // namespace quern::conformance::collectives
