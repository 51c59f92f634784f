#include "meeting.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <thread>

#include "quern/error.h"

namespace quern::memcpy {

namespace {

using Clock = std::chrono::steady_clock;

/// The first byte of each packet.
constexpr char kGiven = 'g', kFault = 'f';
/// Rank 0 gives up first and says whom it waited for.
constexpr double kLater = 2;  // seconds

[[noreturn]] void refuse(ErrorCode code, std::string what, std::string found, std::string expected, std::string next) {
  throw Error(code, {.where = "communicator memcpy",
                     .what = std::move(what),
                     .found = std::move(found),
                     .expected = std::move(expected),
                     .next = std::move(next)});
}

[[noreturn]] void refuse_full() {
  refuse(ErrorCode::resources, "no descriptor is free", std::strerror(EMFILE), "one for each rank and more",
         "raise the limit on open files: ulimit -n");
}

[[noreturn]] void fault(const std::string& text) {
  throw Error(ErrorCode::communication, {.where = "communicator memcpy", .what = text});
}

Clock::time_point after(double seconds) {
  constexpr double kMost = 1e9;  // the clock counts nanoseconds
  seconds = std::min(seconds, kMost);
  return Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
}

std::string seconds_text(double seconds) {
  std::string text = std::to_string(seconds);
  text.erase(text.find_last_not_of('0') + 1);
  if (text.back() == '.') text.pop_back();
  return text + " s";
}

/// Whether `socket` has something to read, or its end, by then.
bool readable(int socket, Clock::time_point deadline) {
  for (;;) {
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now()).count();
    pollfd poll{.fd = socket, .events = POLLIN, .revents = 0};
    constexpr std::int64_t kMost = 60'000;  // ms
    const int ready = ::poll(&poll, 1, static_cast<int>(std::clamp<std::int64_t>(left, 0, kMost)));
    if (ready > 0) return true;
    if (left <= 0 || (ready < 0 && errno != EINTR)) return false;
  }
}

/// One packet: a byte that says what it is, the bytes, and the descriptor if there is one. False: nobody is there.
bool send(int socket, char kind, const std::string& bytes, int descriptor) noexcept {
  iovec parts[] = {{&kind, 1}, {const_cast<char*>(bytes.data()), bytes.size()}};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr packet{};
  packet.msg_iov = parts;
  packet.msg_iovlen = 2;
  if (descriptor >= 0) {
    packet.msg_control = control;
    packet.msg_controllen = sizeof control;
    cmsghdr* header = CMSG_FIRSTHDR(&packet);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof(int));
    std::memcpy(CMSG_DATA(header), &descriptor, sizeof(int));
  }
  ssize_t sent = 0;
  do sent = ::sendmsg(socket, &packet, MSG_NOSIGNAL);
  while (sent < 0 && errno == EINTR);
  return sent >= 0;
}

/// A packet that is there. Throws what `who` says is the fault; a connection that ended is `who`'s fault.
Message receive(int socket, const std::string& who) {
  Message message;
  std::string bytes(Meeting::kMostBytes + 1, 0);
  iovec part{bytes.data(), bytes.size()};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr packet{};
  packet.msg_iov = &part;
  packet.msg_iovlen = 1;
  packet.msg_control = control;
  packet.msg_controllen = sizeof control;
  // A peer that closed without reading all is reported once, before its messages.
  ssize_t got = 0;
  bool reset = false;
  do got = ::recvmsg(socket, &packet, MSG_CMSG_CLOEXEC);
  while (got < 0 && (errno == EINTR || (errno == ECONNRESET && !std::exchange(reset, true))));
  if (got < 0 && errno != ECONNRESET) fault(who + " is gone: " + std::strerror(errno));
  if (got <= 0) fault(who + " is gone");
  if (packet.msg_flags & MSG_CTRUNC) refuse_full();
  for (cmsghdr* header = CMSG_FIRSTHDR(&packet); header != nullptr; header = CMSG_NXTHDR(&packet, header)) {
    int descriptor = -1;
    if (header->cmsg_type == SCM_RIGHTS) std::memcpy(&descriptor, CMSG_DATA(header), sizeof(int));
    message.descriptor = Descriptor(descriptor);
  }
  bytes.resize(static_cast<std::size_t>(got));
  if (bytes[0] == kFault) fault(bytes.substr(1));
  message.bytes = bytes.substr(1);
  return message;
}

