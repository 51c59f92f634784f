#include "launch/rendezvous/host_group.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <condition_variable>
#include <deque>
#include <exception>
#include <mutex>
#include <thread>
#include <utility>

#include "base/blocked_signals.h"
#include "base/files/durable_file.h"
#include "base/format.h"
#include "launch/local_ranks.h"
#include "launch/rendezvous/join.h"
#include "quern/error.h"
#include "quern/running_time.h"

namespace quern {

namespace {

/// What a rank gives, what all gave, that a rank leaves, its heartbeat (what keeps it busy, a zero byte, its note), and
/// a message to rank 0.
constexpr char kGiven = 'g', kResult = 'r', kBye = 'l', kBeat = 'n', kPosted = 'p';
constexpr std::size_t kMostResult = 0xffffffff;  // bytes
constexpr double kLater = 2;                     // seconds: rank 0 gives up first and says whom it waited for
constexpr double kGrace = 2;                     // of a rank that leaves, for what it still has to say
constexpr std::chrono::milliseconds kLook{100};  // while somebody waits

std::string pack(const std::vector<std::optional<std::string>>& given) {
  std::string all;
  for (const std::optional<std::string>& one : given) {
    for (int i = 0; i < 4; ++i) all += static_cast<char>(one->size() >> (8 * i) & 0xff);
    all += *one;
  }
  return all;
}

std::vector<std::string> unpack(const std::string& all) {
  std::vector<std::string> given;
  for (std::size_t at = 0; at + 4 <= all.size();) {
    std::size_t length = 0;
    for (std::size_t i = 4; i-- > 0;) length = length << 8 | static_cast<unsigned char>(all[at + i]);
    given.push_back(all.substr(at + 4, length));
    at += 4 + length;
  }
  return given;
}

std::string name(std::size_t rank) { return "rank " + std::to_string(rank); }

}  // namespace

std::string silence_text(int rank, double seconds, const std::string& busy) {
  return name(static_cast<std::size_t>(rank)) + " has sent nothing for " + format_duration(seconds) +
         (busy.empty() ? "" : ", and was " + busy);
}

/// The sockets, and the thread that serves them. On rank 0 it gathers and answers; elsewhere it hears rank 0.
class HostGroup::Service {
 public:
  Service(int rank, int size, double timeout, std::vector<FrameSocket> sockets)
      : rank_(rank),
        timeout_(timeout),
        sockets_(std::move(sockets)),
        left_(sockets_.size()),
        given_(static_cast<std::size_t>(rank == 0 ? size : 0)),
        notes_(sockets_.size()),
        posted_(sockets_.size()),
        beat_(std::clamp(timeout / 50, 0.02, 0.2)),
        wake_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
    if (!wake_) fail_resources(rank_text(rank, size), "no descriptor is free", errno);
    const BlockedSignals none;
    thread_ = std::jthread([this] { run(); });
  }
  ~Service() {
    {
      std::lock_guard lock(mutex_);
      if (!fault_)
        for (FrameSocket& socket : sockets_) socket.send(kBye, {});
      leave_by_ = after(kGrace);
    }
    wake();
  }

  std::vector<std::string> exchange(std::string own) {
    std::unique_lock lock(mutex_);
    std::string busy;
    std::swap(own_.busy, busy);  // it waits for others now
    beat();
    if (!fault_) {
      if (rank_ == 0)
        take(0, std::move(own));
      else if (left_[0])
        fail("rank 0 has left");
      else
        sockets_[0].send(kGiven, own);
    }
    wake();
    waiting_ = true;
    while (!changed_.wait_for(lock, kLook, [this] { return fault_ || result_; }))
      if (rank_ != 0 && notes_[0].silent > timeout_ + kLater)
        fail(kHang + silence_text(0, notes_[0].silent, notes_[0].busy));
    waiting_ = false;
    own_.busy = std::move(busy);
    beat();
    if (!result_) fail_communication(*fault_);
    return unpack(*std::exchange(result_, nullptr));
  }

  std::string be_busy(std::string what) {
    std::lock_guard lock(mutex_);
    std::swap(own_.busy, what);
    beat();
    return what;
  }

  std::optional<std::string> busy() const {
    std::lock_guard lock(mutex_);
    return somebody_busy();
  }

  void post(std::string text) {
    std::lock_guard lock(mutex_);
    sockets_[0].send(kPosted, text);
    wake();
  }

  std::string posted(std::size_t rank) {
    std::unique_lock lock(mutex_);
    std::deque<std::string>& posted = posted_[rank];
    auto gone = [&] { return left_[rank] || !sockets_[rank].open() || (fault_ && notes_[rank].silent > kSilent); };
    while (posted.empty() && !gone()) changed_.wait_for(lock, kLook);
    if (posted.empty()) fail_communication(fault_.value_or(name(rank) + " is gone"));
    std::string text = std::move(posted.front());
    posted.pop_front();
    return text;
  }

