#pragma once
// The heap of the plugin under test: each block of up to 256 KiB that its code takes by `new` ends at a page that
// nobody may touch, and is filled with bytes that are no value, also when it is given back. A read or write beyond a
// block ends the process in the contract that made it.

#include <cstddef>
#include <filesystem>
#include <string>

namespace quern::conformance {

/// From now on, in this process, for code of the shared library of this file, which is loaded, and of no other. Returns
/// why that cannot be, or an empty text.
std::string guard_heap_of(const std::filesystem::path& library);

/// Blocks that the library's code has taken since then.
struct TakenBlocks {
  std::size_t guarded = 0, too_large = 0, without_room = 0;
};
TakenBlocks taken_blocks();

/// Bytes of guarded blocks that were not given back.
std::size_t guarded_bytes();

/// Describes an address that could not be accessed, for people; null: no guarded block is there. For signal
/// handlers.
const char* guarded_block_at(const void* address);

}  // namespace quern::conformance
