#pragma once
// Framed messages over TCP that never block: a length, a byte that says what it is, and bytes. Both ends are checked
// for what they may send; what breaks the rules counts as gone.

#include <chrono>
#include <cstddef>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/files/descriptor.h"

namespace quern {

using HostClock = std::chrono::steady_clock;

HostClock::time_point after(double seconds);

struct Frame {
  char kind = 0;
  std::string bytes = {};
};

/// A frame as it goes over the wire; several sockets may send one.
using WireFrame = std::shared_ptr<const std::string>;
WireFrame wire_frame(char kind, std::string_view bytes);

class FrameSocket {
 public:
  FrameSocket() = default;
  /// Of a connected socket. A peer whose frame is longer than `most_bytes` counts as gone.
  FrameSocket(OwnedDescriptor socket, std::size_t most_bytes);

  int descriptor() const { return socket_.get(); }
  bool open() const { return static_cast<bool>(socket_); }
  /// Why it closed: "its process has ended", or the system's words.
  std::string why_closed() const;
  void allow(std::size_t most_bytes) { most_bytes_ = most_bytes; }
  /// What poll() is to look for.
  short events() const { return static_cast<short>(out_.empty() ? kRead : kRead | kWrite); }
  bool unsent() const { return open() && !out_.empty(); }

  /// Keeps the frame until the peer takes it.
  void send(WireFrame frame);
  void send(char kind, std::string_view bytes) { send(wire_frame(kind, bytes)); }
  /// Reads and writes what goes without waiting. Closes when the peer is gone; frames that came before stay readable.
  void work();
  /// The next frame that has come whole.
  std::optional<Frame> next();
  void close() { socket_.reset(); }

 private:
  static constexpr short kRead = 1, kWrite = 4;  // POLLIN, POLLOUT
  void read();
  void write();

  OwnedDescriptor socket_;
  std::size_t most_bytes_ = 0;
  std::string in_;
  std::deque<WireFrame> out_;
  int error_ = 0;         // that closed it
  std::size_t sent_ = 0;  // of the first
};

/// Does the work of one socket until it has a frame. None: too late, or closed.
std::optional<Frame> receive(FrameSocket& socket, HostClock::time_point deadline);

/// A socket that listens, and its port. `local`: from this machine alone. `port` 0: any that is free. Throws a config
/// error when the port is in use.
struct Listener {
  OwnedDescriptor socket;
  int port = 0;
};
Listener listen_for_ranks(int port, bool local);
/// What to do where no descriptor is free: a resources error, or none.
enum class IfFull { fail, none };
/// A connection that came; none: nobody did.
OwnedDescriptor accept_rank(const Listener& listener, IfFull if_full = IfFull::fail);
/// Whether that is why accept_rank, called just before, gave none.
bool descriptors_are_full();
/// None: nobody answers at `host`, and `fault` says why.
OwnedDescriptor connect_to_rank(const std::string& host, int port, HostClock::time_point deadline, std::string& fault);
/// By which other machines may reach this one: numbers of its interfaces, then its name.
std::vector<std::string> own_hosts();

}  // namespace quern
