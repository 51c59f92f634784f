#include "wire.h"

#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <thread>

#include "quern/error.h"
#include "quern/running_time.h"

namespace quern::mpi {

using collectives::Call;

namespace {

using Clock = std::chrono::steady_clock;
using Microseconds = std::chrono::microseconds;

constexpr Microseconds kLongestSleep{500};
constexpr Microseconds kLook{64};  // who waits this long looks after its peers
constexpr Microseconds kTell{200'000};

std::string who(int rank) { return "rank " + std::to_string(rank); }

std::string text_of(int error) {
  char text[MPI_MAX_ERROR_STRING] = {};
  int length = 0;
  MPI_Error_string(error, text, &length);
  return text;
}

/// Tests again and again, with pauses that grow; until `done`, which is given the pause so far, says so.
template <class Done>
void poll_until(const Done& done) {
  for (Microseconds pause{1}; !done(pause); pause = std::min(2 * pause, kLongestSleep))
    pause < Microseconds{16} ? std::this_thread::yield() : std::this_thread::sleep_for(pause);
}

}  // namespace

/// A message that is on its way.
struct Wire::Pending {
  Transfer transfer;
  bool comes;
  MPI_Request request = MPI_REQUEST_NULL;
  bool over = false;
};

Wire::Wire(const Rendezvous& rendezvous)
    : rank_(rendezvous.rank), size_(rendezvous.size), timeout_(rendezvous.timeout), letters_(new Letters) {
  const std::vector<Member> members = mpi::meet(rendezvous);
  const auto ranks = static_cast<std::size_t>(size_);
  letters_->calls.resize(ranks);
  left_ = std::make_unique<std::atomic<bool>[]>(ranks);
  const Member& own = members[static_cast<std::size_t>(rank_)];
  for (const Member& member : members)
    processes_.push_back(member.machine == own.machine && member.process != own.process
                             ? static_cast<int>(::syscall(SYS_pidfd_open, member.process, 0))
                             : -1);
  group_ = begin_group(members);
  listen();
}

Wire::~Wire() {
  for (const int process : processes_)
    if (process >= 0) ::close(process);
  if (failed_)
    (void)letters_.release();
  else
    end_group(group_);
}

// ---- messages ----

bool Wire::move(Channel channel, const std::vector<Transfer>& out, const std::vector<Transfer>& in,
                const std::string& what) {
  if (failed_) return false;
  std::vector<Pending> all;
  for (const Transfer& transfer : in) all.push_back({transfer, true});
  for (const Transfer& transfer : out) all.push_back({transfer, false});
  for (Pending& one : all) {
    const auto& [peer, memory, bytes] = one.transfer;
    const int count = static_cast<int>(bytes), tag = static_cast<int>(channel);
    const int result = one.comes ? MPI_Irecv(memory, count, MPI_BYTE, peer, tag, group_, &one.request)
                                 : MPI_Isend(memory, count, MPI_BYTE, peer, tag, group_, &one.request);
    if (result != MPI_SUCCESS) return fail(what + " with " + who(peer) + ": " + text_of(result)), false;
  }
  RunningTime waited;
  poll_until([&](Microseconds pause) {
    const bool looks = pause >= kLook;
    if (looks) look();  // before the test: who left has sent all
    const Pending* missing = nullptr;
    for (Pending& one : all)
      if (!done(one) && !missing) missing = &one;
    if (!missing || failed_) return true;
    const int peer = missing->transfer.peer;
    if (looks && left_[static_cast<std::size_t>(peer)]) fail(who(peer) + " left the group");
    if (waited.look() > timeout_) {
      char seconds[32];
      std::snprintf(seconds, sizeof seconds, "%g s", timeout_);
      fail(who(peer) + " did not come to " + what + " within " + seconds);
    }
    return failed_.load();
  });
  return !failed_;
}

bool Wire::done(Pending& pending) {
  if (pending.over) return true;
  int over = 0, bytes = 0;
  MPI_Status status;
  const int result = MPI_Test(&pending.request, &over, &status);
  const auto& [peer, memory, expected] = pending.transfer;
  int kind = MPI_SUCCESS;
  if (result != MPI_SUCCESS) MPI_Error_class(result, &kind);
  if (kind != MPI_SUCCESS && kind != MPI_ERR_TRUNCATE) fail("a message with " + who(peer) + ": " + text_of(result));
  if (over && pending.comes && kind == MPI_SUCCESS) MPI_Get_count(&status, MPI_BYTE, &bytes);
  if (kind == MPI_ERR_TRUNCATE || (over && pending.comes && static_cast<std::size_t>(bytes) != expected))
    fail(who(peer) + " sends another size: found " +
         (kind == MPI_ERR_TRUNCATE ? "more bytes" : std::to_string(bytes) + " bytes") + ", where " + who(rank_) +
         " receives " + std::to_string(expected));
  return pending.over = over != 0;
}

bool Wire::meet(const Call& call) {
  letters_->own = call;
  std::vector<Transfer> out = empty_messages(), in = out;
  for (Transfer& transfer : out) transfer = {transfer.peer, reinterpret_cast<char*>(&letters_->own), sizeof(Call)};
  for (Transfer& transfer : in)
    transfer = {transfer.peer, reinterpret_cast<char*>(&letters_->calls[static_cast<std::size_t>(transfer.peer)]),
                sizeof(Call)};
  if (!move(Channel::calls, out, in, call.text())) return false;
  for (const Transfer& transfer : in)
    if (const Call& other = letters_->calls[static_cast<std::size_t>(transfer.peer)]; other != call)
      fail(collectives::difference(transfer.peer, other, rank_, call));
  return !failed_;
}

bool Wire::barrier() { return move(Channel::barrier, empty_messages(), empty_messages(), "a barrier"); }

std::vector<Transfer> Wire::empty_messages() const {
  std::vector<Transfer> messages;
  for (int step = 1; step < size_; ++step) messages.push_back({(rank_ + step) % size_, nullptr, 0});
  return messages;
}

// ---- how the others are ----

void Wire::listen() {
  MPI_Irecv(&letters_->heard, sizeof(Notice), MPI_BYTE, MPI_ANY_SOURCE, static_cast<int>(Channel::notices), group_,
            &notice_);
}

void Wire::look() noexcept {
  const std::lock_guard lock(look_mutex_);
  std::vector<int> ended;  // before their notices are heard: who told why it ends has done so
  for (int peer = 0; peer < size_; ++peer)
    if (process_ended(peer)) ended.push_back(peer);
  for (int came = 1; heard_ < size_ - 1 && !failed_;) {
    MPI_Status status;
    if (MPI_Test(&notice_, &came, &status) != MPI_SUCCESS || !came) break;
    hear(status.MPI_SOURCE);
  }
  std::erase_if(ended, [&](int peer) { return left_[static_cast<std::size_t>(peer)].load(); });
  if (ended.empty()) return;
  std::string names = who(ended[0]);  // all of them: one may have ended because of another, too soon to tell
  for (std::size_t i = 1; i < ended.size(); ++i) names += " and " + who(ended[i]);
  fail(names + (ended.size() == 1 ? " is gone: its process ended" : " are gone: their processes ended"));
}

void Wire::hear(int peer) {
  const Notice& notice = letters_->heard;
  if (notice.fault[0] != 0) return fail(std::string(notice.fault, ::strnlen(notice.fault, sizeof notice.fault)));
  left_[static_cast<std::size_t>(peer)] = true;
  if (++heard_ < size_ - 1) listen();
}

bool Wire::process_ended(int peer) const {
  pollfd life{.fd = processes_[static_cast<std::size_t>(peer)], .events = POLLIN, .revents = 0};
  return life.fd >= 0 && ::poll(&life, 1, 0) == 1;
}

std::optional<std::string> Wire::fault() const {
  if (!failed_) return std::nullopt;
  const std::lock_guard lock(mutex_);
  return fault_;
}

void Wire::fail(const std::string& text) noexcept {
  const std::lock_guard lock(mutex_);
  if (failed_) return;
  fault_ = text;
  failed_ = true;
}

void Wire::tell() noexcept {
  Notice& notice = letters_->sent;
  const std::string text = fault().value_or("");
  notice.fault[text.copy(notice.fault, sizeof notice.fault - 1)] = 0;
  std::vector<MPI_Request> requests(static_cast<std::size_t>(size_), MPI_REQUEST_NULL);
  for (const Transfer& to : empty_messages())
    MPI_Isend(&notice, sizeof notice, MPI_BYTE, to.peer, static_cast<int>(Channel::notices), group_,
              &requests[static_cast<std::size_t>(to.peer)]);
  const auto begin = Clock::now();
  poll_until([&](Microseconds) {
    int over = 0;
    const int result = MPI_Testall(size_, requests.data(), &over, MPI_STATUSES_IGNORE);
    return over || result != MPI_SUCCESS || Clock::now() - begin > kTell;
  });
}

void Wire::leave() {
  if (failed_) return;
  letters_->sent.fault[0] = 0;
  std::vector<Transfer> out = empty_messages();
  for (Transfer& transfer : out) transfer = {transfer.peer, reinterpret_cast<char*>(&letters_->sent), sizeof(Notice)};
  if (!move(Channel::notices, out, {}, "the end")) return;
  RunningTime waited;
  poll_until([&](Microseconds) {
    look();
    if (waited.look() > timeout_) fail("not all ranks came to the end");
    return failed_ || heard_ == size_ - 1;
  });
}

}  // namespace quern::mpi
