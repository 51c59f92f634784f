#include "bench/comm.h"

#include <algorithm>
#include <functional>
#include <limits>
#include <memory>

#include "base/median.h"
#include "bench/random_product.h"
#include "bench/throttled_device.h"
#include "quern/error.h"

namespace quern::bench {

namespace {

constexpr double kEnough = 0.2;  // seconds of samples of one collective at one size
constexpr int kMostSamples = 50, kLeastSamples = 5;

/// A registered buffer that goes when this does.
class Shared {
 public:
  Shared(Device& device, Communicator& communicator, std::int64_t bytes)
      : device_(device),
        communicator_(communicator),
        data_(device.allocate(MemoryKind::device, static_cast<std::size_t>(bytes))) {
    const Stream stream = device.stream(StreamKind::communication);
    device.fill(data_, 0, static_cast<std::size_t>(bytes), stream);
    device.synchronize(stream);
    communicator.register_buffer(data_, static_cast<std::size_t>(bytes));
  }
  ~Shared() {
    try {
      communicator_.unregister_buffer(data_);
    } catch (...) {  // the group is over: reported elsewhere
    }
    device_.release(MemoryKind::device, data_);
  }
  Shared(const Shared&) = delete;
  Shared& operator=(const Shared&) = delete;
  View view(std::int64_t from, std::int64_t bytes) const {
    return {static_cast<char*>(data_) + from, DType::f32, {bytes / 4}};
  }

