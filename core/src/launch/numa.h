#pragma once
// Keeps a process on the processors that are near to its device.

#include <string>

namespace quern {

/// Keeps this thread, and those that it starts from now on, on the processors of that node. Does nothing for -1, a node
/// that the system does not list, or where it refuses; returns whether it did. `nodes`: the system's list of nodes.
bool pin_to_numa_node(int node, const std::string& nodes = "/sys/devices/system/node");

}  // namespace quern
