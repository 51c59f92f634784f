// Groups in which something goes wrong: the other ranks must get to know it, in time and by the name of the rank.
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <thread>

#include "conformance/communicator_group.h"

namespace quern::conformance {

namespace {

using Clock = std::chrono::steady_clock;

constexpr int kCulprit = 1;
constexpr double kPatience = 100;  // time-out of groups that must not have to wait for it, s
constexpr std::int64_t kCount = 1000;

/// A group in which something goes wrong, and its times in seconds.
struct Setting {
  const Subject& subject;
  int ranks;
  bool watched;    // by a watchdog here, for communicators that need one
  double timeout;  // of groups that have to wait for it
  double late;     // when their ranks have given up
  double soon;     // on a busy machine

  Setting(const Subject& about, int size) : subject(about), ranks(size) {
    watched = about.make<Communicator>()->traits().needs_watchdog;
    // GPUs and their libraries take seconds to start, not all the same. Asked in a process of its own: one that has
    // asked CUDA cannot fork ranks that use it.
    const auto host = run_all_ranks(1, 60, [&](int) -> std::string {
      return fresh_device(about.host, about.options.device)->traits().host_addressable ? "yes" : "no";
    });
    const bool starts_fast = host[0].text == "yes";
    timeout = starts_fast ? 1 : 8;
    late = 2.5 * timeout;
    soon = starts_fast ? 20 : 40;
  }
  double limit() const { return 2 * soon; }
};

void sleep(double seconds) { std::this_thread::sleep_for(std::chrono::duration<double>(seconds)); }

double since(Clock::time_point begin) { return std::chrono::duration<double>(Clock::now() - begin).count(); }

/// A member of a group that is about to sum a buffer.
struct Member {
  const Setting& setting;
  Joined group;
  Registered block;
  View view;

  Member(const Setting& given, const std::string& folder, int rank, double timeout)
      : setting(given),
        group(given.subject, folder, rank, given.ranks, timeout),
        block(group, kCount * 4),
        view{block.memory.data(), DType::f32, {kCount}} {}