 private:
  Device& device_;
  Communicator& communicator_;
  void* data_;
};

/// One call, and the share of the whole that crosses a rank's link one way.
struct Collective {
  const char* name;
  std::function<double(double ranks)> crossing;
  std::function<void(const Shared& buffer, std::int64_t own, Stream stream)> call;
};

constexpr std::size_t kGather = 2;  // among them

std::vector<Collective> collectives(Communicator& group) {
  const std::int64_t ranks = group.size(), rank = group.rank();
  auto whole = [ranks](const Shared& buffer, std::int64_t own) { return buffer.view(0, own * ranks); };
  auto part = [rank](const Shared& buffer, std::int64_t own) { return buffer.view(own * rank, own); };
  auto others = [](double count) { return (count - 1) / count; };
  const int next = static_cast<int>((rank + 1) % ranks), before = static_cast<int>((rank + ranks - 1) % ranks);
  return {
      {"all_reduce", [=](double count) { return 2 * others(count); },
       [=, &group](const Shared& b, std::int64_t own, Stream s) {
         group.all_reduce(whole(b, own), Reduction::sum, s);
       }},
      {"reduce_scatter", others,
       [=, &group](const Shared& b, std::int64_t own, Stream s) {
         group.reduce_scatter(whole(b, own), part(b, own), {}, Reduction::sum, s);
       }},
      {"all_gather", others,
       [=, &group](const Shared& b, std::int64_t own, Stream s) {
         group.all_gather(part(b, own), whole(b, own), {}, s);
       }},
      {"all_to_all", others,
       [=, &group](const Shared& b, std::int64_t own, Stream s) {
         group.all_to_all(whole(b, own), b.view(own * ranks, own * ranks), {}, s);
       }},
      {"broadcast", [](double) { return 1.0; },
       [=, &group](const Shared& b, std::int64_t own, Stream s) { group.broadcast(whole(b, own), 0, s); }},
      // Round the ring; even ranks send first, so that one of a pair receives.
      {"send_receive", [](double count) { return 1 / count; },
       [=, &group](const Shared& b, std::int64_t own, Stream s) {
         if (rank % 2 == 0) group.send(b.view(0, own), next, s);
         group.receive(b.view(own * ranks, own), before, s);
         if (rank % 2 == 1) group.send(b.view(0, own), next, s);
       }},
  };
}

/// A number that the ranks give, the largest of all.
double slowest(Ranks& ranks, double own) {
  double most = -std::numeric_limits<double>::infinity();
  for (const std::string& text : ranks.exchange(std::to_string(own * 1e9))) most = std::max(most, std::stod(text));
  return most / 1e9;
}

double seconds_of(Device& device, Ranks& ranks, const std::function<void(Stream)>& call) {
  const Stream stream = device.stream(StreamKind::communication);
  const Event begin = device.make_event(), end = device.make_event();
  auto once = [&] {
    ranks.exchange({});  // so that all begin together
    device.record(begin, stream);
    call(stream);
    device.record(end, stream);
    device.synchronize(stream);
    ranks.check("bench comm");
    return device.elapsed(begin, end) / 1e3;
  };
  once();
  const double first = slowest(ranks, once());  // all ranks take as many samples
  const int samples = std::clamp(static_cast<int>(kEnough / std::max(first, 1e-9)), kLeastSamples, kMostSamples);
  std::vector<double> times;
  for (int i = 0; i < samples; ++i) times.push_back(once());
  return slowest(ranks, median_of(times));
}

double clock_of(Device& device) {
  for (const Reading& reading : device.telemetry().readings)
    if (reading.name == "sm_clock") return reading.value;
  return 0;
}

/// A matmul with nothing beside it and with gathers that begin before it and end behind it, alternately; medians.
ProductBeside product_beside(Device& device, Ranks& ranks, RandomProduct& product,
                             const std::function<void()>& gather) {
  constexpr double kTurn = 0.2;  // seconds, where that is no more than 40 matmuls
  constexpr int kRounds = 7;
  const Stream compute = device.stream(StreamKind::compute), moving = device.stream(StreamKind::communication);
  Event begin = device.make_event(), end = device.make_event(), first = device.make_event(), last = device.make_event();
  int products = 2;
  struct Sample {
    double seconds, clock;
  };
  auto run = [&](int gathers) {
    ranks.exchange({});  // so that gathers of all ranks begin together
    device.record(begin, moving);
    for (int i = 0; i < gathers; ++i) gather();
    device.record(end, moving);
    device.record(first, compute);
    for (int i = 0; i < products / 2; ++i) product.launch();
    const Event middle = device.make_event();
    device.record(middle, compute);
    for (int i = products / 2; i < products; ++i) product.launch();
    device.record(last, compute);
    device.synchronize(middle);
    const double clock = clock_of(device);
    device.synchronize(moving);
    device.synchronize(compute);
    ranks.check("bench comm");
    return Sample{device.elapsed(first, last) / 1e3 / products, clock};
  };
  run(0);  // loads the matmul
  products = static_cast<int>(std::clamp(kTurn / std::max(slowest(ranks, run(0).seconds), 1e-9), 2.0, 40.0));
  run(10);  // clocks rise
  const double one = slowest(ranks, device.elapsed(begin, end) / 1e4), estimate = slowest(ranks, run(0).seconds);
  const int gathers = static_cast<int>(2 * products * estimate / std::max(one, 1e-6)) + 1;
  ProductBeside result{.covered = true};
  std::vector<double> times[2], clocks[2], cycles;
  for (int round = 0; round < kRounds; ++round) {
    const Sample alone = run(0), beside = run(gathers);
    result.covered = result.covered && device.elapsed(begin, end) >= device.elapsed(begin, last);
    for (const bool is_beside : {false, true}) {
      times[is_beside].push_back((is_beside ? beside : alone).seconds);
      clocks[is_beside].push_back((is_beside ? beside : alone).clock);
    }
    cycles.push_back(alone.clock > 0 ? beside.seconds * beside.clock / (alone.seconds * alone.clock) : 0);
  }
  result.alone = slowest(ranks, median_of(times[0]));
  result.beside = slowest(ranks, median_of(times[1]));
  result.clock_alone = -slowest(ranks, -median_of(clocks[0]));
  result.clock_beside = -slowest(ranks, -median_of(clocks[1]));
  result.at_equal_clocks = slowest(ranks, median_of(cycles));
  return result;
}

}  // namespace

CommBenchResult run_comm_bench(Session& session, Ranks& ranks, const CommBenchOptions& options) {
  Device& own = *session.device;
  ranks.open(own, session.device_options.ordinal);
  std::shared_ptr<Device> device(&own, [](Device*) {});
  if (options.throttle > 0) device = std::make_shared<ThrottledDevice>(device, options.throttle);
  Communicator& group = *session.communicator;
  ranks.connect(group, *device);
  CommBenchResult result;
  result.communicator = group.traits().id;
  result.ranks = ranks.size();
  result.link_rate = options.throttle > 0 ? options.throttle : own.traits().peer_rate;
  const std::int64_t most = *std::max_element(options.sizes.begin(), options.sizes.end());
  const Shared buffer(*device, group, 2 * most * ranks.size());
  const std::vector<Collective> all = collectives(group);
  auto print = [&](const std::string& text) {
    if (ranks.leads()) options.print(text);
  };
  print(comm_table_head(result, own.traits()));
  for (const Collective& collective : all)
    for (const std::int64_t size : options.sizes) {
      const double seconds = seconds_of(*device, ranks, [&](Stream stream) { collective.call(buffer, size, stream); });
      const auto bytes = static_cast<double>(size * ranks.size());
      result.times.push_back({collective.name, size * ranks.size(), seconds,
                              bytes * collective.crossing(static_cast<double>(ranks.size())) / seconds});
      print(comm_table_line(result, result.times.back()));
    }
  if (const OpInstance op = product_op(large_product(*device, DType::bf16)); device->query(op).refusal.empty()) {
    RandomProduct product(*device, op);
    const Stream stream = device->stream(StreamKind::communication);
    result.product = product_beside(*device, ranks, product, [&] { all[kGather].call(buffer, most, stream); });
    print(comm_table_end(*result.product));
  }
  group.barrier();
  return result;
}

}  // namespace quern::bench
