#include "launch/rendezvous/frame_socket.h"

#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "base/files/durable_file.h"
#include "quern/error.h"

namespace quern {

namespace {

constexpr std::size_t kHeader = 5;  // the length of the bytes, least significant byte first, and the kind

std::size_t length_in(const std::string& in) {
  std::size_t length = 0;
  for (int i = 3; i >= 0; --i) length = length << 8 | static_cast<unsigned char>(in[static_cast<std::size_t>(i)]);
  return length;
}

/// A machine that is switched off says nothing; the system asks it.
void keep_alive(int socket) {
  constexpr int kOn = 1, kIdle = 10, kBetween = 5, kTimes = 4;  // seconds
  ::setsockopt(socket, SOL_SOCKET, SO_KEEPALIVE, &kOn, sizeof kOn);
  ::setsockopt(socket, IPPROTO_TCP, TCP_KEEPIDLE, &kIdle, sizeof kIdle);
  ::setsockopt(socket, IPPROTO_TCP, TCP_KEEPINTVL, &kBetween, sizeof kBetween);
  ::setsockopt(socket, IPPROTO_TCP, TCP_KEEPCNT, &kTimes, sizeof kTimes);
  ::setsockopt(socket, IPPROTO_TCP, TCP_NODELAY, &kOn, sizeof kOn);
}

int milliseconds_until(HostClock::time_point deadline) {
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - HostClock::now()).count();
  return static_cast<int>(std::clamp<std::int64_t>(left, 0, 1000));
}

bool would_block() { return errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR; }

using Addresses = std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)>;

/// An address to listen at: of the loopback interface, or of all.
bool bind_to(int socket, int family, int port, bool local) {
  if (family == AF_INET6) {
    sockaddr_in6 address{};
    address.sin6_family = AF_INET6;
    address.sin6_port = htons(static_cast<std::uint16_t>(port));
    address.sin6_addr = in6addr_any;
    constexpr int kOff = 0;  // IPv4 too
    ::setsockopt(socket, IPPROTO_IPV6, IPV6_V6ONLY, &kOff, sizeof kOff);
    return ::bind(socket, reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0;
  }
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<std::uint16_t>(port));
  address.sin_addr.s_addr = htonl(local ? INADDR_LOOPBACK : INADDR_ANY);
  return ::bind(socket, reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0;
}

int port_of(int socket) {
  sockaddr_storage address{};
  socklen_t size = sizeof address;
  ::getsockname(socket, reinterpret_cast<sockaddr*>(&address), &size);
  return ntohs(address.ss_family == AF_INET6 ? reinterpret_cast<const sockaddr_in6&>(address).sin6_port
                                             : reinterpret_cast<const sockaddr_in&>(address).sin_port);
}

std::string connect_one(const OwnedDescriptor& socket, const addrinfo& address, HostClock::time_point deadline) {
  if (::connect(socket.get(), address.ai_addr, address.ai_addrlen) == 0) return "";
  if (errno != EINPROGRESS) return std::strerror(errno);
  pollfd poll{.fd = socket.get(), .events = POLLOUT, .revents = 0};
  while (::poll(&poll, 1, milliseconds_until(deadline)) <= 0)
    if (HostClock::now() > deadline) return "no answer";
  int error = 0;
  socklen_t size = sizeof error;
  ::getsockopt(socket.get(), SOL_SOCKET, SO_ERROR, &error, &size);
  return error == 0 ? "" : std::strerror(error);
}

}  // namespace

HostClock::time_point after(double seconds) {
  constexpr double kMost = 1e9;  // the clock counts nanoseconds
  seconds = std::min(seconds, kMost);
  return HostClock::now() + std::chrono::duration_cast<HostClock::duration>(std::chrono::duration<double>(seconds));
}

WireFrame wire_frame(char kind, std::string_view bytes) {
  if (bytes.size() > 0xffffffffu) fail_internal("ranks", "a message of " + std::to_string(bytes.size()) + " bytes");
  std::string frame;
  frame.reserve(kHeader + bytes.size());
  for (int i = 0; i < 4; ++i) frame += static_cast<char>(bytes.size() >> (8 * i) & 0xff);
  frame += kind;
  frame += bytes;
  return std::make_shared<const std::string>(std::move(frame));
}

FrameSocket::FrameSocket(OwnedDescriptor socket, std::size_t most_bytes)
    : socket_(std::move(socket)), most_bytes_(most_bytes) {
  static_assert(kRead == POLLIN && kWrite == POLLOUT);
  if (socket_) keep_alive(socket_.get());
}

void FrameSocket::send(WireFrame frame) {
  if (!open()) return;
  out_.push_back(std::move(frame));
  write();
}

void FrameSocket::work() {
  if (open()) write();
  if (open()) read();
}