  /// `others`: how the others hear of it.
  void end(const std::string& text, const std::string& others) {
    std::lock_guard lock(mutex_);
    if (fault_) return;
    fail(others);
    fault_ = text;
    wake();
  }

  void note(std::string text) {
    std::lock_guard lock(mutex_);
    own_.text = std::move(text);
    if (rank_ == 0) notes_[0].text = own_.text;
  }

  std::vector<Note> notes() const {
    std::lock_guard lock(mutex_);
    return notes_;
  }

  std::optional<std::string> fault() const {
    std::lock_guard lock(mutex_);
    return fault_;
  }

 private:
  void wake() {
    const std::uint64_t one = 1;
    [[maybe_unused]] const ssize_t written = ::write(wake_.get(), &one, sizeof one);
  }

  std::size_t rank_of(std::size_t socket) const { return rank_ == 0 ? socket : 0; }

  void run() {
    try {
      serve_all();
    } catch (const std::exception& error) {  // out of memory, most likely
      end(error.what(), said_by(name(static_cast<std::size_t>(rank_)), error.what()));
    }
  }

  void serve_all() {
    RunningTime running;
    for (double last = 0, since_beat = 0;;) {
      std::vector<pollfd> polls = {{.fd = wake_.get(), .events = POLLIN, .revents = 0}};
      {
        std::lock_guard lock(mutex_);
        bool unsent = false;
        for (const FrameSocket& socket : sockets_) {
          if (socket.open()) polls.push_back({.fd = socket.descriptor(), .events = socket.events(), .revents = 0});
          unsent = unsent || socket.unsent();
        }
        if (leave_by_ && (!unsent || HostClock::now() > *leave_by_)) return;
      }
      ::poll(polls.data(), polls.size(), static_cast<int>(1000 * beat_));
      std::uint64_t count = 0;
      [[maybe_unused]] const ssize_t got = ::read(wake_.get(), &count, sizeof count);
      std::lock_guard lock(mutex_);
      const double time = running.look(), passed = time - std::exchange(last, time);
      for (Note& note : notes_) note.silent += passed;
      for (std::size_t i = 0; i < sockets_.size(); ++i) serve(i);
      if (since_beat += passed; since_beat >= beat_) beat(), since_beat = 0;
      if (gathering_ && !somebody_busy() && (waited_ += passed) > timeout_) fail(missing());
    }
  }

  /// Dropped where what went before has not gone out yet.
  void beat() {
    if (rank_ == 0) {
      notes_[0] = own_;  // never silent to itself
    } else if (!leave_by_ && !sockets_[0].unsent()) {
      sockets_[0].send(kBeat, own_.busy + '\0' + own_.text);
    }
  }

  std::optional<std::string> somebody_busy() const {
    if (!own_.busy.empty()) return name(static_cast<std::size_t>(rank_)) + " is " + own_.busy;
    for (std::size_t i = 0; i < notes_.size(); ++i)
      if (!notes_[i].busy.empty() && notes_[i].silent < kSilent)
        return rank_ == 0 ? name(i) + " is " + notes_[i].busy : notes_[i].busy;
    return std::nullopt;
  }

  void serve(std::size_t i) {
    FrameSocket& socket = sockets_[i];
    if (!socket.open()) return;
    socket.work();
    while (std::optional<Frame> frame = socket.next()) hear(i, std::move(*frame));
    if (!socket.open() && !left_[i]) fail(name(rank_of(i)) + " is gone: " + socket.why_closed());
  }

  void hear(std::size_t i, Frame frame) {
    switch (frame.kind) {
      case kGiven: return rank_ == 0 ? take(i, std::move(frame.bytes)) : fail("rank 0 speaks out of turn");
      case kResult: result_ = std::make_unique<std::string>(std::move(frame.bytes)); return changed_.notify_all();
      case kBye: left_[i] = true; return check_left();
      case kFaultFrame: return fail(frame.bytes);
      case kBeat: return hear_beat(i, frame.bytes);
      case kPosted: posted_[i].push_back(std::move(frame.bytes)); return changed_.notify_all();
      default: return fail(name(rank_of(i)) + " does not speak as ranks do");
    }
  }

  void hear_beat(std::size_t i, const std::string& bytes) {
    const std::size_t end = std::min(bytes.find('\0'), bytes.size());
    notes_[i] = {.text = bytes.substr(std::min(end + 1, bytes.size())), .busy = bytes.substr(0, end), .silent = 0};
    if (rank_ == 0 && !sockets_[i].unsent()) sockets_[i].send(kBeat, somebody_busy().value_or(""));
  }

