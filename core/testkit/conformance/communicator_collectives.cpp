// Every collective against what it must give, computed on each rank from all ranks' inputs.
#include <unistd.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>

#include "conformance/communicator_group.h"
#include "quern/numeric.h"

namespace quern::conformance {

namespace {

using Bytes = std::vector<std::uint8_t>;
using Sizes = std::vector<std::int64_t>;

constexpr double kLimit = 120;            // seconds, for all cases of a collective
constexpr std::int64_t kLarge = 1300021;  // elements, more than staging holds
constexpr DType kDtypes[] = {DType::f64, DType::f32, DType::bf16, DType::e4m3, DType::e5m2, DType::i8,
                             DType::u8,  DType::u16, DType::i32,  DType::u32,  DType::i64};

/// How a whole is cut among the ranks.
struct Case {
  DType dtype;
  Sizes counts;
  bool equal = false;  // the communicator is not told the counts
  bool in_place = false;
  int number = 0;

  std::int64_t whole() const { return std::accumulate(counts.begin(), counts.end(), std::int64_t{0}); }
  Counts told() const { return equal ? Counts{} : Counts{counts}; }
  std::int64_t before(int rank) const {
    return std::accumulate(counts.begin(), counts.begin() + rank, std::int64_t{0});
  }
  std::string text() const {
    std::string text;
    for (const std::int64_t count : counts) text += (text.empty() ? "" : " + ") + std::to_string(count);
    return text + " elements of " + std::string(name_of(dtype)) + (in_place ? ", in place" : "");
  }
};

/// Odd and prime sizes, none, and some larger than staging; slabs of all sizes, alone, rising and empty; every dtype.
std::vector<Case> cases(int size) {
  std::vector<Case> all;
  auto add = [&](DType dtype, Sizes counts, bool equal) {
    for (const bool in_place : {false, true})
      all.push_back({dtype, counts, equal, in_place, static_cast<int>(all.size())});
  };
  const auto ranks = static_cast<std::size_t>(size);
  for (const std::int64_t count :
       {std::int64_t{0}, std::int64_t{1}, std::int64_t{7}, std::int64_t{4099}, kLarge / size + 1})
    add(DType::f32, Sizes(ranks, count), true);
  for (const DType dtype : kDtypes) {
    add(dtype, Sizes(ranks, 127), true);
    Sizes rising, last(ranks, 0);
    for (std::int64_t rank = 0; rank < size; ++rank) rising.push_back(3 * rank + 1);
    last.back() = 257;
    add(dtype, rising, false);
    add(dtype, last, false);
  }
  add(DType::bf16, {Sizes(ranks, 0)}, false);
  return all;
}

/// A rank's data: real numbers between -1 and 1, any bits of other dtypes; `salt` distinguishes cases.
Bytes data_of(DType dtype, int rank, int salt, std::int64_t count) {
  Bytes bytes(static_cast<std::size_t>(count) * size_of(dtype));
  std::uint64_t state = 0x9e3779b97f4a7c15 * static_cast<std::uint64_t>(1 + rank + 100 * salt);
  auto next = [&state] {  // splitmix64
    std::uint64_t word = state += 0x9e3779b97f4a7c15;
    word = (word ^ (word >> 30)) * 0xbf58476d1ce4e5b9;
    word = (word ^ (word >> 27)) * 0x94d049bb133111eb;
    return word ^ (word >> 31);
  };
  for (std::int64_t i = 0; i < count; ++i) {
    const std::uint64_t word = next();
    const double real = static_cast<double>(static_cast<std::int64_t>(word)) * 0x1p-63;
    const auto single = static_cast<float>(real);
    const std::uint16_t half = float_to_bf16(single);
    const void* from = dtype == DType::f64    ? static_cast<const void*>(&real)
                       : dtype == DType::f32  ? static_cast<const void*>(&single)
                       : dtype == DType::bf16 ? static_cast<const void*>(&half)
                                              : static_cast<const void*>(&word);
    std::memcpy(bytes.data() + static_cast<std::size_t>(i) * size_of(dtype), from, size_of(dtype));
  }
  return bytes;
}

double value_of(const Bytes& bytes, DType dtype, std::int64_t at) {
  const std::uint8_t* from = bytes.data() + static_cast<std::size_t>(at) * size_of(dtype);
  double real = 0;
  float single = 0;
  std::uint16_t half = 0;
  if (dtype == DType::f64) return std::memcpy(&real, from, sizeof real), real;
  if (dtype == DType::f32) return std::memcpy(&single, from, sizeof single), single;
  return std::memcpy(&half, from, sizeof half), bf16_to_float(half);
}

void put_value(Bytes& bytes, DType dtype, std::int64_t at, double value) {
  std::uint8_t* to = bytes.data() + static_cast<std::size_t>(at) * size_of(dtype);
  const auto single = static_cast<float>(value);
  const std::uint16_t half = float_to_bf16(single);
  std::memcpy(to,
              dtype == DType::f64   ? static_cast<const void*>(&value)
              : dtype == DType::f32 ? static_cast<const void*>(&single)
                                    : static_cast<const void*>(&half),
              size_of(dtype));
}

/// The whole of all ranks, in rank order, in fp32 (f64: in f64), rounded once.
Bytes reduced(const Case& one, int size, Reduction reduction) {
  Bytes result = data_of(one.dtype, 0, one.number, one.whole());
  std::vector<Bytes> others;
  for (int rank = 1; rank < size; ++rank) others.push_back(data_of(one.dtype, rank, one.number, one.whole()));
  for (std::int64_t i = 0; i < one.whole(); ++i) {
    double total = value_of(result, one.dtype, i);
    for (const Bytes& other : others) {
      const double value = value_of(other, one.dtype, i);
      const double sum = total + value;
      total = reduction == Reduction::maximum ? std::max(total, value)
              : one.dtype == DType::f64       ? sum
                                        : static_cast<double>(static_cast<float>(total) + static_cast<float>(value));
    }
    put_value(result, one.dtype, i, total);
  }
  return result;
}

void need_bytes(const Bytes& got, const Bytes& want, const Case& one, const std::string& what) {
  if (got == want) return;
  std::size_t at = 0;
  while (at < got.size() && got[at] == want[at]) ++at;
  const auto element = static_cast<std::int64_t>(at / size_of(one.dtype));
  auto shown = [&](const Bytes& bytes) {
    if (one.dtype == DType::f64 || one.dtype == DType::f32 || one.dtype == DType::bf16) {
      char text[40];
      std::snprintf(text, sizeof text, "%.9g", value_of(bytes, one.dtype, element));
      return std::string(text);
    }
    return "byte " + std::to_string(bytes[at]);
  };
  broken(what + " of " + one.text() + ", element " + std::to_string(element), shown(got), shown(want));
}

/// As need_bytes; sums of a communicator that has an order of its own may differ from the rank order's as much as any
/// order can: one unit roundoff of the sum of magnitudes for each rank.
void need_sums(const Bytes& got, const Bytes& want, const Case& one, const Joined& group, const std::string& what) {
  if (group.communicator->traits().sums_in_rank_order) return need_bytes(got, want, one, what);
  const int size = group.communicator->size();
  const double roundoff = one.dtype == DType::f64 ? 0x1p-52 : one.dtype == DType::f32 ? 0x1p-23 : 0x1p-7;
  for (std::size_t i = 0; i < got.size() / size_of(one.dtype); ++i) {
    const double sum = value_of(got, one.dtype, static_cast<std::int64_t>(i));
    const double fair = value_of(want, one.dtype, static_cast<std::int64_t>(i));
    if (!(std::abs(sum - fair) <= roundoff * size * size))
      broken(what + " of " + one.text() + ", element " + std::to_string(i), std::to_string(sum), std::to_string(fair));
  }
}

/// All ranks have the same bits; in rank order they equal the host's already.
void need_same_on_all(const Bytes& got, const Case& one, Joined& group) {
  if (group.communicator->traits().sums_in_rank_order) return;
  for (const std::string& other : group.hosts.exchange(std::string(got.begin(), got.end())))
    need_bytes(got, Bytes(other.begin(), other.end()), one, "all_reduce, compared with another rank's");
}

Bytes part(const Bytes& whole, const Case& one, std::int64_t begin, std::int64_t count) {
  const auto first = whole.begin() + begin * static_cast<std::int64_t>(size_of(one.dtype));
  return {first, first + count * static_cast<std::int64_t>(size_of(one.dtype))};
}

/// One rank in one case: two registered blocks, at an odd place of which the views begin.
class Trial {
 public:
  Trial(Joined& group, const Case& one, std::int64_t in_count, std::int64_t out_count)
      : one_(one),
        in_(group, bytes(in_count + kOdd)),
        out_(group, bytes(out_count + kOdd)),
        in_count_(in_count),
        out_count_(out_count) {}

