#pragma once
// The heap of the plugin under test: each block of up to 256 KiB that its code takes by `new` ends at a page that
// nobody may touch, and is filled with bytes that are no value, also when it is given back. A read or write beyond a
// block ends the process in the contract that made it.

#include <cstddef>
#include <filesystem>

namespace quern::conformance {

/// From now on, in this process, for code of the shared library of this file, which is loaded, and of no other. False:
/// this process has no address space for it.
bool guard_heap_of(const std::filesystem::path& library);

/// Bytes of guarded blocks that were not given back.
std::size_t guarded_bytes();

/// Describes an address that could not be accessed, for people; null: no guarded block is there. For signal
/// handlers.
const char* guarded_block_at(const void* address);

}  // namespace quern::conformance