  /// Rank 0: a rank's part of an exchange.
  void take(std::size_t rank, std::string bytes) {
    if (fault_) return;
    if (given_[rank]) return fail(name(rank) + " is ahead of the others");
    given_[rank] = std::move(bytes);
    if (!std::exchange(gathering_, true)) waited_ = 0;
    if (!std::all_of(given_.begin(), given_.end(), [](const auto& one) { return one.has_value(); }))
      return check_left();
    std::string all = pack(given_);
    if (all.size() > kMostResult) return fail("the ranks exchange " + std::to_string(all.size()) + " bytes at once");
    result_ = std::make_unique<std::string>(std::move(all));
    const WireFrame frame = wire_frame(kResult, *result_);
    for (FrameSocket& socket : sockets_) socket.send(frame);
    given_.assign(given_.size(), std::nullopt);
    gathering_ = false;
    changed_.notify_all();
  }

  /// A rank may leave when nobody waits for it.
  void check_left() {
    if (rank_ != 0 && waiting_ && !result_) return fail("rank 0 has left");
    if (!gathering_) return;
    for (std::size_t rank = 1; rank < left_.size(); ++rank)
      if (left_[rank] && !given_[rank]) return fail(name(rank) + " has left");
  }

  /// Who did not come, and who of them is silent as well: the others may be waiting for those.
  std::string missing() {
    std::string list, silent;
    for (std::size_t rank = 0; rank < given_.size(); ++rank) {
      if (given_[rank]) continue;
      list += (list.empty() ? "rank " : ", ") + std::to_string(rank);
      if (const Note& note = notes_[rank]; note.silent > kSilent)
        silent += "; " + silence_text(static_cast<int>(rank), note.silent, note.busy);
    }
    return kHang + list + " did not join an exchange within " + format_duration(timeout_) + silent;
  }

  /// The first fault counts. Rank 0 tells all; others tell rank 0.
  void fail(const std::string& text) {
    if (fault_) return;
    fault_ = text;
    gathering_ = false;
    const WireFrame frame = wire_frame(kFaultFrame, text);
    for (FrameSocket& socket : sockets_) socket.send(frame);
    changed_.notify_all();
  }

  const int rank_;
  const double timeout_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<FrameSocket> sockets_;  // rank 0: by rank; others: rank 0's
  std::vector<bool> left_;
  std::vector<std::optional<std::string>> given_;  // rank 0: of the exchange that is on
  std::vector<Note> notes_;                        // as the sockets
  std::vector<std::deque<std::string>> posted_;    // likewise
  Note own_;
  const double beat_;  // seconds between heartbeats
  std::unique_ptr<std::string> result_;
  std::optional<std::string> fault_;
  bool waiting_ = false;    // for the result of an exchange
  bool gathering_ = false;  // rank 0: somebody came to an exchange
  double waited_ = 0;       // seconds since then in which nobody was busy
  std::optional<HostClock::time_point> leave_by_;
  OwnedDescriptor wake_;
  std::jthread thread_;  // last: ends before what it uses
};

HostGroup::HostGroup(int rank, int size, const MeetingPoint& point, double timeout)
    : rank_(rank), size_(size), timeout_(timeout), unwinding_(std::uncaught_exceptions()) {
  if (rank < 0 || rank >= size) fail_internal("ranks", rank_text(rank, size));
  if (size > 1) service_ = std::make_unique<Service>(rank, size, timeout, join_ranks(rank, size, point, timeout));
}

HostGroup::~HostGroup() {
  if (std::uncaught_exceptions() > unwinding_) end("ended with an error");
}

std::vector<std::string> HostGroup::exchange(std::string own) {
  if (own.size() > kMostGiven) fail_internal("ranks", "a message of " + std::to_string(own.size()) + " bytes");
  if (service_) return service_->exchange(std::move(own));
  std::vector<std::string> all;
  all.push_back(std::move(own));
  return all;
}

std::string HostGroup::be_busy(std::string what) { return service_ ? service_->be_busy(std::move(what)) : what; }

void HostGroup::post(std::string text) {
  if (service_) service_->post(std::move(text));
}

std::string HostGroup::posted(int rank) { return service_->posted(static_cast<std::size_t>(rank)); }

std::optional<std::string> HostGroup::busy() const { return service_ ? service_->busy() : std::nullopt; }

void HostGroup::end(const std::string& text) noexcept {
  try {
    if (service_) service_->end(text, said_by(name(static_cast<std::size_t>(rank_)), text));
  } catch (...) {  // out of memory: the sockets close with the process
  }
}

void HostGroup::end_for(const std::string& text) noexcept {
  try {
    if (service_) service_->end(text, text);
  } catch (...) {  // out of memory: the sockets close with the process
  }
}

std::optional<std::string> HostGroup::fault() const { return service_ ? service_->fault() : std::nullopt; }

void HostGroup::note(std::string text) {
  if (service_) service_->note(std::move(text));
}

std::vector<HostGroup::Note> HostGroup::notes() const { return service_ ? service_->notes() : std::vector<Note>{}; }

}  // namespace quern
