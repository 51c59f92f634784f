// Groups in which something goes wrong: the other ranks must get to know it, in time and by the name of the rank.
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <thread>

#include "conformance/communicator/communicator_group.h"

namespace quern::conformance {

namespace {

using Clock = std::chrono::steady_clock;

constexpr int kCulprit = 1;
constexpr double kPatience = 100;  // time-out of groups that need not wait for it, s
constexpr std::int64_t kCount = 1000;

/// A group in which something goes wrong, and its times in seconds.
struct Setting {
  const Subject& subject;
  int ranks;
  bool watched;    // by a watchdog here, for communicators that need one
  double timeout;  // of groups that have to wait for it
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
    soon = starts_fast ? 20 : 40;
  }
  double limit(double given) const { return 2 * soon_after(given); }
  /// In which a group with that time-out must have gone on.
  double soon_after(double given) const { return given == kPatience ? soon : std::max(soon, 2 * given); }
  /// Time-out of groups whose ranks notice by themselves that one ended. With a watchdog nothing ends before abort(),
  /// so the short one.
  double timeout_if_detected(double given) const { return watched ? given : kPatience; }
};

void sleep(double seconds) { std::this_thread::sleep_for(std::chrono::duration<double>(seconds)); }

/// A group did not get as far as what goes wrong, since its ranks did not come within the time-out.
struct NotReady {
  std::string text;
};

double since(Clock::time_point begin) { return std::chrono::duration<double>(Clock::now() - begin).count(); }

/// A member of a group that is about to sum a buffer.
struct Member {
  const Setting& setting;
  std::filesystem::path folder;
  double timeout;
  Joined group;
  Registered block;
  View view;

  Member(const Setting& given, const std::string& meeting, int rank, double limit)
      : setting(given),
        folder(meeting),
        timeout(limit),
        group(given.subject, meeting, rank, given.ranks, limit),
        block(group, kCount * 4),
        view{block.memory.data(), DType::f32, {kCount}} {}