  View in(std::int64_t begin, std::int64_t count) const { return view(in_.memory, begin, count); }
  View out(std::int64_t begin, std::int64_t count) const { return view(out_.memory, begin, count); }
  View in() const { return in(0, in_count_); }
  View out() const { return out(0, out_count_); }

  void write(Joined& group, const View& to, const Bytes& from) const {
    group.device->copy(to.data, from.data(), from.size(), group.stream);
    group.device->synchronize(group.stream);
  }
  Bytes read(Joined& group, const View& from) const {
    Bytes got(from.bytes());
    group.device->copy(got.data(), from.data, got.size(), group.stream);
    group.device->synchronize(group.stream);
    return got;
  }
  /// Nothing was written beside the views.
  void need_untouched(Joined& group) const {
    const std::string touched = in_.memory.touched() + out_.memory.touched();
    need(touched.empty(), one_.text(), "bytes written " + touched + " a buffer", "none");
    for (const View& odd : {in(-kOdd, kOdd), out(-kOdd, kOdd)})
      need(read(group, odd) == Bytes(odd.bytes(), 0xFF), one_.text(), "bytes written before a view", "none");
  }

 private:
  static constexpr std::int64_t kOdd = 3;  // elements before a view

  std::size_t bytes(std::int64_t count) const { return static_cast<std::size_t>(count) * size_of(one_.dtype); }
  View view(const testkit::DeviceMemory& memory, std::int64_t begin, std::int64_t count) const {
    return {static_cast<char*>(memory.data()) + bytes(begin + kOdd), one_.dtype, {count}};
  }

