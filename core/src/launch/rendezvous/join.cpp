#include "launch/rendezvous/join.h"

#include <poll.h>
#include <sys/resource.h>

#include <algorithm>
#include <cstring>
#include <list>
#include <thread>

#include "base/format.h"
#include "quern/error.h"

namespace quern {

namespace {

// The handshake. Rank r: hello. Rank 0: its number and proof. Rank r: its proof. Rank 0, when all are here: begin. Or,
// to the guest that has been there for longest when there are too many: full.
constexpr char kHello = 'h', kChallenge = 'c', kProof = 'p', kBegin = 'b', kFull = 'w';
constexpr std::size_t kMostGreeting = 512;  // bytes that somebody unknown may send
constexpr std::size_t kNumber = sizeof(Secret), kProofBytes = 32;
constexpr std::size_t kMostGuests = 1000;  // whom rank 0 does not know yet; fewer where few descriptors are allowed
constexpr double kHandshake = 3;           // seconds that one may take
constexpr double kLater = 2;               // rank 0 gives up first and says whom it waited for
constexpr int kSilences = 2;               // of who listens where rank 0 should, and is not rank 0
constexpr const char* kVersion = "quern ranks 1";
constexpr const char* kShare =
    "see the other ranks' messages; all need one shared log.directory, or QUERN_RENDEZVOUS and QUERN_SECRET";

std::string random_number() {
  const Secret number = fresh_secret();
  return {number.begin(), number.end()};
}

/// What both prove: each as itself, so that nobody's proof can be sent back to them, and for this launch alone, since
/// the user may give several one secret.
std::string spoken(const char* by, const MeetingPoint& point, const std::string& hello, const std::string& number) {
  return std::string(by) + '\n' + point.launch() + '\n' + hello + '\n' + number;
}

/// Half of the descriptors that ranks leave.
std::size_t most_guests(int ranks) {
  rlimit open{};
  ::getrlimit(RLIMIT_NOFILE, &open);
  const rlim_t taken = static_cast<rlim_t>(ranks), left = open.rlim_cur > taken ? open.rlim_cur - taken : 0;
  return std::clamp<std::size_t>(left / 2, 1, kMostGuests);
}

std::string hello_of(int rank, int size) {
  return std::string(kVersion) + ' ' + std::to_string(rank) + ' ' + std::to_string(size) + ' ' + random_number();
}

/// Rank 0's side.
class Door {
 public:
  Door(int size, const MeetingPoint& point, double timeout)
      : size_(size), timeout_(timeout), most_guests_(most_guests(size)), point_(point), listener_(point.open(secret_)) {
    ranks_.resize(static_cast<std::size_t>(size));
  }
  ~Door() { point_.close(); }

  std::vector<FrameSocket> run() {
    const auto deadline = after(timeout_);
    while (here_ < size_ - 1) {
      if (HostClock::now() > deadline) fail(missing(), kShare);
      wait(deadline);
      accept_guests();
      for (auto at = guests_.begin(); at != guests_.end();) at = greet(*at) ? std::next(at) : guests_.erase(at);
      for (std::size_t rank = 1; rank < ranks_.size(); ++rank) look_after(rank);
    }
    const WireFrame begin = wire_frame(kBegin, {});
    for (FrameSocket& rank : ranks_) rank.send(begin);
    return std::move(ranks_);
  }

 private:
  struct Guest {
    FrameSocket socket;
    HostClock::time_point deadline;
    std::string hello = {}, number = {};
  };

  void wait(HostClock::time_point deadline) {
    std::vector<pollfd> polls;
    polls.push_back({.fd = listener_.socket.get(), .events = POLLIN, .revents = 0});
    for (const Guest& guest : guests_)
      polls.push_back({.fd = guest.socket.descriptor(), .events = guest.socket.events(), .revents = 0});
    for (const FrameSocket& rank : ranks_)
      if (rank.open()) polls.push_back({.fd = rank.descriptor(), .events = rank.events(), .revents = 0});
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - HostClock::now()).count();
    ::poll(polls.data(), polls.size(), static_cast<int>(std::clamp<std::int64_t>(left, 0, 1000)));
  }

