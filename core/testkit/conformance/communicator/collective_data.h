#pragma once
// Data of collectives: how they are cut among ranks, what each rank has, and how results are compared.

#include <numeric>
#include <string>
#include <vector>

#include "conformance/communicator/communicator_group.h"

namespace quern::conformance::collectives {

using Bytes = std::vector<std::uint8_t>;
using Sizes = std::vector<std::int64_t>;

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
std::vector<Case> cases(int size);
/// A rank's data: real numbers between -1 and 1, any bits of other dtypes; `salt` distinguishes cases.
Bytes data_of(DType dtype, int rank, int salt, std::int64_t count);
double value_of(const Bytes& bytes, DType dtype, std::int64_t at);
void put_value(Bytes& bytes, DType dtype, std::int64_t at, double value);
Bytes part(const Bytes& whole, const Case& one, std::int64_t begin, std::int64_t count);

void need_bytes(const Bytes& got, const Bytes& want, const Case& one, const std::string& what);
/// As need_bytes; sums of a communicator that has an order of its own may differ from the rank order's as much as any
/// order can: one unit roundoff of the sum of magnitudes for each rank.
void need_sums(const Bytes& got, const Bytes& want, const Case& one, const Joined& group, const std::string& what);

/// One rank in one case: two registered blocks, at an odd place of which the views begin.
class Buffers {
 public:
  Buffers(Joined& group, const Case& one, std::int64_t in_count, std::int64_t out_count)
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

}  // namespace quern::conformance::collectives
