#pragma once
// A note of a shared library, read from its file: what a library says of itself before anything of it runs. The file's
// headers are compared with its size on the way, since the system's loader maps what they promise and is ended by
// SIGBUS (or worse) where the file has less.

#include <filesystem>
#include <string>
#include <string_view>

namespace quern {

struct ElfNote {
  std::string text;   ///< the note's contents
  std::string fault;  ///< empty, or why there are none: "found X, expected Y"
};

/// The first note of `owner` in a shared library for this machine.
ElfNote read_elf_note(const std::filesystem::path& file, std::string_view owner);

}  // namespace quern