  const Case& one_;
  Registered in_, out_;
  std::int64_t in_count_, out_count_;
};

// ---- one case of each collective, on one rank. Each is run twice on the same inputs: the same bits ----

void all_reduce(Joined& group, const Case& one, Reduction reduction) {
  Communicator& c = *group.communicator;
  const Bytes own = data_of(one.dtype, c.rank(), one.number, one.whole());
  const Bytes want = reduced(one, c.size(), reduction);
  Trial trial(group, one, one.whole(), 0);
  Bytes first;
  for (const bool again : {false, true}) {
    trial.write(group, trial.in(), own);
    c.all_reduce(trial.in(), reduction, group.stream);
    const Bytes got = trial.read(group, trial.in());
    need_sums(got, want, one, group, "all_reduce");
    if (again) need_bytes(got, first, one, "a second all_reduce");
    first = got;
  }
  need_same_on_all(first, one, group);
  trial.need_untouched(group);
}

void reduce_scatter(Joined& group, const Case& one) {
  Communicator& c = *group.communicator;
  const std::int64_t begin = one.before(c.rank()), count = one.counts[static_cast<std::size_t>(c.rank())];
  const Bytes own = data_of(one.dtype, c.rank(), one.number, one.whole());
  const Bytes want = part(reduced(one, c.size(), Reduction::sum), one, begin, count);
  Trial trial(group, one, one.whole(), count);
  const View out = one.in_place ? trial.in(begin, count) : trial.out();
  Bytes first;
  for (const bool again : {false, true}) {
    trial.write(group, trial.in(), own);
    c.reduce_scatter(trial.in(), out, one.told(), Reduction::sum, group.stream);
    const Bytes got = trial.read(group, out);
    need_sums(got, want, one, group, "reduce_scatter");
    if (again) need_bytes(got, first, one, "a second reduce_scatter");
    first = got;
    if (!one.in_place) need_bytes(trial.read(group, trial.in()), own, one, "the input of reduce_scatter");
  }
  trial.need_untouched(group);
}

void all_gather(Joined& group, const Case& one) {
  Communicator& c = *group.communicator;
  const std::int64_t begin = one.before(c.rank()), count = one.counts[static_cast<std::size_t>(c.rank())];
  Bytes want;
  for (int rank = 0; rank < c.size(); ++rank) {
    const Bytes slab = data_of(one.dtype, rank, one.number, one.counts[static_cast<std::size_t>(rank)]);
    want.insert(want.end(), slab.begin(), slab.end());
  }
  Trial trial(group, one, count, one.whole());
  const View in = one.in_place ? trial.out(begin, count) : trial.in();
  trial.write(group, in, part(want, one, begin, count));
  c.all_gather(in, trial.out(), one.told(), group.stream);
  need_bytes(trial.read(group, trial.out()), want, one, "all_gather");
  trial.need_untouched(group);
}

void all_to_all(Joined& group, const Case& one) {
  Communicator& c = *group.communicator;
  const int size = c.size(), self = c.rank();
  Sizes counts;  // another sum in each row and column
  for (int from = 0; from < size; ++from)
    for (int to = 0; to < size; ++to)
      counts.push_back(one.equal ? one.counts[0] : one.counts[static_cast<std::size_t>((from + 2 * to) % size)] + from);
  auto of = [&](int from, int to) { return counts[static_cast<std::size_t>(from * size + to)]; };
  auto row_of = [&](int from) {
    std::int64_t row = 0;
    for (int to = 0; to < size; ++to) row += of(from, to);
    return row;
  };
  Bytes want;
  std::int64_t most = 0;
  for (int from = 0; from < size; ++from) {
    std::int64_t begin = 0;
    for (int to = 0; to < self; ++to) begin += of(from, to);
    const Bytes slab = part(data_of(one.dtype, from, one.number, row_of(from)), one, begin, of(from, self));
    want.insert(want.end(), slab.begin(), slab.end());
    most = std::max(most, row_of(from));
  }
  const auto received = static_cast<std::int64_t>(want.size() / size_of(one.dtype));
  Trial trial(group, one, most, received);
  const View in = trial.in(0, row_of(self));
  const Bytes own = data_of(one.dtype, self, one.number, row_of(self));
  trial.write(group, in, own);
  c.all_to_all(in, trial.out(), one.equal ? Counts{} : Counts{counts}, group.stream);
  need_bytes(trial.read(group, trial.out()), want, one, "all_to_all");
  need_bytes(trial.read(group, in), own, one, "the input of all_to_all");
  trial.need_untouched(group);
}

void broadcast(Joined& group, const Case& one) {
  Communicator& c = *group.communicator;
  const int root = one.number % c.size();
  const Bytes want = data_of(one.dtype, root, one.number, one.whole());
  Trial trial(group, one, one.whole(), 0);
  trial.write(group, trial.in(), data_of(one.dtype, c.rank(), one.number, one.whole()));
  c.broadcast(trial.in(), root, group.stream);
  need_bytes(trial.read(group, trial.in()), want, one, "broadcast from rank " + std::to_string(root));
  trial.need_untouched(group);
}

/// Around a ring: rank 0 receives last.
void send_and_receive(Joined& group, const Case& one) {
  Communicator& c = *group.communicator;
  if (c.size() == 1) return;
  const int self = c.rank(), to = (self + 1) % c.size(), from = (self + c.size() - 1) % c.size();
  Trial trial(group, one, one.whole(), one.whole());
  trial.write(group, trial.in(), data_of(one.dtype, self, one.number, one.whole()));
  if (self == 0) c.send(trial.in(), to, group.stream);
  c.receive(trial.out(), from, group.stream);
  if (self != 0) c.send(trial.in(), to, group.stream);
  need_bytes(trial.read(group, trial.out()), data_of(one.dtype, from, one.number, one.whole()), one,
             "receive from rank " + std::to_string(from));
  trial.need_untouched(group);
}

/// NaN of any one rank is in the maximum, beside infinities and negative numbers; elsewhere it is the largest.
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
  Trial trial(group, one, whole, kCount);
  trial.write(group, trial.in(), own);
  c.reduce_scatter(trial.in(), trial.out(), {}, Reduction::maximum, group.stream);
  need_maxima(trial.read(group, trial.out()), begin, "reduce_scatter of maxima");
  c.all_reduce(trial.in(), Reduction::maximum, group.stream);
  need_maxima(trial.read(group, trial.in()), 0, "all_reduce of maxima");
  trial.need_untouched(group);
  return 2;
}

/// Buffers are written again at once, while alternating ranks are ahead of each other.
void again_and_again(Joined& group) {
  constexpr int kRounds = 60;
  Communicator& c = *group.communicator;
  Device& device = *group.device;
  const Case one{.dtype = DType::u8, .counts = Sizes(static_cast<std::size_t>(c.size()), 1021), .equal = true};
  Trial trial(group, one, 1021, one.whole());
  for (int round = 0; round < kRounds; ++round) {
    auto byte = [round](int rank) { return static_cast<std::uint8_t>(1 + round * 4 + rank); };
    if (round % c.size() == c.rank() && round % 3 == 0) ::usleep(2000);
    device.fill(trial.in().data, byte(c.rank()), trial.in().bytes(), group.stream);
    c.all_gather(trial.in(), trial.out(), {}, group.stream);
    device.fill(trial.in().data, 0, trial.in().bytes(), group.stream);
    const Bytes got = trial.read(group, trial.out());
    device.fill(trial.out().data, 0, trial.out().bytes(), group.stream);
    for (int rank = 0; rank < c.size(); ++rank)
      need(std::count(got.begin() + rank * 1021, got.begin() + (rank + 1) * 1021, byte(rank)) == 1021,
           "rank " + std::to_string(rank) + "'s slab in round " + std::to_string(round), "other bytes",
           std::to_string(byte(rank)));
  }
}

/// The root does not wait for the others, which come late to each broadcast; sizes for which libraries have ways of
/// their own.
void root_ahead(Joined& group) {
  constexpr int kRounds = 16;
  Communicator& c = *group.communicator;
  for (const std::int64_t bytes : {std::int64_t{1021}, std::int64_t{2} << 20}) {
    const Case one{.dtype = DType::u8, .counts = {bytes}, .equal = true};
    Trial trial(group, one, bytes, 0);
    for (int root = 0; root < c.size(); ++root)
      for (int round = 0; round < kRounds; ++round) {
        const auto byte = static_cast<std::uint8_t>(1 + root * kRounds + round);
        if (c.rank() == root)
          group.device->fill(trial.in().data, byte, trial.in().bytes(), group.stream);
        else
          ::usleep(1000);
        c.broadcast(trial.in(), root, group.stream);
        if (c.rank() == root) continue;
        const Bytes got = trial.read(group, trial.in());
        need(std::count(got.begin(), got.end(), byte) == bytes,
             std::to_string(bytes) + " bytes from rank " + std::to_string(root) + " in round " + std::to_string(round),
             "other bytes", std::to_string(byte));
      }
  }
}

/// A graph of collectives, launched again and again on other data; 0: these cannot be captured.
int captured(Joined& group) {
  constexpr int kLaunches = 3;
  Communicator& c = *group.communicator;
  if (!c.traits().can_capture || !group.device->traits().can_capture) return 0;
  const Case one{.dtype = DType::f32, .counts = Sizes(static_cast<std::size_t>(c.size()), 1021), .equal = true};
  Trial trial(group, one, 1021, one.whole());
  auto work = [&] {
    c.all_gather(trial.in(), trial.out(), {}, group.stream);
    c.all_reduce(trial.out(), Reduction::sum, group.stream);
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
    trial.write(group, trial.in(), data_of(one.dtype, c.rank(), launch, 1021));
    graph->launch(group.stream);
    need_sums(trial.read(group, trial.out()), want, one, group, "a captured all_gather and all_reduce");
  }
  trial.need_untouched(group);
  return kLaunches;
}

bool sums(DType dtype) { return dtype == DType::f32 || dtype == DType::bf16 || dtype == DType::f64; }

template <class Work>
std::string in_groups(const Subject& subject, const std::vector<int>& sizes, const Work& work) {
  std::string detail;
  for (const int size : sizes) {
    const RankDirectory scratch(subject, size);
    const auto outcomes = run_all_ranks(size, kLimit, [&](int rank) {
      Joined group(subject, scratch.path(), rank, size);
      const int count = work(group);
      group.communicator->barrier();
      if (auto fault = group.communicator->error()) broken("error() afterwards", *fault, "nothing");
      return std::to_string(count) + " cases";
    });
    detail += (detail.empty() ? "ranks: " : ", ") + std::to_string(size);
    if (size == sizes.back()) detail += "; " + outcomes[0].text;
  }
  return detail;
}

}  // namespace