  Communicator& communicator() { return *group.communicator; }
  void sum() { communicator().all_reduce(view, Reduction::sum, group.stream); }
  void good_sum() {
    group.device->fill(block.memory.data(), 0, block.memory.bytes(), group.stream);
    sum();
    group.device->synchronize(group.stream);
    need(!communicator().error(), "error() before anything goes wrong", communicator().error().value_or(""), "nothing");
  }
  /// Waits for the stream, which must go on, and returns the fault.
  std::string fault() {
    const auto begin = Clock::now();
    std::jthread watchdog;
    if (setting.watched)
      watchdog = std::jthread([this] {
        sleep(setting.timeout);
        communicator().abort();
      });
    group.device->synchronize(group.stream);
    need(since(begin) < setting.soon, "the stream with the collective that cannot be done", number(since(begin)) + " s",
         "less than " + number(setting.soon));
    const std::optional<std::string> fault = communicator().error();
    need(fault.has_value(), "error() after a collective that could not be done", "nothing", "a fault");
    return *fault;
  }
  /// After a fault calls do nothing and a barrier says so.
  void need_ended() {
    const auto begin = Clock::now();
    sum();
    group.device->synchronize(group.stream);
    need_refusal("barrier() after a fault", ErrorCode::communication, [&] { communicator().barrier(); });
    need(since(begin) < setting.soon, "a collective and a barrier after a fault", number(since(begin)) + " s",
         "less than " + number(setting.soon));
  }
};

/// Runs `culprit` on one rank and expects of the others that they name it; returns what one says.
std::string named(const Setting& setting, double timeout, const std::function<std::string(Member&)>& culprit) {
  const RankDirectory scratch(setting.subject, setting.ranks);
  const auto outcomes = run_ranks(setting.ranks, setting.limit(), [&](int rank) -> std::string {
    // Never destroyed: an end in good order is not what this is about.
    Member& member = *new Member(setting, scratch.path(), rank, timeout);
    member.good_sum();
    if (rank == kCulprit) return culprit(member);
    member.sum();
    std::string fault = member.fault();
    const std::string name = "rank " + std::to_string(kCulprit);
    need(setting.watched || fault.find(name) != std::string::npos, "error()", fault, "a text that names " + name);
    member.need_ended();
    return fault;
  });
  for (int rank = 0; rank < setting.ranks; ++rank) {
    const RankOutcome& outcome = outcomes[static_cast<std::size_t>(rank)];
    if (rank != kCulprit)
      need(outcome.kind == RankOutcome::Kind::returned, "rank " + std::to_string(rank), outcome.text,
           "the fault, and no exception");
  }
  return outcomes[0].text;
}

std::string late(const Setting& setting) {
  return named(setting, setting.timeout, [&](Member& member) -> std::string {
    sleep(setting.late);
    member.sum();
    member.fault();
    return "";
  });
}

std::string stopped(const Setting& setting) {
  return named(setting, setting.timeout, [](Member&) -> std::string {
    ::raise(SIGSTOP);
    return "";
  });
}

std::string killed(const Setting& setting) {
  return named(setting, kPatience, [](Member&) -> std::string {
    sleep(0.1);  // until the others wait
    ::raise(SIGKILL);
    return "";
  });
}

std::string aborted(const Setting& setting) {
  return named(setting, kPatience, [&](Member& member) -> std::string {
    Communicator& communicator = member.communicator();
    std::jthread other([&communicator] {
      sleep(0.1);
      communicator.abort();
    });
    const View half{member.view.data, DType::f32, {kCount / 2}};
    communicator.receive(half, (kCulprit + 1) % setting.ranks, member.group.stream);  // which that rank does not send
    std::string fault = member.fault();
    other.join();
    member.need_ended();
    return fault;
  });
}

/// A rank that does not come to the barrier, and one that does not connect.
std::string missing(const Setting& setting) {
  const double absent = 1.5 * setting.timeout;
  for (const bool comes : {true, false}) {
    const RankDirectory scratch(setting.subject, setting.ranks);
    const auto outcomes = run_ranks(setting.ranks, setting.limit(), [&](int rank) -> std::string {
      if (rank == kCulprit && !comes) {
        const HostGroup hosts(rank, setting.ranks, MeetingPoint::in(scratch.path(), "", true), setting.timeout);
        return sleep(absent), "";
      }
      Joined& group = *new Joined(setting.subject, scratch.path(), rank, setting.ranks, setting.timeout);
      if (rank == kCulprit) return sleep(absent), "";
      group.communicator->barrier();
      return "";
    });
    for (int rank = 0; rank < setting.ranks; ++rank) {
      const RankOutcome& outcome = outcomes[static_cast<std::size_t>(rank)];
      if (rank != kCulprit)
        need(outcome.kind == RankOutcome::Kind::threw && outcome.code == ErrorCode::communication,
             comes ? "barrier() without a rank" : "connect() without a rank", outcome.text, "a communication error");
    }
    if (!comes) return outcomes[0].text;
  }
  return "";
}

std::string refuses(const Setting& setting) {
  const RankDirectory scratch(setting.subject, 2);
  run_all_ranks(2, setting.soon, [&](int rank) -> std::string {
    Joined group(setting.subject, scratch.path(), rank, 2);
    const Registered block(group, kCount * 4);
    Communicator& c = *group.communicator;
    auto view = [&](DType dtype, std::int64_t count) { return View{block.memory.data(), dtype, {count}}; };
    auto refused = [&](const char* what, auto call) { need_refusal(what, ErrorCode::internal, call); };
    const std::int64_t counts[] = {3, 3};
    refused("a sum of i32", [&] { c.all_reduce(view(DType::i32, 8), Reduction::sum, group.stream); });
    refused("a maximum of bf16", [&] { c.all_reduce(view(DType::bf16, 8), Reduction::maximum, group.stream); });
    refused("slabs that do not fill the whole",
            [&] { c.all_gather(view(DType::u8, 3), view(DType::u8, 8), counts, group.stream); });
    refused("a slab of another size",
            [&] { c.reduce_scatter(view(DType::f32, 6), view(DType::f32, 4), counts, Reduction::sum, group.stream); });
    refused("a broadcast from no rank", [&] { c.broadcast(view(DType::u8, 3), 2, group.stream); });
    refused("a rank that sends to itself", [&] { c.send(view(DType::u8, 3), rank, group.stream); });
    c.barrier();
    need(!c.error(), "error() after calls that were refused", c.error().value_or(""), "nothing");
    return "";
  });
  return "6 calls";
}

}  // namespace

void check_communicator_faults(Report& report, const Subject& subject, int ranks) {
  auto add = [&](const char* name, auto contract) {
    report.contract(name, [&] { return contract(Setting(subject, ranks)); });
  };
  add("wrong calls", refuses);
  add("a rank that is late", late);
  add("a rank that is stopped", stopped);
  add("a rank that is killed", killed);
  add("a rank that aborts", aborted);
  add("a rank that is missing", missing);
}

}  // namespace quern::conformance
