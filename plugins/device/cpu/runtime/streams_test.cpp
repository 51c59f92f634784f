#include "runtime/streams.h"

#include <csignal>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <future>
#include <set>
#include <vector>

#include <doctest/doctest.h>

#include "quern/error.h"

using namespace quern;
using namespace quern::cpu;
using Mode = Streams::Mode;

namespace {

constexpr StreamKind kKinds[] = {StreamKind::compute, StreamKind::copy_in, StreamKind::copy_out,
                                 StreamKind::communication};
constexpr Mode kModes[] = {Mode::threads, Mode::shuffled};

/// Holds a stream until it is opened; with threads only.
class Gate {
 public:
  ~Gate() { open(); }
  void hold(Streams& streams, Stream stream) {
    streams.run(stream, [passed = passed_] { passed.wait(); });
  }
  void open() {
    if (!opened_) gate_.set_value();
    opened_ = true;
  }

 private:
  std::promise<void> gate_;
  std::shared_future<void> passed_ = gate_.get_future().share();
  bool opened_ = false;
};

/// The order in which ten pieces of work on each of the four streams run.
std::vector<int> shuffled_order(std::uint64_t seed) {
  Streams streams(Mode::shuffled, seed);
  std::vector<int> order;
  for (StreamKind kind : kKinds)
    for (int i = 0; i < 10; ++i)
      streams.run(streams.stream(kind), [&order, label = 10 * static_cast<int>(kind) + i] { order.push_back(label); });
  CHECK(order.empty());
  for (StreamKind kind : kKinds) streams.synchronize(streams.stream(kind));
  return order;
}

/// Copies that fork from one stream to two others and join again, in several rounds that reuse all memory; the bytes
/// at the end.
std::vector<char> copies(Streams& streams) {
  constexpr std::size_t kBytes = 64;
  std::vector<char> source(kBytes), left(kBytes), right(kBytes), sum(kBytes, 1), result;
  const Stream compute = streams.stream(StreamKind::compute), in = streams.stream(StreamKind::copy_in),
               out = streams.stream(StreamKind::copy_out);
  const Event written = streams.make_event(), left_done = streams.make_event(), right_done = streams.make_event();
  for (int round = 0; round < 3; ++round) {
    streams.run(compute, [&] {
      for (std::size_t i = 0; i < kBytes; ++i) source[i] = static_cast<char>(sum[i] * 3 + static_cast<char>(i));
    });
    streams.record(written, compute);
    streams.wait(in, written);
    streams.run(in, [&] { std::memcpy(left.data(), source.data(), kBytes); });
    streams.record(left_done, in);
    streams.wait(out, written);
    streams.run(out, [&] { std::reverse_copy(source.begin(), source.end(), right.begin()); });
    streams.record(right_done, out);
    streams.wait(compute, left_done);
    streams.wait(compute, right_done);
    streams.run(compute, [&] {
      for (std::size_t i = 0; i < kBytes; ++i) sum[i] = static_cast<char>(sum[i] + left[i] - 2 * right[i]);
    });
  }
  streams.synchronize(compute);
  return sum;
}

}  // namespace

TEST_CASE("work of one stream runs in order, and of no other than the device's") {
  for (Mode mode : kModes) {
    Streams streams(mode, 1);
    std::vector<int> order;
    for (int i = 0; i < 1000; ++i)
      streams.run(streams.stream(StreamKind::copy_in), [&order, i] { order.push_back(i); });
    streams.synchronize(streams.stream(StreamKind::copy_in));
    REQUIRE(order.size() == 1000);
    CHECK(std::is_sorted(order.begin(), order.end()));
    streams.synchronize(streams.stream(StreamKind::copy_out));  // never used
    CHECK_THROWS_AS(streams.run({}, [] {}), Error);
    Streams other(mode, 1);
    CHECK_THROWS_AS(streams.synchronize(other.stream(StreamKind::compute)), Error);
  }
}

TEST_CASE("a wait orders streams, also where the event is recorded again") {
  for (Mode mode : kModes)
    for (std::uint64_t seed = 0; seed < 100; ++seed) {
      Streams streams(mode, seed);
      const Stream a = streams.stream(StreamKind::compute), b = streams.stream(StreamKind::copy_in);
      const Event event = streams.make_event();
      int value = 0, first = -1, second = -1;
      streams.run(a, [&] { value = 1; });
      streams.record(event, a);
      streams.wait(b, event);
      streams.run(b, [&] { first = value; });
      streams.record(event, b);
      streams.wait(a, event);
      streams.run(a, [&] { value = 2; });
      streams.record(event, a);
      streams.wait(b, event);
      streams.run(b, [&] { second = value; });
      streams.synchronize(b);
      CHECK(first == 1);
      CHECK(second == 2);
    }
}

