// Every collective against what it must give, computed on each rank from all ranks' inputs.
#include <algorithm>

#include "conformance/communicator/collective_hazards.h"

namespace quern::conformance {

namespace {

using namespace collectives;

constexpr double kLimit = 120;  // seconds, for all cases of a collective

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

/// All ranks have the same bits; in rank order they equal the host's already.
void need_same_on_all(const Bytes& got, const Case& one, Joined& group) {
  if (group.communicator->traits().sums_in_rank_order) return;
  for (const std::string& other : group.hosts.exchange(std::string(got.begin(), got.end())))
    need_bytes(got, Bytes(other.begin(), other.end()), one, "all_reduce, compared with another rank's");
}

// ---- one case of each collective, on one rank. Each is run twice on the same inputs: the same bits ----

void all_reduce(Joined& group, const Case& one, Reduction reduction) {
  Communicator& c = *group.communicator;
  const Bytes own = data_of(one.dtype, c.rank(), one.number, one.whole());
  const Bytes want = reduced(one, c.size(), reduction);
  Buffers buffers(group, one, one.whole(), 0);
  Bytes first;
  for (const bool again : {false, true}) {
    buffers.write(group, buffers.in(), own);
    c.all_reduce(buffers.in(), reduction, group.stream);
    const Bytes got = buffers.read(group, buffers.in());
    need_sums(got, want, one, group, "all_reduce");
    if (again) need_bytes(got, first, one, "a second all_reduce");
    first = got;
  }
  need_same_on_all(first, one, group);
  buffers.need_untouched(group);
}

void reduce_scatter(Joined& group, const Case& one) {
  Communicator& c = *group.communicator;
  const std::int64_t begin = one.before(c.rank()), count = one.counts[static_cast<std::size_t>(c.rank())];
  const Bytes own = data_of(one.dtype, c.rank(), one.number, one.whole());
  const Bytes want = part(reduced(one, c.size(), Reduction::sum), one, begin, count);
  Buffers buffers(group, one, one.whole(), count);
  const View out = one.in_place ? buffers.in(begin, count) : buffers.out();
  Bytes first;
  for (const bool again : {false, true}) {
    buffers.write(group, buffers.in(), own);
    c.reduce_scatter(buffers.in(), out, one.told(), Reduction::sum, group.stream);
    const Bytes got = buffers.read(group, out);
    need_sums(got, want, one, group, "reduce_scatter");
    if (again) need_bytes(got, first, one, "a second reduce_scatter");
    first = got;
    if (!one.in_place) need_bytes(buffers.read(group, buffers.in()), own, one, "the input of reduce_scatter");
  }
  buffers.need_untouched(group);
}

void all_gather(Joined& group, const Case& one) {
  Communicator& c = *group.communicator;
  const std::int64_t begin = one.before(c.rank()), count = one.counts[static_cast<std::size_t>(c.rank())];
  Bytes want;
  for (int rank = 0; rank < c.size(); ++rank) {
    const Bytes slab = data_of(one.dtype, rank, one.number, one.counts[static_cast<std::size_t>(rank)]);
    want.insert(want.end(), slab.begin(), slab.end());
  }
  Buffers buffers(group, one, count, one.whole());
  const View in = one.in_place ? buffers.out(begin, count) : buffers.in();
  buffers.write(group, in, part(want, one, begin, count));
  c.all_gather(in, buffers.out(), one.told(), group.stream);
  need_bytes(buffers.read(group, buffers.out()), want, one, "all_gather");
  buffers.need_untouched(group);
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
  Buffers buffers(group, one, most, received);
  const View in = buffers.in(0, row_of(self));
  const Bytes own = data_of(one.dtype, self, one.number, row_of(self));
  buffers.write(group, in, own);
  c.all_to_all(in, buffers.out(), one.equal ? Counts{} : Counts{counts}, group.stream);
  need_bytes(buffers.read(group, buffers.out()), want, one, "all_to_all");
  need_bytes(buffers.read(group, in), own, one, "the input of all_to_all");
  buffers.need_untouched(group);
}

void broadcast(Joined& group, const Case& one) {
  Communicator& c = *group.communicator;
  const int root = one.number % c.size();
  const Bytes want = data_of(one.dtype, root, one.number, one.whole());
  Buffers buffers(group, one, one.whole(), 0);
  buffers.write(group, buffers.in(), data_of(one.dtype, c.rank(), one.number, one.whole()));
  c.broadcast(buffers.in(), root, group.stream);
  need_bytes(buffers.read(group, buffers.in()), want, one, "broadcast from rank " + std::to_string(root));
  buffers.need_untouched(group);
}

/// Around a ring: rank 0 receives last.
void send_and_receive(Joined& group, const Case& one) {
  Communicator& c = *group.communicator;
  if (c.size() == 1) return;
  const int self = c.rank(), to = (self + 1) % c.size(), from = (self + c.size() - 1) % c.size();
  Buffers buffers(group, one, one.whole(), one.whole());
  buffers.write(group, buffers.in(), data_of(one.dtype, self, one.number, one.whole()));
  if (self == 0) c.send(buffers.in(), to, group.stream);
  c.receive(buffers.out(), from, group.stream);
  if (self != 0) c.send(buffers.in(), to, group.stream);
  need_bytes(buffers.read(group, buffers.out()), data_of(one.dtype, from, one.number, one.whole()), one,
             "receive from rank " + std::to_string(from));
  buffers.need_untouched(group);
}

bool sums(DType dtype) { return dtype == DType::f32 || dtype == DType::bf16 || dtype == DType::f64; }

template <class Work>
std::string in_groups(const Subject& subject, const std::vector<int>& sizes, const Work& work) {
  std::string detail;
  for (const int size : sizes) {
    const RankDirectory scratch(subject, size);
    const auto outcomes = run_all_ranks(size, kLimit, [&](int rank) {
      Joined group(subject, scratch.path(), rank, size);
      int count = 0;
      try {
        count = work(group);
      } catch (Broken& fault) {
        if (const auto error = group.communicator->error()) fault.got += " (error(): " + *error + ")";
        throw;
      }
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
  report.contract("buffers used again", [&] { return in_groups(subject, sizes, again_and_again); });
  report.contract("a root that is ahead", [&] { return in_groups(subject, sizes, root_ahead); });
  report.contract("captured", [&] { return in_groups(subject, sizes, captured); });
}

}  // namespace quern::conformance
