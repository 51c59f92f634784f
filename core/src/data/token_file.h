#pragma once
// quern's token files: what data preparation writes and training reads. Little endian, a 64-byte header
//   0 "QUERNTOK"  8 u32 version = 1  12 u32 flags (bit 0: loss mask)  16 u64 token_count  24 u32 vocab_size
//   28 u32 token_bytes (2 or 4)  32 u64 XXH3-64 of the payload  40 i32 separator_token (-1: none)  44 zeros
// then the tokens, zeros to a multiple of 8 bytes and, if flagged, the loss mask: one bit a token, lowest bit first,
// zeros to a multiple of 8 bytes. A token's bit says whether predicting it, from the one before, counts.

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "data/mapped_file.h"

namespace quern {

class TokenFile {
 public:
  /// Maps the file and checks the header against its size. Every fault, here and below, is an input error that names
  /// the file.
  explicit TokenFile(std::string path);

  const std::string& path() const { return file_.path(); }
  std::int64_t count() const { return count_; }
  std::int64_t vocabulary() const { return vocabulary_; }
  /// Ends a document.
  std::optional<std::int32_t> separator() const { return separator_; }
  bool has_mask() const { return mask_ != nullptr; }
  /// As the header states it; `verify` proves it.
  std::uint64_t checksum() const { return checksum_; }

  /// Copies tokens first, first + 1, ...; refuses one that the vocabulary does not have, with its position.
  void read(std::int64_t first, std::span<std::int32_t> out) const;
  /// Whether predicting this token counts in the loss. The first token of the file is never predicted.
  bool is_target(std::int64_t token) const;
  /// The first token that counts; empty when none does.
  std::optional<std::int64_t> first_target() const;
  /// Reads the whole file: checksum, and every token against the vocabulary.
  void verify() const;

 private:
  void read_header();
  void check_size(std::uint64_t token_count, std::uint32_t token_bytes, bool masked);
  [[noreturn]] void refuse(std::string what, std::string found, std::string expected, std::string next = {}) const;

  MappedFile file_;
  std::int64_t count_ = 0;
  std::int64_t vocabulary_ = 0;
  std::uint32_t token_bytes_ = 0;
  std::uint64_t checksum_ = 0;
  std::optional<std::int32_t> separator_;
  const std::byte* tokens_ = nullptr;
  const std::byte* mask_ = nullptr;
};

/// What a token file holds, for those who make one in memory.
struct TokenFileContent {
  std::vector<std::int32_t> tokens;
  std::vector<bool> mask;  ///< empty: every token counts
  std::int64_t vocabulary = 0;
  std::int32_t separator = -1;
};

/// Writes `path`, two bytes a token where the vocabulary allows.
void write_token_file(const std::string& path, const TokenFileContent& content);

}  // namespace quern
