#include "log/background_output.h"

#include <unistd.h>

#include <algorithm>
#include <condition_variable>
#include <csignal>
#include <deque>
#include <mutex>
#include <thread>
#include <utility>

#include "base/files/descriptor.h"

namespace quern {

namespace {

std::int64_t lines_in(const std::string& text) {
  return std::max<std::int64_t>(1, std::count(text.begin(), text.end(), '\n'));
}

/// Threads that start meanwhile take no signals.
class NoSignals {
 public:
  NoSignals() {
    sigset_t all;
    sigfillset(&all);
    ::pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  ~NoSignals() { ::pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  NoSignals(const NoSignals&) = delete;
  NoSignals& operator=(const NoSignals&) = delete;

 private:
  sigset_t before_;
};

}  // namespace

struct BackgroundOutput::Queue {
  int descriptor;
  std::size_t capacity;
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<std::string> texts;  // the first is the one being written
  std::size_t bytes = 0;
  std::int64_t dropped = 0;  // lines, since the last that was taken
  bool ending = false, ended = false, failed = false;

  void take(std::string text) {
    bytes += text.size();
    texts.push_back(std::move(text));
    changed.notify_all();
  }
  void take_notice() {
    if (dropped > 0) take("(" + std::to_string(dropped) + " lines dropped: the reader stalled)\n");
    dropped = 0;
  }
  void add(std::string text) {
    std::lock_guard lock(mutex);
    if (failed) return;
    if (bytes + text.size() > capacity && !texts.empty()) {
      dropped += lines_in(text);
      return;
    }
    take_notice();
    take(std::move(text));
  }
  void run() {
    std::unique_lock lock(mutex);
    for (;;) {
      changed.wait(lock, [this] { return ending || !texts.empty(); });
      if (texts.empty()) break;
      const std::string& text = texts.front();  // a deque's elements stay where they are
      lock.unlock();
      const bool written = write_all(descriptor, text);
      lock.lock();
      bytes -= texts.front().size();
      texts.pop_front();
      if (written) continue;
      failed = true;
      texts.clear();
      bytes = 0;
    }
    ended = true;
    changed.notify_all();
  }
};

BackgroundOutput::BackgroundOutput(std::ostream& stream, int descriptor, std::size_t capacity,
                                   std::chrono::milliseconds patience)
    : stream_(stream), patience_(patience), queue_(std::make_shared<Queue>()) {
  queue_->descriptor = descriptor;
  queue_->capacity = capacity;
  stream_.flush();
  {
    const NoSignals none;
    std::thread([queue = queue_] { queue->run(); }).detach();
  }
  own_ = stream_.rdbuf(this);
}

BackgroundOutput::~BackgroundOutput() {
  sync();
  stream_.rdbuf(own_);
  std::unique_lock lock(queue_->mutex);
  queue_->ending = true;
  std::int64_t unread = queue_->dropped;
  for (const std::string& text : queue_->texts) unread += lines_in(text);
  queue_->take_notice();
  queue_->changed.notify_all();
  const bool ended = queue_->changed.wait_for(lock, patience_, [this] { return queue_->ended; });
  if (queue_->failed) stream_.setstate(std::ios::badbit);
  if (ended) return;
  const std::string notice = "quern: warning: the reader of the output stalled; its last lines are missing, up to " +
                             std::to_string(unread) + "\n";
  write_if_taken(STDERR_FILENO, notice, std::chrono::milliseconds(0));
}

BackgroundOutput::int_type BackgroundOutput::overflow(int_type c) {
  if (!traits_type::eq_int_type(c, traits_type::eof())) text_ += traits_type::to_char_type(c);
  return traits_type::not_eof(c);
}

std::streamsize BackgroundOutput::xsputn(const char* text, std::streamsize count) {
  text_.append(text, static_cast<std::size_t>(count));
  return count;
}

int BackgroundOutput::sync() {
  if (!text_.empty()) queue_->add(std::exchange(text_, {}));
  return 0;
}

}  // namespace quern
