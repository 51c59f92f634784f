// Groups of processes on this machine: good order, and every way in which it ends.
#include "launch/rendezvous/host_group.h"

#include <doctest/doctest.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <thread>

#include "base/clock.h"
#include "base/files/test_directory.h"
#include "conformance/communicator/rank_processes.h"
#include "launch/rendezvous/rank_rendezvous.h"
#include "quern/error.h"

using namespace quern;
using conformance::RankOutcome;

namespace {

constexpr double kPatience = 60, kLimit = 100;  // seconds
constexpr double kSoon = 5;                     // on a busy machine; a second is what users see

void sleep(double seconds) { std::this_thread::sleep_for(std::chrono::duration<double>(seconds)); }

MeetingPoint in(const TestDirectory& directory) { return MeetingPoint::in(directory.path(), "test", true); }

std::vector<std::string> texts(int size, const std::function<std::string(int)>& body) {
  std::vector<std::string> all;
  for (const RankOutcome& outcome : conformance::run_ranks(size, kLimit, body)) {
    if (outcome.kind == RankOutcome::Kind::threw) CHECK(outcome.code == ErrorCode::communication);
    all.push_back(outcome.text);
  }
  return all;
}

/// One of three ranks does something; the others wait for it in an exchange, and their faults are returned.
std::string fault_of(const std::function<void(HostGroup&)>& culprit, int rank_of_culprit = 2,
                     double timeout = kPatience) {
  const TestDirectory directory;
  std::vector<std::string> all = texts(3, [&](int rank) -> std::string {
    HostGroup group(rank, 3, in(directory), timeout);
    group.exchange("begin");
    if (rank == rank_of_culprit) return culprit(group), "";
    const auto begin = HostClock::now();
    try {
      group.exchange("");
    } catch (const Error& error) {
      if (HostClock::now() - begin > std::chrono::duration<double>(kSoon)) return "too late";
      CHECK(group.fault() == error.detail().what);
      return error.detail().what;
    }
    return "no fault";
  });
  all.erase(all.begin() + rank_of_culprit);
  constexpr const char* kSilence = "has sent nothing for ";  // which each counts for itself
  CHECK(all[0].substr(0, all[0].find(kSilence)) == all[1].substr(0, all[1].find(kSilence)));
  return all[0];
}

/// Closes all connections that come within two seconds.
void accept_soon(const Listener& listener) {
  for (const auto until = after(2); HostClock::now() < until; sleep(0.01)) accept_rank(listener);
}

/// Connects to rank 0 as soon as it listens.
OwnedDescriptor stranger(const MeetingPoint& point) {
  std::string fault;
  for (;;) {
    if (const auto zero = point.look())
      if (OwnedDescriptor socket = connect_to_rank(zero->hosts[0], zero->port, after(1), fault)) return socket;
    sleep(0.01);
  }
}

void write_file(const std::string& path, const std::string& text) { std::ofstream(path) << text; }

std::string file_of(const Secret& secret, int port) {
  return "quern-rendezvous-1\nsecret " + hex_of(secret) + "\nport " + std::to_string(port) + "\nhost 127.0.0.1\nend\n";
}

std::vector<std::string> rank_exchanges(int rank, int size, const MeetingPoint& point) {
  HostGroup group(rank, size, point, kPatience);
  return group.exchange(std::to_string(rank));
}

}  // namespace

TEST_CASE("messages reach rank 0 in order, from ranks that fail too, and of a rank that is gone none is awaited") {
  const TestDirectory directory;
  const std::vector<std::string> all = texts(4, [&](int rank) -> std::string {
    HostGroup group(rank, 4, in(directory), kPatience);
    group.exchange("begin");
    if (rank > 0) {
      group.post("first of " + std::to_string(rank));
      if (rank == 2) group.end("bad luck");
      if (rank == 3) sleep(0.3), ::_exit(0);  // as if killed
      while (!group.fault()) sleep(0.01);
      sleep(0.5);
      group.post("after the fault");
      sleep(0.5);
      return "";
    }
    std::string heard;
    for (const int other : {2, 1, 2, 1}) heard += group.posted(other) + ", ";
    heard += group.posted(3) + ", ";
    try {
      group.posted(3);
    } catch (const Error& error) {
      heard += error.detail().what;
    }
    return heard;
  });
  CHECK(all[0] == "first of 2, first of 1, after the fault, after the fault, first of 3, rank 2: bad luck");
}