bool same_user(int socket) {
  ucred peer{};
  socklen_t size = sizeof peer;
  return ::getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &peer, &size) == 0 && peer.uid == ::geteuid();
}

Descriptor private_folder(const std::string& path) {
  Descriptor folder(::open(path.c_str(), O_PATH | O_DIRECTORY | O_CLOEXEC));
  if (!folder)
    refuse(ErrorCode::config, "no folder for the ranks' sockets", path + ": " + std::strerror(errno), {}, {});
  struct stat about {};
  ::fstat(folder.get(), &about);
  if (about.st_uid != ::geteuid() || (about.st_mode & 077) != 0)
    refuse(ErrorCode::config, "others can enter the folder of the ranks' sockets", path,
           "a folder that only this user can enter, mode 0700", "chmod 700 it, or take another one");
  return folder;
}

/// Whatever the folder's path, this fits into a socket's address.
sockaddr_un address_of(int folder, const std::string& name) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  const std::string path = "/proc/self/fd/" + std::to_string(folder) + "/" + name;
  if (path.size() >= sizeof address.sun_path)
    refuse(ErrorCode::config, "the name of the socket is too long", name, "up to 60 characters", {});
  std::copy(path.begin(), path.end(), address.sun_path);
  return address;
}

Descriptor new_socket() {
  Descriptor socket(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  if (!socket) refuse(ErrorCode::resources, "no socket", std::strerror(errno), {}, {});
  return socket;
}

struct Unlinked {
  int folder;
  const std::string& name;
  ~Unlinked() { ::unlinkat(folder, name.c_str(), 0); }
};

}  // namespace

Meeting::Meeting(const Rendezvous& rendezvous) : rendezvous_(rendezvous) {
  if (rendezvous.rank < 0 || rendezvous.rank >= rendezvous.size)
    fail_internal("communicator memcpy",
                  "rank " + std::to_string(rendezvous.rank) + " of " + std::to_string(rendezvous.size));
  if (rendezvous.size == 1) return;
  constexpr std::string_view kScheme = "file:";
  const std::filesystem::path path =
      rendezvous.address.starts_with(kScheme) ? rendezvous.address.substr(kScheme.size()) : std::string();
  if (!path.has_filename() || !path.is_absolute())
    refuse(ErrorCode::config, "an address that it cannot use", rendezvous.address, "file:/FOLDER/NAME",
           "on several machines, choose another communicator");
  const Descriptor folder = private_folder(path.parent_path());
  if (rendezvous.rank == 0)
    listen(folder.get(), path.filename());
  else
    call(folder.get(), path.filename());
  exchange({});
}