void check_collectives(Report& report, const Subject& subject, const std::vector<int>& sizes) {
  auto add = [&](const char* name, auto takes, auto run) {
    report.contract(name, [&] {
      return in_groups(subject, sizes, [&](Joined& group) {
        int count = 0;
        for (const Case& one : cases(group.communicator->size()))
          if (takes(one)) run(group, one), ++count;
        return count;
      });
    });
  };
  auto summed = [](const Case& one) { return sums(one.dtype); };
  auto apart = [](const Case& one) { return !one.in_place; };
  add(
      "all_reduce sum", [&](const Case& one) { return summed(one) && apart(one); },
      [](Joined& group, const Case& one) { all_reduce(group, one, Reduction::sum); });
  add(
      "all_reduce maximum", [&](const Case& one) { return one.dtype == DType::f32 && apart(one); },
      [](Joined& group, const Case& one) { all_reduce(group, one, Reduction::maximum); });
  report.contract("NaN in a maximum", [&] { return in_groups(subject, sizes, maximum_of_nan); });
  add("reduce_scatter", summed, reduce_scatter);
  add(
      "all_gather", [](const Case&) { return true; }, all_gather);
  add("all_to_all", apart, all_to_all);
  add("broadcast", apart, broadcast);
  add("send and receive", apart, send_and_receive);
  report.contract("buffers used again",
                  [&] { return in_groups(subject, sizes, [](Joined& group) { return again_and_again(group), 1; }); });
  report.contract("a root that is ahead",
                  [&] { return in_groups(subject, sizes, [](Joined& group) { return root_ahead(group), 1; }); });
  report.contract("captured", [&] { return in_groups(subject, sizes, captured); });
}

}  // namespace quern::conformance