TEST_CASE("ranks exchange what they give, by rank") {
  for (const int size : {1, 2, 4}) {
    const TestDirectory directory;
    const auto all = texts(size, [&](int rank) -> std::string {
      HostGroup group(rank, size, in(directory), kPatience);
      for (int round = 0; round < 20; ++round) {
        const auto given = group.exchange(std::to_string(rank * 100 + round));
        if (static_cast<int>(given.size()) != size) return "size";
        for (int other = 0; other < size; ++other)
          if (given[static_cast<std::size_t>(other)] != std::to_string(other * 100 + round)) return "wrong text";
      }
      const std::size_t many = (std::size_t{5} << 20) + static_cast<std::size_t>(rank);
      const auto large = group.exchange(std::string(many, static_cast<char>('a' + rank)));
      for (std::size_t other = 0; other < large.size(); ++other)
        if (large[other] != std::string((std::size_t{5} << 20) + other, static_cast<char>('a' + other))) return "wrong";
      return group.fault().value_or("right");
    });
    for (const std::string& text : all) CHECK(text == "right");
    CHECK(directory.entries() == 0);
  }
}

TEST_CASE("a rank that dies, throws, ends the group or leaves is named at once") {
  CHECK(fault_of([](HostGroup&) { ::raise(SIGKILL); }) == "rank 2 is gone: its process has ended");
  CHECK(fault_of([](HostGroup&) { ::raise(SIGKILL); }, 0) == "rank 0 is gone: its process has ended");
  CHECK(fault_of([](HostGroup&) { throw Error(ErrorCode::communication, {.what = "x"}); }) ==
        "rank 2: ended with an error");
  CHECK(fault_of([](HostGroup& group) { std::jthread([&] { group.end("no data"); }); }, 1) == "rank 1: no data");
  CHECK(fault_of([](HostGroup& group) { group.end("no data"); }, 0) == "rank 0: no data");
  CHECK(fault_of([](HostGroup&) {}) == "rank 2 has left");
  CHECK(fault_of([](HostGroup&) {}, 0) == "rank 0 has left");
}

TEST_CASE("a rank that ends the group has its own text as the fault, without its name") {
  const TestDirectory directory;
  const auto all = texts(2, [&](int rank) -> std::string {
    HostGroup group(rank, 2, in(directory), kPatience);
    if (rank == 1) group.end("no data");
    while (!group.fault()) sleep(0.01);
    return *group.fault();
  });
  CHECK(all == std::vector<std::string>{"rank 1: no data", "no data"});
}

TEST_CASE("rank 0 has what the others are at, and they hear what keeps a rank busy") {
  const TestDirectory directory;
  const auto all = texts(3, [&](int rank) -> std::string {
    HostGroup group(rank, 3, in(directory), kPatience);
    group.exchange("begin");
    group.note("rank " + std::to_string(rank));
    if (rank == 2) group.be_busy("counting");
    sleep(1.0);
    std::string text = group.busy().value_or("") + "; ";
    for (const HostGroup::Note& note : group.notes())
      text += note.text + " " + note.busy + (note.silent < kSilent ? "; " : " silent; ");
    sleep(0.5);
    group.exchange("end");
    return text;
  });
  CHECK(all[0] == "rank 2 is counting; rank 0 ; rank 1 ; rank 2 counting; ");
  CHECK(all[1] == "rank 2 is counting;  rank 2 is counting; ");
}

TEST_CASE("a rank that is busy is waited for as long as it speaks") {
  for (const int busy : {0, 2}) {
    CAPTURE(busy);
    CHECK(fault_of(
              [](HostGroup& group) {
                CHECK(group.be_busy("writing step 8") == "");
                sleep(2.5);
                group.exchange("");
                CHECK(group.be_busy("") == "writing step 8");
              },
              busy, 0.5) == "no fault");
  }
  CHECK(fault_of(
            [](HostGroup& group) {
              group.be_busy("writing step 8");
              sleep(1.5);
              group.be_busy("");
              sleep(1.5);
            },
            2, 0.5) == "hang: rank 2 did not join an exchange within 500ms");
  const std::string silent = fault_of(
      [](HostGroup& group) {
        group.be_busy("writing step 8");
        sleep(0.3);
        ::raise(SIGSTOP);
      },
      2, 0.5);
  CHECK(silent.starts_with("hang: rank 2 did not join an exchange within 500ms; rank 2 has sent nothing for 2."));
  CHECK(silent.ends_with("s, and was writing step 8"));
}

