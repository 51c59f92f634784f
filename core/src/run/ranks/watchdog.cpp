#include "run/ranks/watchdog.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <chrono>
#include <utility>
#include <vector>

#include "base/blocked_signals.h"
#include "base/clock.h"
#include "base/files/descriptor.h"
#include "base/files/durable_file.h"
#include "base/format.h"
#include "launch/local_ranks.h"
#include "quern/error.h"
#include "quern/running_time.h"

namespace quern {

namespace {

constexpr std::chrono::milliseconds kSample{2};  // of what the compute stream does
constexpr double kLater = 3;                     // s: the state of all ranks is printed first
constexpr double kGrace = 5, kLeave = 60;        // s that the run has to hear of a fault, and then to end
constexpr const char* kReportName = "hang.rank";
constexpr std::chrono::seconds kReport{2};  // that the end waits for a report

std::string name(std::size_t rank) { return "rank " + std::to_string(rank); }

/// Whatever is there, a link or a pipe, is replaced, and not written to.
void write_anew(const std::string& path, const std::string& text) {
  ::unlink(path.c_str());
  const OwnedDescriptor file(::open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0644));
  if (file) write_all(file.get(), text);
}

/// What ranks note: how far they are, how long they have been in that collective, and its name.
struct Position {
  Progress::Number number = 0;
  double stuck = 0;
  std::string text = "no collective yet";
};

std::string pack(const Position& position) {
  return std::to_string(position.number) + " " + std::to_string(position.stuck) + " " + position.text;
}

Position unpack(const std::string& note) {
  Position position;
  const char* const end = note.data() + note.size();
  const auto number = std::from_chars(note.data(), end, position.number);
  if (number.ec != std::errc{} || number.ptr == end) return position;
  const auto stuck = std::from_chars(number.ptr + 1, end, position.stuck);
  if (stuck.ec == std::errc{} && stuck.ptr != end) position.text.assign(stuck.ptr + 1, end);
  return position;
}

struct RankState {
  Position position;
  double silent = 0;  // s
};

/// "rank 2 has waited 60s for all_gather ..."; `all` by rank.
std::string hang_text(std::size_t waiting, const std::vector<RankState>& all) {
  const Position& there = all[waiting].position;
  std::string text = kHang + name(waiting) + " has waited " + format_duration(there.stuck) + " for " + there.text;
  bool behind = false;
  for (std::size_t rank = 0; rank < all.size(); ++rank) {
    const auto& [position, silent] = all[rank];
    if (!Progress::earlier(position.number, there.number)) continue;
    behind = true;
    text += "; " + name(rank) + " has not reached it: ";
    text += silent > kSilent ? "its last message, " + format_duration(silent) + " ago, named " : "it has reached ";
    text += position.text;
  }
  return behind ? text : text + "; all ranks are in it";
}

}  // namespace

void remove_hang_reports(const std::string& directory) noexcept { remove_named(directory, kReportName, ".txt"); }

Watchdog::Watchdog(HostGroup& hosts, std::string directory, std::function<std::string()> how_to_continue)
    : hosts_(hosts), directory_(std::move(directory)), how_to_continue_(std::move(how_to_continue)) {
  const BlockedSignals none;
  thread_ = std::jthread([this](const std::stop_token& stop) { run(stop); });
}

Watchdog::~Watchdog() {
  thread_ = {};
  await_report();
}

void Watchdog::connecting(Communicator& communicator) { communicator_ = &communicator; }

void Watchdog::connected(std::shared_ptr<const Progress> progress) {
  kept_ = std::move(progress);
  progress_ = kept_.get();
}

void Watchdog::run(const std::stop_token& stop) {
  const double period = std::clamp(hosts_.timeout() / 50, 0.02, 0.2);
  RunningTime running;
  double last = 0, since_look = 0;
  while (!stop.stop_requested() || (ended_ && !aborted_)) {
    std::this_thread::sleep_for(kSample);
    const double time = running.look(), passed = time - std::exchange(last, time);
    if (const Progress* progress = progress_) {
      if (progress->waiting()) waited_ = waited_ + passed;
      const Progress::Number number = progress->number();
      if (number != number_ || !Progress::inside(number))
        stuck_ = 0;
      else if (!busy_)
        stuck_ += passed;
      number_ = number;
    } else if (communicator_ && !busy_) {
      connecting_ += passed;
    }
    since_look += passed;
    if (since_look >= period) look(), since_look = 0;
  }
}