void FrameSocket::write() {
  while (!out_.empty()) {
    const std::string& frame = *out_.front();
    const ssize_t now = ::send(socket_.get(), frame.data() + sent_, frame.size() - sent_, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (now < 0) {
      if (!would_block()) out_.clear();  // whether the peer is gone is for read() to find, after what it sent last
      return;
    }
    sent_ += static_cast<std::size_t>(now);
    if (sent_ < frame.size()) return;
    out_.pop_front();
    sent_ = 0;
  }
}

void FrameSocket::read() {
  char bytes[1 << 16];
  // No more than a frame at once: a peer that sends without end must not keep the others from being heard.
  for (std::size_t most = kHeader + most_bytes_; in_.size() < most;) {
    const ssize_t got = ::recv(socket_.get(), bytes, std::min(sizeof bytes, most - in_.size()), MSG_DONTWAIT);
    if (got > 0)
      in_.append(bytes, static_cast<std::size_t>(got));
    else if (got == 0 || !would_block())
      return error_ = got == 0 ? 0 : errno, close();
    else
      break;
  }
  if (in_.size() >= kHeader && length_in(in_) > most_bytes_) error_ = EMSGSIZE, close();
}

std::string FrameSocket::why_closed() const {
  const bool ended = error_ == 0 || error_ == ECONNRESET || error_ == EPIPE;
  return ended ? "its process has ended" : std::string("the connection failed: ") + std::strerror(error_);
}

std::optional<Frame> FrameSocket::next() {
  if (in_.size() < kHeader) return std::nullopt;
  const std::size_t length = length_in(in_);
  if (length > most_bytes_ || in_.size() < kHeader + length) return std::nullopt;
  Frame frame{in_[4], in_.substr(kHeader, length)};
  in_.erase(0, kHeader + length);
  return frame;
}

std::optional<Frame> receive(FrameSocket& socket, HostClock::time_point deadline) {
  for (;;) {
    if (std::optional<Frame> frame = socket.next()) return frame;
    if (!socket.open() || HostClock::now() > deadline) return std::nullopt;
    pollfd poll{.fd = socket.descriptor(), .events = socket.events(), .revents = 0};
    ::poll(&poll, 1, milliseconds_until(deadline));
    socket.work();
  }
}

Listener listen_for_ranks(int port, bool local) {
  constexpr int kOn = 1;
  int error = 0;
  for (const int family : {AF_INET6, AF_INET}) {
    if (local && family == AF_INET6) continue;
    OwnedDescriptor socket(::socket(family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    if (socket) ::setsockopt(socket.get(), SOL_SOCKET, SO_REUSEADDR, &kOn, sizeof kOn);
    if (socket && bind_to(socket.get(), family, port, local) && ::listen(socket.get(), SOMAXCONN) == 0) {
      const int got = port_of(socket.get());
      return {std::move(socket), got};
    }
    error = errno;
    if (error == EADDRINUSE) break;
  }
  if (error == EMFILE || error == ENFILE) fail_resources("the rendezvous of ranks", "no descriptor is free", error);
  throw Error(error == EADDRINUSE || error == EACCES ? ErrorCode::config : ErrorCode::resources,
              {.where = "port " + std::to_string(port),
               .what = "rank 0 cannot listen there",
               .found = std::strerror(error),
               .expected = "a free port above 1023",
               .next = "name another one in QUERN_RENDEZVOUS, or end the program that uses it"});
}

bool descriptors_are_full() { return errno == EMFILE || errno == ENFILE || errno == ENOMEM || errno == ENOBUFS; }

OwnedDescriptor accept_rank(const Listener& listener, IfFull if_full) {
  // Without a free descriptor accept4 says so even when nobody calls.
  pollfd poll{.fd = listener.socket.get(), .events = POLLIN, .revents = 0};
  if (::poll(&poll, 1, 0) <= 0) return errno = EAGAIN, OwnedDescriptor();
  OwnedDescriptor peer(::accept4(listener.socket.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
  if (!peer && if_full == IfFull::fail && descriptors_are_full())
    throw Error(ErrorCode::resources, {.where = "the rendezvous of ranks",
                                       .what = "rank 0 cannot take the connections of all",
                                       .found = std::strerror(errno),
                                       .next = "raise the limit on open files: ulimit -n"});
  return peer;
}

OwnedDescriptor connect_to_rank(const std::string& host, int port, HostClock::time_point deadline, std::string& fault) {
  addrinfo wanted{}, *found = nullptr;
  wanted.ai_socktype = SOCK_STREAM;
  if (const int error = ::getaddrinfo(host.c_str(), std::to_string(port).c_str(), &wanted, &found)) {
    fault = ::gai_strerror(error);
    return {};
  }
  const Addresses addresses(found, ::freeaddrinfo);
  for (const addrinfo* address = found; address; address = address->ai_next) {
    OwnedDescriptor socket(::socket(address->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    fault = socket ? connect_one(socket, *address, deadline) : std::strerror(errno);
    if (fault.empty()) return socket;
  }
  return {};
}

std::vector<std::string> own_hosts() {
  std::vector<std::string> hosts;
  ifaddrs* first = nullptr;
  if (::getifaddrs(&first) != 0) first = nullptr;
  for (const ifaddrs* at = first; at; at = at->ifa_next) {
    if (!at->ifa_addr || (at->ifa_flags & IFF_LOOPBACK) || !(at->ifa_flags & IFF_UP)) continue;
    const bool v6 = at->ifa_addr->sa_family == AF_INET6;
    if (!v6 && at->ifa_addr->sa_family != AF_INET) continue;
    if (v6 && IN6_IS_ADDR_LINKLOCAL(&reinterpret_cast<const sockaddr_in6*>(at->ifa_addr)->sin6_addr)) continue;
    char text[NI_MAXHOST];
    if (::getnameinfo(at->ifa_addr, v6 ? sizeof(sockaddr_in6) : sizeof(sockaddr_in), text, sizeof text, nullptr, 0,
                      NI_NUMERICHOST) == 0)
      hosts.emplace_back(text);
  }
  if (first) ::freeifaddrs(first);
  char name[256] = {};
  if (::gethostname(name, sizeof name - 1) == 0) hosts.emplace_back(name);
  return hosts;
}

}  // namespace quern