  void accept_guests() {
    for (std::size_t i = 0; i < most_guests_; ++i) {
      OwnedDescriptor guest = accept_rank(listener_, guests_.empty() ? IfFull::fail : IfFull::none);
      if (!guest && descriptors_are_full()) {
        drop_oldest();
        continue;
      }
      if (!guest) return;
      if (guests_.size() == most_guests_) drop_oldest();
      guests_.push_back({FrameSocket(std::move(guest), kMostGreeting), after(kHandshake)});
    }
  }

  /// A rank calls again.
  void drop_oldest() {
    guests_.front().socket.send(kFull, {});
    guests_.pop_front();
  }

  /// False: the guest is a rank now, or is dropped.
  bool greet(Guest& guest) {
    guest.socket.work();
    while (std::optional<Frame> frame = guest.socket.next()) {
      if (frame->kind == kHello && guest.hello.empty() && frame->bytes.starts_with(kVersion)) {
        guest.hello = frame->bytes;
        guest.number = random_number();
        guest.socket.send(kChallenge,
                          guest.number + proof_of(secret_, spoken("rank 0", point_, guest.hello, guest.number)));
      } else if (frame->kind == kProof && !guest.hello.empty() &&
                 proves(secret_, spoken("rank", point_, guest.hello, guest.number), frame->bytes)) {
        admit(guest);
        return false;
      } else {
        return false;
      }
    }
    const bool goes_on = guest.socket.open() && HostClock::now() < guest.deadline;
    strangers_ += !goes_on && !guest.hello.empty();
    return goes_on;
  }

  void admit(Guest& guest) {
    int rank = -1, size = -1;
    std::sscanf(guest.hello.c_str() + std::strlen(kVersion), "%d %d", &rank, &size);
    if (size != size_ || rank < 1 || rank >= size_ || ranks_[static_cast<std::size_t>(rank)].open()) {
      const std::string text = "the ranks do not fit together: one is " + rank_text(rank, size) + ", and rank 0 has " +
                               (size == size_ ? "another such" : "a group of " + std::to_string(size_));
      guest.socket.send(kFaultFrame, text);
      fail(text);
    }
    guest.socket.allow(kMostGiven);
    ranks_[static_cast<std::size_t>(rank)] = std::move(guest.socket);
    ++here_;
  }

  void look_after(std::size_t rank) {
    FrameSocket& socket = ranks_[rank];
    if (!socket.open()) return;
    socket.work();
    if (!socket.open()) fail("rank " + std::to_string(rank) + " is gone, before all ranks were here");
  }

  std::string missing() const {
    std::string list;
    for (std::size_t rank = 1; rank < ranks_.size(); ++rank)
      if (!ranks_[rank].open()) list += (list.empty() ? "" : ", ") + std::to_string(rank);
    constexpr std::size_t kMostText = 200;
    if (list.size() > kMostText) list = list.substr(0, list.rfind(',', kMostText)) + ", ...";
    if (strangers_ > 0) list += "; somebody called as a rank and did not prove the secret";
    return "of " + std::to_string(size_) + " ranks, these did not connect within " + format_duration(timeout_) + ": " +
           list;
  }

  [[noreturn]] void fail(const std::string& text, const std::string& next = {}) {
    const WireFrame frame = wire_frame(kFaultFrame, text);
    for (FrameSocket& rank : ranks_) rank.send(frame);
    fail_communication(text, next);
  }