void Watchdog::look() {
  if (const std::optional<std::string> fault = hosts_.fault()) return end(*fault);
  const Progress* const progress = progress_;
  if (progress)
    if (const std::optional<std::string> fault = communicator_.load()->error())
      return hosts_.end("communicator " + communicator_.load()->traits().id + ": " + *fault + silent_ranks());
  Position own;
  if (progress) own = {number_, stuck_, progress->text(number_)};
  hosts_.note(pack(own));
  busy_ = hosts_.busy().has_value();
  if (const std::lock_guard lock(mutex_); stuck_ > hosts_.timeout() / 2) seen_ = progress->report();
  const std::vector<HostGroup::Note> notes = hosts_.notes();
  const double timeout = hosts_.timeout();
  if (!progress && connecting_ > timeout + kLater)  // later than ranks that say nothing are named
    return declare(kHang + name(static_cast<std::size_t>(hosts_.rank())) + " has been connecting by " +
                   communicator_.load()->traits().id + " for " + format_duration(connecting_));
  if (hosts_.rank() == 0) return judge(notes);
  if (notes[0].silent > timeout)
    declare(kHang + silence_text(0, notes[0].silent, notes[0].busy) +
            (Progress::inside(number_) ? "; here: " + own.text : ""));
}

/// Rank 0: whether somebody has waited for too long; of those, who waits for what comes first.
void Watchdog::judge(const std::vector<HostGroup::Note>& notes) {
  const double timeout = hosts_.timeout();
  std::vector<RankState> all;
  for (const HostGroup::Note& note : notes) all.push_back({unpack(note.text), note.silent});
  const RankState* first = nullptr;
  for (const RankState& one : all)
    if (one.position.stuck > timeout && (!first || Progress::earlier(one.position.number, first->position.number)))
      first = &one;
  if (first) return declare(hang_text(static_cast<std::size_t>(first - all.data()), all));
  for (std::size_t rank = 0; rank < all.size(); ++rank)
    if (all[rank].silent > timeout + 1)  // who waits for it says for what
      return declare(kHang + silence_text(static_cast<int>(rank), all[rank].silent, notes[rank].busy) +
                     "; it had reached " + all[rank].position.text);
}

std::string Watchdog::silent_ranks() const {
  std::string text;
  const std::vector<HostGroup::Note> notes = hosts_.notes();
  for (std::size_t rank = 0; rank < notes.size(); ++rank)
    if (notes[rank].silent > kSilent)
      text += "; " + silence_text(static_cast<int>(rank), notes[rank].silent, notes[rank].busy);
  return text;
}

void Watchdog::leaving() {
  leaving_ = true;
  if (const std::optional<std::string> fault = hosts_.fault()) report(*fault);
}

void Watchdog::declare(const std::string& fault) {
  report(fault);
  hosts_.end_for(fault);
}

/// Of a hang. Streams go on as soon as one rank lets go, so that earlier observations count.
void Watchdog::report(const std::string& fault) {
  if (!fault.starts_with(kHang)) return;
  std::call_once(reported_, [&] {
    const std::lock_guard lock(mutex_);
    const Progress* const progress = progress_;
    const std::string text = fault + "\n\n" + (seen_.empty() && progress ? progress->report() : seen_);
    const std::string path = directory_ + "/" + kReportName + std::to_string(hosts_.rank()) + ".txt";
    std::packaged_task<void()> write([=] { write_anew(path, text); });
    report_ = write.get_future().share();
    const BlockedSignals none;
    std::thread(std::move(write)).detach();
  });
}

void Watchdog::await_report() const {
  if (report_.valid()) report_.wait_for(kReport);
}

void Watchdog::end(const std::string& fault) {
  if (!ended_) {
    ended_ = now();
    aborting_ = std::jthread([this, called = progress_ != nullptr] {
      if (called) communicator_.load()->abort();
      aborted_ = true;
    });
    report(fault);
  }
  if (now() - *ended_ < (leaving_ ? kLeave : kGrace) || held_.use_count() > 1) return;
  await_report();
  const std::string next = how_to_continue_();
  write_if_taken(STDERR_FILENO, "quern: error: " + rank_prefix() + fault + (next.empty() ? "" : "; ") + next + "\n",
                 std::chrono::seconds(1));
  ::_exit(static_cast<int>(ErrorCode::communication));  // the main thread hangs, and destructors would too
}

}  // namespace quern
