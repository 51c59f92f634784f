#pragma once
// The header of quern's own token files, byte for byte: what the writer writes and the reader reads. token_layout.h
// describes it.

#include <cstddef>
#include <cstdint>

namespace quern {

inline constexpr char kTokenFileMagic[] = "QUERNTOK";
inline constexpr std::uint32_t kTokenFileVersion = 1;
inline constexpr std::uint32_t kTokenMaskFlag = 1;

struct TokenHeader {
  char magic[8];
  std::uint32_t version, flags;
  std::uint64_t token_count;
  std::uint32_t vocab_size, token_bytes;
  std::uint64_t checksum;
  std::int32_t separator;
  std::uint8_t reserved[20];
};
inline constexpr std::size_t kTokenHeaderBytes = 64;
static_assert(sizeof(TokenHeader) == kTokenHeaderBytes);

constexpr std::uint64_t padded_to_8(std::uint64_t bytes) { return (bytes + 7) / 8 * 8; }

}  // namespace quern