TEST_CASE("a rank that does not come to an exchange is named after the time-out") {
  CHECK(fault_of([](HostGroup&) { sleep(1.5); }, 2, 0.5) == "hang: rank 2 did not join an exchange within 500ms");
  CHECK(fault_of([](HostGroup&) { sleep(1.5); }, 0, 0.5) == "hang: rank 0 did not join an exchange within 500ms");
  CHECK(fault_of([](HostGroup&) { ::raise(SIGSTOP); }, 0, 0.5).starts_with("hang: rank 0 has sent nothing for 2."));
}

TEST_CASE("of ranks that do not come to an exchange, one that is silent is named once more") {
  const TestDirectory directory;
  const auto all = texts(3, [&](int rank) -> std::string {
    HostGroup group(rank, 3, in(directory), 4);
    group.exchange("begin");
    if (rank == 1) ::raise(SIGSTOP);
    if (rank == 2) CHECK_THROWS_AS(group.exchange("came"), Error);
    while (!group.fault()) sleep(0.05);
    return *group.fault();
  });
  for (const int rank : {0, 2}) {
    CAPTURE(all[static_cast<std::size_t>(rank)]);
    const std::string& text = all[static_cast<std::size_t>(rank)];
    CHECK(text.starts_with("hang: rank 0, 1 did not join an exchange within 4.0s; rank 1 has sent nothing for "));
    CHECK(text.find("; ") == text.rfind("; "));
  }
}

TEST_CASE("a time-out of any size is no less than it says") {
  const TestDirectory directory;
  const auto all = texts(2, [&](int rank) -> std::string {
    HostGroup group(rank, 2, in(directory), 1e10);
    if (rank == 0) sleep(0.3);
    return group.exchange(std::to_string(rank))[1];
  });
  CHECK(all == std::vector<std::string>{"1", "1"});
}

TEST_CASE("time in which all ranks are stopped does not count") {
  const TestDirectory directory;
  auto all = texts(4, [&](int rank) -> std::string {
    const std::string path = directory / "processes";
    if (rank == 3) {  // who stops them
      for (const double until = now() + kPatience; !std::filesystem::exists(path) && now() < until;) sleep(0.01);
      sleep(0.2);  // the others wait for rank 0
      for (const int signal : {SIGSTOP, SIGCONT}) {
        std::ifstream processes(path);
        for (pid_t process = 0; processes >> process;) ::kill(process, signal);
        if (signal == SIGSTOP) sleep(6.0);
      }
      return "went on";
    }
    ::setpgid(0, 0);  // else a shell that ends meanwhile may send a signal to a group with stopped processes
    HostGroup group(rank, 3, in(directory), 3);
    const std::vector<std::string> processes = group.exchange(std::to_string(::getpid()) + "\n");
    if (rank == 0) {
      std::ofstream(path + "-") << processes[0] << processes[1] << processes[2];
      std::filesystem::rename(path + "-", path);
      sleep(1.0);
    }
    group.exchange("");
    return "went on";
  });
  for (const std::string& one : all) CHECK(one == "went on");
}

TEST_CASE("ranks that never come are named") {
  const TestDirectory directory;
  auto all = texts(4, [&](int rank) -> std::string {
    if (rank == 1 || rank == 3) return "";
    const HostGroup group(rank, 4, in(directory), 0.5);
    return "no fault";
  });
  CHECK(all[0].starts_with("of 4 ranks, these did not connect within 500ms: 1, 3; see the other "));
  CHECK(all[2] == "of 4 ranks, these did not connect within 500ms: 1, 3");
  all = texts(2, [&](int rank) -> std::string {
    if (rank == 0) return "";
    const HostGroup group(rank, 2, in(directory), 0.5);
    return "no fault";
  });
  CHECK(all[1].starts_with("rank 0 did not connect within 500ms (nothing in " + directory.path() +
                           "/.tmp-rendezvous-test); see the other ranks' messages"));
}

TEST_CASE("a rank that dies while others are awaited ends the wait") {
  const TestDirectory directory;
  const auto all = texts(3, [&](int rank) -> std::string {
    if (rank == 2) return "";
    if (rank == 1) std::thread([] { sleep(0.3), ::raise(SIGKILL); }).detach();
    const HostGroup group(rank, 3, in(directory), kPatience);
    return "no fault";
  });
  CHECK(all[0] == "rank 1 is gone, before all ranks were here");
}

