#include "launch/starter_link.h"

#include <fcntl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <thread>
#include <utility>

#include "base/blocked_signals.h"
#include "base/files/durable_file.h"

namespace quern {

namespace {

constexpr char kBegins = '+', kEnds = '-';  // a work of a rank that needs time
constexpr char kTrains = '!';

void say(int link, std::string_view text) noexcept {
  [[maybe_unused]] const ssize_t sent = ::send(link, text.data(), text.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
}

}  // namespace

RankLink::RankLink() {
  int ends[2] = {-1, -1};
  if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) != 0)
    fail_resources("ranks", "no descriptor is free", errno);
  own_ = OwnedDescriptor(ends[0]);
  theirs_ = OwnedDescriptor(ends[1]);
}

void RankLink::send_signal(int signal) const noexcept { say(own_.get(), std::to_string(signal) + "\n"); }

bool RankLink::read() {
  char bytes[256];
  for (;;) {
    const ssize_t got = ::recv(own_.get(), bytes, sizeof bytes, MSG_DONTWAIT);
    if (got < 0) return errno == EAGAIN || errno == EINTR;
    if (got == 0) return works_ = 0, false;
    for (ssize_t i = 0; i < got; ++i) {
      works_ += bytes[i] == kBegins ? 1 : bytes[i] == kEnds ? -1 : 0;
      trains_ = trains_ || bytes[i] == kTrains;
    }
  }
}

int starter_of_this_rank() {
  const char* const text = std::getenv(kStarterVariable);
  const int starter = text ? std::atoi(text) : 0;
  return starter == ::getppid() ? starter : 0;
}

void hear_starter(std::function<void(int signal)> on_signal) {
  if (starter_of_this_rank() == 0) return;
  ::fcntl(kLinkOfRank, F_SETFD, FD_CLOEXEC);
  const BlockedSignals none;
  std::thread([on_signal = std::move(on_signal)] {
    for (int signal = 0;;) {
      char digit = 0;
      const ssize_t got = ::recv(kLinkOfRank, &digit, 1, 0);
      if (got < 0 && errno == EINTR) continue;
      if (got <= 0) return;  // the system ends this process with its starter
      if (digit != '\n')
        signal = 10 * signal + (digit - '0');
      else
        on_signal(std::exchange(signal, 0));
    }
  }).detach();
}

void tell_starter_of_training() {
  if (starter_of_this_rank() != 0) say(kLinkOfRank, {&kTrains, 1});
}

std::shared_ptr<void> time_from_starter() {
  if (starter_of_this_rank() == 0) return nullptr;
  say(kLinkOfRank, {&kBegins, 1});
  return {nullptr, [](void*) { say(kLinkOfRank, {&kEnds, 1}); }};
}

}  // namespace quern