TEST_CASE("a wait is for the record made before it, not for a later one that is done first") {
  Streams streams(Mode::threads, 0);
  const Stream a = streams.stream(StreamKind::compute), b = streams.stream(StreamKind::copy_in),
               c = streams.stream(StreamKind::copy_out);
  const Event event = streams.make_event();
  Gate gate;
  std::atomic<bool> ran = false;
  bool waited = false;
  gate.hold(streams, a);
  streams.run(a, [&] { ran = true; });
  streams.record(event, a);
  streams.wait(c, event);
  streams.run(c, [&] { waited = ran; });
  streams.record(event, b);  // done at once
  streams.synchronize(event);
  CHECK_FALSE(ran);
  gate.open();
  streams.synchronize(c);
  CHECK(waited);
}

TEST_CASE("an event that was never recorded is done") {
  for (Mode mode : kModes) {
    Streams streams(mode, 0);
    const Stream stream = streams.stream(StreamKind::compute);
    const Event never = streams.make_event(), once = streams.make_event();
    bool ran = false;
    streams.synchronize(never);
    streams.wait(stream, never);
    streams.run(stream, [&] { ran = true; });
    streams.record(once, stream);
    if (mode == Mode::shuffled) CHECK_THROWS_AS(streams.elapsed(once, once), Error);  // not done
    streams.synchronize(stream);
    CHECK(ran);
    CHECK(streams.elapsed(once, once) == 0);
    CHECK_THROWS_AS(streams.elapsed(never, once), Error);
  }
}

TEST_CASE("elapsed time is that between the moments at which records ran") {
  Streams streams(Mode::threads, 0);
  const Stream stream = streams.stream(StreamKind::compute);
  const Event first = streams.make_event(), second = streams.make_event();
  streams.record(first, stream);
  streams.run(stream, [] { std::this_thread::sleep_for(std::chrono::milliseconds(20)); });
  streams.record(second, stream);  // enqueued at once
  streams.synchronize(second);
  CHECK(streams.elapsed(first, second) >= 20);
  CHECK(streams.elapsed(second, first) <= -20);
}

TEST_CASE("the host's wait for an event is not one for what comes after") {
  {
    Streams streams(Mode::threads, 0);
    const Stream stream = streams.stream(StreamKind::compute);
    const Event event = streams.make_event();
    Gate gate;
    bool ran = false;
    streams.run(stream, [&] { ran = true; });
    streams.record(event, stream);
    gate.hold(streams, stream);
    streams.synchronize(event);
    CHECK(ran);
  }
  for (std::uint64_t seed = 0; seed < 100; ++seed) {
    Streams streams(Mode::shuffled, seed);
    const Stream stream = streams.stream(StreamKind::compute);
    const Event event = streams.make_event();
    int ran = 0;
    streams.run(stream, [&] { ran = 1; });
    streams.record(event, stream);
    streams.run(stream, [&] { ran = 2; });
    streams.synchronize(event);
    CHECK(ran == 1);
  }
}

TEST_CASE("an exception is thrown by every later wait of the host, and nothing hangs") {
  for (Mode mode : kModes) {
    Streams streams(mode, 3);
    const Stream a = streams.stream(StreamKind::compute), b = streams.stream(StreamKind::copy_in);
    const Event event = streams.make_event();
    bool ran = false;
    auto kept = std::make_shared<int>();
    streams.run(a, [] { throw Error(ErrorCode::input, {.where = "first"}); });
    streams.run(a, [&ran, kept] { ran = true; });
    streams.run(a, [] { throw Error(ErrorCode::input, {.where = "second"}); });
    streams.record(event, a);
    streams.wait(b, event);
    streams.run(b, [&ran] { ran = true; });
    for (int again = 0; again < 2; ++again) {
      CHECK_THROWS_WITH_AS(streams.synchronize(b), "first", Error);
      CHECK_THROWS_WITH_AS(streams.synchronize(event), "first", Error);
      CHECK_THROWS_WITH_AS(streams.synchronize(streams.stream(StreamKind::communication)), "first", Error);
    }
    streams.drain();
    CHECK_FALSE(ran);
    CHECK(kept.use_count() == 1);
    streams.run(b, [&ran] { ran = true; });
    CHECK_THROWS_WITH_AS(streams.synchronize(b), "first", Error);
    CHECK_FALSE(ran);
  }
}