TEST_CASE("ranks that do not fit together are refused on all") {
  const TestDirectory directory;
  const auto all = texts(2, [&](int rank) -> std::string {
    const HostGroup group(rank, rank == 0 ? 2 : 3, in(directory), kPatience);
    return "no fault";
  });
  const std::string text = "the ranks do not fit together: one is rank 1 of 3, and rank 0 has a group of 2";
  CHECK(all[0] == text);
  CHECK(all[1] == text);
}

TEST_CASE("strangers do no harm, whatever they say") {
  const TestDirectory directory;
  const auto all = texts(3, [&](int rank) -> std::string {
    if (rank == 1) {
      for (const std::string& says : {std::string(), std::string("GET / HTTP/1.1\r\n\r\n"), std::string(100000, '\xff'),
                                      std::string("\5\0\0\0phello", 10), std::string("\x40\0\0\0hquern", 10)}) {
        static std::vector<OwnedDescriptor> kept;
        kept.push_back(stranger(in(directory)));
        ::send(kept.back().get(), says.data(), says.size(), MSG_NOSIGNAL);
      }
      FrameSocket liar(stranger(in(directory)), 512);
      liar.send('h', "quern ranks 1 2 3 " + std::string(32, 'x'));
      const auto challenge = receive(liar, after(kSoon));
      liar.send('p', challenge ? challenge->bytes.substr(32) : "");  // the proof of rank 0, sent back
      if (receive(liar, after(kSoon)) || liar.open()) return "the liar is let in";
    }
    if (rank == 2) sleep(0.3);
    return rank_exchanges(rank, 3, in(directory))[2];
  });
  for (const std::string& text : all) CHECK(text == "2");
}

TEST_CASE("strangers who open connections without end and say nothing keep no rank out") {
  const TestDirectory directory;
  const auto all = texts(4, [&](int rank) -> std::string {
    if (rank == 3) {  // who keeps them open
      std::vector<OwnedDescriptor> kept;
      for (int i = 0; i < 400; ++i) kept.push_back(stranger(in(directory)));
      std::ofstream(directory / "full") << "now";
      while (std::filesystem::exists(directory / ".tmp-rendezvous-test")) sleep(0.01);
      return "2";
    }
    const rlimit few{40, 40};
    if (rank == 0) ::setrlimit(RLIMIT_NOFILE, &few);
    while (rank > 0 && !std::filesystem::exists(directory / "full")) sleep(0.01);
    return rank_exchanges(rank, 3, in(directory))[2];
  });
  for (const std::string& text : all) CHECK(text == "2");
}

TEST_CASE("the file of a dead run confuses nobody") {
  const TestDirectory directory;
  const std::string path = directory / ".tmp-rendezvous-test";
  // Nobody listens; somebody else does, and says nothing; another run does.
  const Listener silent = listen_for_ranks(0, true);
  int free_port = 0;
  {
    const Listener closed = listen_for_ranks(0, true);
    free_port = closed.port;
  }
  const TestDirectory elsewhere;
  for (const std::string& left : {std::string("quern-rendezvous-1\nsecret 12"), std::string("\0\xff", 2),
                                  file_of(fresh_secret(), free_port), file_of(fresh_secret(), silent.port)}) {
    write_file(path, left);
    const auto all = texts(2, [&](int rank) -> std::string {
      if (rank == 0) sleep(0.2);
      return rank_exchanges(rank, 2, in(directory))[1];
    });
    CHECK(all == std::vector<std::string>{"1", "1"});
    CHECK(!std::filesystem::exists(path));
  }
}

TEST_CASE("a rank of another run gets that message") {
  const TestDirectory directory, copy;
  const auto all = texts(3, [&](int rank) -> std::string {
    if (rank != 2) {
      if (rank == 1) sleep(1.0);
      return rank_exchanges(rank, 2, in(directory))[1];
    }
    std::optional<RankZero> zero;
    while (!(zero = in(directory).look())) sleep(0.01);
    write_file(copy / ".tmp-rendezvous-test", file_of(fresh_secret(), zero->port));
    const HostGroup group(1, 2, in(copy), 0.5);
    return "no fault";
  });
  CHECK(all[0] == "1");
  CHECK(all[1] == "1");
  CHECK(all[2].find("another secret") != std::string::npos);
}

TEST_CASE("the file is for its user alone") {
  const TestDirectory directory;
  const MeetingPoint point = in(directory);
  Secret secret{};
  const Listener listener = point.open(secret);
  struct stat about {};
  REQUIRE(::stat((directory / ".tmp-rendezvous-test").c_str(), &about) == 0);
  CHECK((about.st_mode & 0777) == 0600);
  REQUIRE(point.look());
  CHECK(point.look()->secret == secret);
  CHECK(point.look()->port == listener.port);
  point.close();
  CHECK(directory.entries() == 0);
}