  Communicator& communicator() { return *group.communicator; }
  void sum() { communicator().all_reduce(view, Reduction::sum, group.stream); }
  void good_sum() {
    group.device->fill(block.memory.data(), 0, block.memory.bytes(), group.stream);
    sum();
    group.device->synchronize(group.stream);
    if (const auto fault = communicator().error())
      throw Error(ErrorCode::communication, {.where = "error() before anything goes wrong", .what = *fault});
    group.hosts.exchange("");  // a rank that is ahead may cause the fault
  }
  /// Makes the call, which may wait for its peer, and waits for the stream, which must go on; returns the fault.
  std::string fault_of(const std::function<void()>& call) {
    const auto begin = Clock::now();
    std::jthread watchdog;
    if (setting.watched)
      watchdog = std::jthread([this] {
        sleep(timeout);
        communicator().abort();
      });
    call();
    group.device->synchronize(group.stream);
    const double soon = setting.soon_after(timeout);
    need(since(begin) < soon, "the stream with the collective that cannot be done", number(since(begin)) + " s",
         "less than " + number(soon));
    const std::optional<std::string> fault = communicator().error();
    need(fault.has_value(), "error() after a collective that could not be done", "nothing", "a fault");
    return *fault;
  }
  std::filesystem::path gave_up(int rank) const { return folder / ("gave_up_" + std::to_string(rank)); }
  void wait_until_others_gave_up() const {
    const auto begin = Clock::now();
    auto all = [&] {
      for (int rank = 0; rank < setting.ranks; ++rank)
        if (rank != kCulprit && !std::filesystem::exists(gave_up(rank))) return false;
      return true;
    };
    while (!all() && since(begin) < setting.soon_after(timeout)) sleep(0.02);
  }
  /// After a fault calls do nothing and a barrier says so.
  void need_ended() {
    const auto begin = Clock::now();
    constexpr int kByte = 0x5a;
    group.device->fill(block.memory.data(), kByte, block.memory.bytes(), group.stream);
    sum();
    const std::int64_t slab = kCount / setting.ranks;
    const View own{view.as<float>() + slab * group.communicator->rank(), DType::f32, {slab}};
    communicator().all_gather(own, {view.data, DType::f32, {slab * setting.ranks}}, {}, group.stream);
    group.device->synchronize(group.stream);
    need_filled(block.memory, kByte, "the memory of a collective after a fault");
    need_refusal("barrier() after a fault", ErrorCode::communication, [&] { communicator().barrier(); });
    need(since(begin) < setting.soon, "a collective and a barrier after a fault", number(since(begin)) + " s",
         "less than " + number(setting.soon));
  }
};

using Action = std::function<std::string(Member&)>;

/// All ranks but the culprit returned, as `want` says, and what the first of them says. Of a group that could not be
/// made or could not sum, some end in a communication error.
std::string need_returned(const Setting& setting, const std::vector<RankOutcome>& outcomes, const char* want) {
  for (const RankOutcome& outcome : outcomes)
    if (outcome.kind == RankOutcome::Kind::threw && outcome.code == ErrorCode::communication)
      throw NotReady{outcome.text};
  for (int rank = 0; rank < setting.ranks; ++rank) {
    const RankOutcome& outcome = outcomes[static_cast<std::size_t>(rank)];
    if (rank != kCulprit)
      need(outcome.kind == RankOutcome::Kind::returned, "rank " + std::to_string(rank), outcome.text, want);
  }
  return outcomes[0].text;
}

/// Groups whose ranks have to wait for the time-out have a short one, and on a busy machine ranks may not come together
/// within it: then again with a longer one.
std::string with_time(const Setting& setting, const std::function<std::string(double timeout)>& contract) {
  constexpr int kAttempts = 3;
  double timeout = setting.timeout;
  for (int attempt = 1;; ++attempt, timeout *= 3) try {
      return contract(timeout);
    } catch (const NotReady& fault) {
      if (attempt == kAttempts) broken("a group without a fault", fault.text, "to sum");
    }
}

/// Runs `culprit` on one rank and expects of the others, which do `call`, that they name it; returns what one says.
std::string named(
    const Setting& setting, double timeout, const Action& culprit,
    const std::function<void(Member&)>& call = [](Member& member) { member.sum(); }) {
  const RankDirectory scratch(setting.subject, setting.ranks);
  const auto outcomes = run_ranks(setting.ranks, setting.limit(timeout) + timeout, [&](int rank) -> std::string {
    // Never destroyed: an end in good order is not what this is about.
    Member& member = *new Member(setting, scratch.path(), rank, timeout);
    member.good_sum();
    if (rank == kCulprit) return culprit(member);
    std::string fault = member.fault_of([&] { call(member); });
    std::ofstream(member.gave_up(rank)) << fault;
    const std::string name = "rank " + std::to_string(kCulprit);
    need(setting.watched || fault.find(name) != std::string::npos, "error()", fault, "a text that names " + name);
    member.need_ended();
    return fault;
  });
  return need_returned(setting, outcomes, "the fault, and no exception");
}

std::string late(const Setting& setting, double timeout) {
  return named(setting, timeout, [&](Member& member) -> std::string {
    member.wait_until_others_gave_up();
    member.fault_of([&] { member.sum(); });
    return "";
  });
}

/// The others wait for a message that the rank never sends; it goes on to a barrier.
std::string left_out(const Setting& setting, double timeout) {
  auto receives = [](Member& member) { member.communicator().receive(member.view, kCulprit, member.group.stream); };
  return named(
      setting, timeout,
      [](Member& member) -> std::string {
        need_refusal("barrier() while the others wait for a message", ErrorCode::communication,
                     [&] { member.communicator().barrier(); });
        return "";
      },
      receives);
}

/// A rank that sums fewer elements than the others, and one that gathers where they sum.
std::string differs(const Setting& setting, double timeout) {
  if (setting.watched) return "not of one that needs a watchdog";
  auto calls = [&](const std::function<void(Member&)>& other) {
    return named(setting, timeout, [&](Member& member) -> std::string {
      const std::string fault = member.fault_of([&] { other(member); });
      need(fault.find("rank ") != std::string::npos, "error() of the rank that differs", fault,
           "a text that names one");
      member.need_ended();
      return "";
    });
  };
  const std::string text = calls([](Member& member) {
    member.communicator().all_reduce({member.view.data, DType::f32, {kCount / 2}}, Reduction::sum, member.group.stream);
  });
  calls([&](Member& member) {
    const std::int64_t slab = kCount / setting.ranks;
    auto* own = member.view.as<float>() + slab * kCulprit;
    member.communicator().all_gather({own, DType::f32, {slab}}, {member.view.data, DType::f32, {slab * setting.ranks}},
                                     {}, member.group.stream);
  });
  return text;
}

std::string stopped(const Setting& setting, double timeout) {
  return named(setting, timeout, [](Member&) -> std::string {
    ::raise(SIGSTOP);
    return "";
  });
}

std::string killed(const Setting& setting, double timeout) {
  return named(setting, setting.timeout_if_detected(timeout), [](Member&) -> std::string {
    sleep(0.1);  // until the others wait
    ::raise(SIGKILL);
    return "";
  });
}

std::string aborted(const Setting& setting, double timeout) {
  return named(setting, setting.timeout_if_detected(timeout), [&](Member& member) -> std::string {
    Communicator& communicator = member.communicator();
    std::jthread other([&communicator] {
      sleep(0.1);
      communicator.abort();
    });
    const View half{member.view.data, DType::f32, {kCount / 2}};
    std::string fault = member.fault_of([&] {
      communicator.receive(half, (kCulprit + 1) % setting.ranks, member.group.stream);  // which that rank does not send
    });
    other.join();
    member.need_ended();
    return fault;
  });
}

/// A rank that does not come to the barrier, and one that does not connect.
std::string missing(const Setting& setting, double timeout) {
  const double absent = 1.5 * timeout;
  for (const bool comes : {true, false}) {
    const RankDirectory scratch(setting.subject, setting.ranks);
    const auto outcomes = run_ranks(setting.ranks, setting.limit(timeout) + absent, [&](int rank) -> std::string {
      if (rank == kCulprit && !comes) {
        const HostGroup hosts(rank, setting.ranks, MeetingPoint::in(scratch.path(), "", true), timeout);
        return sleep(absent), "";
      }
      if (!comes) {
        const auto connect = [&] { new Joined(setting.subject, scratch.path(), rank, setting.ranks, timeout); };
        return need_refusal("connect() without a rank", ErrorCode::communication, connect);
      }
      Joined& group = *new Joined(setting.subject, scratch.path(), rank, setting.ranks, timeout);
      if (rank == kCulprit) return sleep(absent), "";
      return need_refusal("barrier() without a rank", ErrorCode::communication, [&] { group.communicator->barrier(); });
    });
    const std::string text = need_returned(setting, outcomes, "a communication error");
    if (!comes) return text;
  }
  return "";
}

}  // namespace

void check_communicator_faults(Report& report, const Subject& subject, int ranks) {
  auto add = [&](const char* name, auto contract) {
    report.contract(name, [&] {
      const Setting setting(subject, ranks);
      return with_time(setting, [&](double timeout) { return contract(setting, timeout); });
    });
  };
  add("a call that differs", differs);
  add("a call that a rank leaves out", left_out);
  add("a rank that is late", late);
  add("a rank that is stopped", stopped);
  add("a rank that is killed", killed);
  add("a rank that aborts", aborted);
  add("a rank that is missing", missing);
}

}  // namespace quern::conformance
