#pragma once
// How ranks become a group: all connect to rank 0, and both ends prove by HMAC over fresh random numbers that they know
// the run's secret. Who cannot is dropped, and the group goes on waiting.

#include <vector>

#include "launch/rendezvous/frame_socket.h"
#include "launch/rendezvous/meeting_point.h"

namespace quern {

/// The longest message that a rank may give to an exchange.
inline constexpr std::size_t kMostGiven = std::size_t{64} << 20;

/// A frame with this kind says why the group is over; its text is for people.
inline constexpr char kFaultFrame = 'f';

/// Who a rank is, for messages: "rank 2 of 4".
std::string rank_text(int rank, int size);
[[noreturn]] void fail_communication(const std::string& what, const std::string& next = {});

/// Waits until all ranks are connected. Rank 0: their sockets by rank, its own place empty; others: rank 0's alone.
/// Throws a communication error that names the ranks that are missing after `timeout` seconds, or the one that was
/// lost.
std::vector<FrameSocket> join_ranks(int rank, int size, const MeetingPoint& point, double timeout);

}  // namespace quern
