#pragma once
// Where a token file has what: headers of every format that training reads, checked against the file's size.
//
// quern's own, little endian, a 64-byte header
//   0 "QUERNTOK"  8 u32 version = 1  12 u32 flags (bit 0: loss mask)  16 u64 token_count  24 u32 vocab_size
//   28 u32 token_bytes (2 or 4)  32 u64 XXH3-64 of the payload  40 i32 separator_token (-1: none)  44 zeros
// then the tokens, zeros to a multiple of 8 bytes and, if flagged, the loss mask: one bit a token, lowest bit first,
// zeros to a multiple of 8 bytes. A token's bit says whether predicting it, from the one before, counts.
//
// LLMQ's, a 1024-byte header
//   0 "BIN.TOK\n"  8 i32 version (1 or 2)  12 i32 bytes a token  16 i32 token count  version 2: 20 i32 vocabulary
//   24 i32 has mask (0 or 1)
// then the tokens and, if so, the mask's bits as above, both without padding.
//
// Headerless: u16 tokens from the first byte to the last. Nothing marks such a file, so the user must.

#include <cstddef>
#include <cstdint>
#include <optional>

#include "base/files/input_file.h"

namespace quern {

enum class TokenFormat : std::uint8_t {
  by_magic,  ///< quern's or LLMQ's
  uint16,    ///< headerless
};

struct TokenLayout {
  std::int64_t count = 0;
  std::uint32_t token_bytes = 2;
  std::int64_t vocabulary = 0;  ///< 0: the file states none
  std::size_t tokens_at = 0;
  std::optional<std::size_t> mask_at;
  std::optional<std::int32_t> separator;
  std::optional<std::uint64_t> checksum;  ///< of all bytes from tokens_at
};

/// Every fault is an input error that names the file.
TokenLayout token_layout(const InputFile& file, TokenFormat format);

}  // namespace quern