TEST_CASE("the destructor finishes all work") {
  for (Mode mode : kModes) {
    int ran = 0;
    {
      Streams streams(mode, 0);
      const Event event = streams.make_event();
      streams.run(streams.stream(StreamKind::compute), [&] { ++ran; });
      streams.record(event, streams.stream(StreamKind::compute));
      streams.wait(streams.stream(StreamKind::copy_in), event);
      streams.run(streams.stream(StreamKind::copy_in), [&] { ++ran; });
      streams.run(streams.stream(StreamKind::copy_in), [] { throw 1; });
    }
    CHECK(ran == 2);
  }
}

TEST_CASE("work that waits for a stream is an internal error, which says who waits for what") {
  {
    Streams streams(Mode::shuffled, 0);
    const Stream a = streams.stream(StreamKind::compute), b = streams.stream(StreamKind::copy_out);
    const Event event = streams.make_event();
    streams.run(a, [&] { streams.synchronize(b); });
    streams.record(event, a);
    streams.wait(b, event);
    streams.run(b, [] {});
    CHECK_THROWS_WITH_AS(streams.synchronize(a),
                         doctest::Contains("no stream can go on: compute is at work that waits for a stream, "
                                           "copy_out waits for a record on compute"),
                         Error);
  }
  Streams streams(Mode::threads, 0);
  const Stream a = streams.stream(StreamKind::compute);
  streams.run(a, [&] { streams.drain(); });  // as work does that gives memory back
  streams.synchronize(a);
  streams.run(a, [&] { streams.synchronize(streams.stream(StreamKind::copy_out)); });
  CHECK_THROWS_WITH_AS(streams.synchronize(a), doctest::Contains("work on a stream waits for a stream"), Error);
}

TEST_CASE("a seed is one order, and other seeds are others") {
  std::set<std::vector<int>> orders;
  for (std::uint64_t seed = 0; seed < 20; ++seed) {
    const std::vector<int> order = shuffled_order(seed);
    CHECK(order.size() == 40);
    CHECK(order == shuffled_order(seed));
    orders.insert(order);
  }
  CHECK(orders.size() == 20);
}

TEST_CASE("a thousand orders of a graph of copies give the same bytes") {
  Streams threads(Mode::threads, 0);
  const std::vector<char> want = copies(threads);
  for (std::uint64_t seed = 0; seed < 1000; ++seed) {
    Streams streams(Mode::shuffled, seed);
    REQUIRE(copies(streams) == want);
  }
}

TEST_CASE("what lacks a wait is found by some order") {
  int wrong = 0;
  for (std::uint64_t seed = 0; seed < 100; ++seed) {
    Streams streams(Mode::shuffled, seed);
    int value = 0, read = -1;
    streams.run(streams.stream(StreamKind::compute), [&] { value = 1; });
    streams.run(streams.stream(StreamKind::copy_out), [&] { read = value; });
    streams.synchronize(streams.stream(StreamKind::copy_out));
    wrong += read != 1;
  }
  CHECK(wrong > 20);
  CHECK(wrong < 80);
}

TEST_CASE("threads of streams are their own, and take no signals") {
  Streams streams(Mode::threads, 0);
  std::set<std::thread::id> threads{std::this_thread::get_id()};
  for (StreamKind kind : kKinds) {
    std::thread::id id;
    bool blocked = true;
    streams.run(streams.stream(kind), [&] {
      id = std::this_thread::get_id();
      sigset_t mask;
      ::pthread_sigmask(SIG_SETMASK, nullptr, &mask);
      for (int signal : {SIGINT, SIGTERM, SIGHUP, SIGUSR1, SIGXCPU}) blocked = blocked && ::sigismember(&mask, signal);
    });
    streams.synchronize(streams.stream(kind));
    CHECK(blocked);
    threads.insert(id);
  }
  CHECK(threads.size() == 5);
  sigset_t mask;
  ::pthread_sigmask(SIG_SETMASK, nullptr, &mask);
  CHECK_FALSE(::sigismember(&mask, SIGTERM));
}