TEST_CASE("ranks connect at the user's address") {
  int port = 0;
  {
    const Listener closed = listen_for_ranks(0, true);
    port = closed.port;
  }
  const std::string secret = hex_of(fresh_secret()), other = hex_of(fresh_secret());
  std::string address = "localhost:" + std::to_string(port), key = secret;
  const Environment environment = [&](const char* name) -> const char* {
    if (std::string(name) == "QUERN_RENDEZVOUS") return address.empty() ? nullptr : address.c_str();
    if (std::string(name) == "QUERN_SECRET") return key.empty() ? nullptr : key.c_str();
    return nullptr;
  };
  auto point = [&] { return MeetingPoint::of({.size = 2}, "/nowhere", environment); };
  const auto all = texts(2, [&](int rank) { return rank_exchanges(rank, 2, point())[1]; });
  CHECK(all == std::vector<std::string>{"1", "1"});

  const auto told = texts(2, [&](int rank) -> std::string {
    if (rank == 1) key = other;
    const HostGroup group(rank, 2, point(), 1);
    return "no fault";
  });
  CHECK(told[0].find("these did not connect within 1.0s: 1; somebody called as a rank and did not prove the secret") !=
        std::string::npos);
  CHECK(told[1].find("another secret") != std::string::npos);

  // The secret alone, which the user may give several launches, lets nobody in.
  const auto launched = texts(2, [&](int rank) -> std::string {
    const RankPlace place{.size = 2, .launch = rank == 0 ? "first" : "second"};
    const HostGroup group(rank, 2, MeetingPoint::of(place, "/nowhere", environment), 1);
    return "no fault";
  });
  CHECK(launched[0].find("these did not connect within 1.0s: 1; somebody called as a rank and did not prove") !=
        std::string::npos);
  CHECK(launched[1].find("another secret or launch") != std::string::npos);

  const Listener taken = listen_for_ranks(port, true);
  CHECK_THROWS_WITH_AS(HostGroup(0, 2, point(), 1),
                       doctest::Contains(("port " + std::to_string(port) + ": rank 0 cannot listen there").c_str()),
                       Error);
  const auto begin = HostClock::now();
  CHECK_THROWS_WITH_AS(HostGroup(1, 2, point(), kPatience), doctest::Contains("who listens there does not speak"),
                       Error);
  CHECK(HostClock::now() - begin < std::chrono::duration<double>(kPatience / 2));
  {
    const std::jthread closes([&] { accept_soon(taken); });
    CHECK_THROWS_WITH_AS(HostGroup(1, 2, point(), kPatience), doctest::Contains("closed the connection"), Error);
  }
  auto refused = [&](const std::string& a, const std::string& k, const std::string& variable) {
    address = a, key = k;
    CHECK_THROWS_WITH_AS(point(), doctest::Contains(("environment variable " + variable).c_str()), Error);
  };
  for (const char* wrong : {"host", "host:", ":1", "host:0", "host:65536", "host:1x"})
    refused(wrong, secret, "QUERN_RENDEZVOUS");
  refused("", secret, "QUERN_RENDEZVOUS");
  refused("host:1", "", "QUERN_SECRET");
  refused("host:1", "abc", "QUERN_SECRET");
}

TEST_CASE("ranks of one machine get a folder of their own, as long as rank 0 lives") {
  const TestDirectory directory;
  const auto all = texts(2, [&](int rank) -> std::string {
    HostGroup group(rank, 2, in(directory), kPatience);
    std::string path;
    {
      const RankRendezvous rendezvous(
          {.rank = rank, .size = 2, .address = {}, .exchange = [&](std::string own) { return group.exchange(own); }});
      const Rendezvous got = rendezvous.get("memcpy");
      if (!got.address.starts_with("file:/") || !got.address.ends_with("/memcpy")) return got.address;
      path = std::filesystem::path(got.address.substr(5)).parent_path();
      struct stat about {};
      if (::stat(path.c_str(), &about) != 0 || (about.st_mode & 0777) != 0700) return "mode";
      if (got.exchange(std::to_string(rank))[1] != "1") return "exchange";
    }
    group.exchange("");
    return std::filesystem::exists(path) ? "still there" : "right";
  });
  for (const std::string& text : all) CHECK(text == "right");
}