  int size_;
  double timeout_;
  const std::size_t most_guests_;
  const MeetingPoint& point_;
  Secret secret_{};
  Listener listener_;
  std::list<Guest> guests_;
  std::vector<FrameSocket> ranks_;
  int here_ = 0;
  int strangers_ = 0;  // who said what a rank says, and did not prove it
};

/// Why a call did not reach rank 0.
struct NotReached {
  std::string text = {};
  bool silent = false, stranger = false;  ///< who answers there
};

/// A connection to rank 0 that both ends have proved. Throws NotReached.
FrameSocket call(const std::string& host, const RankZero& zero, const MeetingPoint& point, const std::string& hello,
                 HostClock::time_point deadline) {
  const auto soon = std::min(deadline, after(kHandshake));
  std::string fault;
  FrameSocket socket(connect_to_rank(host, zero.port, soon, fault), kMostGreeting);
  const std::string at = host + " port " + std::to_string(zero.port) + ": ";
  if (!socket.open()) throw NotReached{at + fault};
  socket.send(kHello, hello);
  const std::optional<Frame> challenge = receive(socket, soon);
  if (!challenge && socket.open()) throw NotReached{at + "who listens there does not speak", true};
  if (!challenge) throw NotReached{at + "who listens there closed the connection, and is no rank 0", false, true};
  if (challenge->kind == kFull) throw NotReached{at + "too many others call there"};
  const std::string number = challenge->bytes.substr(0, kNumber);
  if (challenge->kind != kChallenge || challenge->bytes.size() != kNumber + kProofBytes ||
      !proves(zero.secret, spoken("rank 0", point, hello, number), challenge->bytes.substr(kNumber)))
    throw NotReached{at + "who answers there has another secret or launch, so it belongs to another run", false, true};
  socket.send(kProof, proof_of(zero.secret, spoken("rank", point, hello, number)));
  return socket;
}

FrameSocket call_until(int rank, int size, const MeetingPoint& point, double timeout) {
  const auto deadline = after(timeout);
  const std::string hello = hello_of(rank, size);
  NotReached fault;
  for (int silences = 0;; silences += fault.silent) {
    const std::optional<RankZero> zero = point.look();
    if (!zero) fault = {"nothing in " + point.text()};
    for (const std::string& host : zero ? zero->hosts : std::vector<std::string>()) try {
        return call(host, *zero, point, hello, deadline);
      } catch (const NotReached& reason) {
        if (fault.text.empty() || HostClock::now() < deadline) fault = reason;  // not that there was no time left
      }
    if (point.fixed() && (fault.stranger || silences == kSilences))
      fail_communication(fault.text, "give all ranks one QUERN_RENDEZVOUS, a free port, and QUERN_SECRET");
    if (HostClock::now() > deadline)
      fail_communication("rank 0 did not connect within " + format_duration(timeout) + " (" + fault.text + ")", kShare);
    std::this_thread::sleep_for(std::chrono::milliseconds(30));
  }
}

}  // namespace

std::string rank_text(int rank, int size) { return "rank " + std::to_string(rank) + " of " + std::to_string(size); }

void fail_communication(const std::string& what, const std::string& next) {
  throw Error(ErrorCode::communication, {.what = what, .next = next});
}

std::vector<FrameSocket> join_ranks(int rank, int size, const MeetingPoint& point, double timeout) {
  if (size == 1) return {};
  if (rank == 0) return Door(size, point, timeout).run();
  std::vector<FrameSocket> zero;
  zero.push_back(call_until(rank, size, point, timeout));
  const std::optional<Frame> answer = receive(zero[0], after(timeout + kLater));
  if (answer && answer->kind == kFull) fail_communication("rank 0 let go of this rank: too many others called it");
  if (answer && answer->kind == kFaultFrame) fail_communication(answer->bytes);
  if (!answer || answer->kind != kBegin)
    fail_communication(zero[0].open() ? "rank 0 does not answer" : "rank 0 is gone, before all ranks were here");
  zero[0].allow(0xffffffffu);
  return zero;
}

}  // namespace quern