void Meeting::listen(int folder, const std::string& name) {
  const auto deadline = after(rendezvous_.timeout);
  const auto size = static_cast<std::size_t>(rendezvous_.size);
  peers_.resize(size);
  const Descriptor door = new_socket();
  const sockaddr_un address = address_of(folder, name);
  if (::bind(door.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0) {
    const int reason = errno;
    if (reason == EADDRINUSE)
      refuse(ErrorCode::communication, "no socket in the folder of the ranks' sockets",
             name + ": " + std::strerror(reason), "a name that is free",
             "another run meets here, or one died here; remove it, or take another name");
    refuse(ErrorCode::resources, "no socket can be made in the folder of the ranks' sockets",
           rendezvous_.address + ": " + std::strerror(reason), {}, "free space there, or set TMPDIR to another folder");
  }
  const Unlinked unlinked{folder, name};
  if (::listen(door.get(), rendezvous_.size) != 0) fault(std::string("no socket: ") + std::strerror(errno));
  for (std::size_t here = 1; here < size;) {
    if (!readable(door.get(), deadline)) {
      std::string missing;
      for (std::size_t rank = 1; rank < size; ++rank)
        if (!peers_[rank]) missing += (missing.empty() ? "" : ", ") + std::to_string(rank);
      const std::string text = "of " + std::to_string(size) + " ranks, these did not connect within " +
                               seconds_text(rendezvous_.timeout) + ": " + missing;
      tell(text);
      fault(text);
    }
    Descriptor peer(::accept4(door.get(), nullptr, nullptr, SOCK_CLOEXEC));
    if (!peer && (errno == EMFILE || errno == ENFILE)) refuse_full();
    if (!peer || !same_user(peer.get()) || !readable(peer.get(), std::min(deadline, after(kLater)))) continue;
    const Message hello = receive(peer.get(), "a rank that has just come");
    const std::size_t space = hello.bytes.find(' ');
    const std::size_t rank = std::strtoull(hello.bytes.c_str(), nullptr, 10);
    if (space == std::string::npos || hello.bytes.substr(space + 1) != std::to_string(size) || rank == 0 ||
        rank >= size || peers_[rank]) {
      const std::string text = "a rank does not fit the group of " + std::to_string(size) + ": it says that it is " +
                               hello.bytes.substr(0, 40) + " (rank and size)";
      send(peer.get(), kFault, text, -1);
      tell(text);
      fault(text);
    }
    peers_[rank] = std::move(peer);
    ++here;
  }
}

void Meeting::call(int folder, const std::string& name) {
  const auto deadline = after(rendezvous_.timeout);
  const sockaddr_un address = address_of(folder, name);
  peers_.push_back(new_socket());
  while (::connect(peers_[0].get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0) {
    if (Clock::now() > deadline)
      fault("rank 0 did not connect within " + seconds_text(rendezvous_.timeout) + " (" + rendezvous_.address + ": " +
            std::strerror(errno) + ")");
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
  if (!same_user(peers_[0].get())) fault("the socket of rank 0 is another user's");
  send(peers_[0].get(), kGiven, std::to_string(rendezvous_.rank) + " " + std::to_string(rendezvous_.size), -1);
}

std::vector<Message> Meeting::exchange(Message own) {
  if (own.bytes.size() > kMostBytes) fail_internal("communicator memcpy", "a message that is too long");
  std::vector<Message> all;
  if (rendezvous_.size == 1) {
    all.push_back(std::move(own));
    return all;
  }
  if (rendezvous_.rank == 0) return gather(std::move(own));
  const int socket = peers_[0].get();
  send(socket, kGiven, own.bytes, own.descriptor.get());          // if rank 0 is gone, what it said last is still there
  const auto deadline = after(2 * rendezvous_.timeout + kLater);  // rank 0 may have begun to wait later
  for (int rank = 0; rank < rendezvous_.size; ++rank) {
    if (!readable(socket, deadline)) fault("rank 0 did not answer within " + seconds_text(rendezvous_.timeout));
    all.push_back(receive(socket, "rank 0"));
  }
  return all;
}

std::vector<Message> Meeting::gather(Message own) {
  std::vector<Message> all;
  all.push_back(std::move(own));
  const auto deadline = after(rendezvous_.timeout);
  try {
    for (std::size_t rank = 1; rank < peers_.size(); ++rank) {
      const std::string who = "rank " + std::to_string(rank);
      if (!readable(peers_[rank].get(), deadline))
        fault(who + " did not come within " + seconds_text(rendezvous_.timeout));
      all.push_back(receive(peers_[rank].get(), who));
    }
  } catch (const Error& error) {
    tell(error.code() == ErrorCode::communication ? error.detail().what : "rank 0: " + error.detail().what);
    throw;
  }
  for (std::size_t rank = 1; rank < peers_.size(); ++rank)
    for (const Message& message : all)
      if (!send(peers_[rank].get(), kGiven, message.bytes, message.descriptor.get())) {
        const std::string text = "rank " + std::to_string(rank) + " is gone";
        tell(text);
        fault(text);
      }
  return all;
}

void Meeting::tell(const std::string& fault) noexcept {
  for (const Descriptor& peer : peers_)
    if (peer) send(peer.get(), kFault, fault, -1);
}

void Meeting::end() noexcept {
  for (const Descriptor& peer : peers_)
    if (peer) ::shutdown(peer.get(), SHUT_RDWR);
}

}  // namespace quern::memcpy
