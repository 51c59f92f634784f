#pragma once
// Files of tokens: what data preparation writes and training reads, trusted in nothing. token_layout.h has
// the formats; docs/token-files.md describes quern's own.

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/files/open_files.h"
#include "data/tokens/token_layout.h"

namespace quern {

/// How to read a file where the file itself does not say.
struct TokenReading {
  TokenFormat format = TokenFormat::by_magic;
  std::int64_t vocabulary = 0;            ///< bound of the tokens when the file states none; 0: what its width holds
  std::optional<std::int32_t> separator;  ///< ends a document, in place of what the file states
};

class TokenFile {
 public:
  /// Checks the header against the file's size. Every fault, here and below, is an input error that names the file.
  /// `files` opens it, here and when it is read; null: some of its own.
  explicit TokenFile(std::string path, const TokenReading& reading = {}, std::shared_ptr<OpenFiles> files = {});

  const std::string& path() const { return path_; }
  std::int64_t count() const { return layout_.count; }
  /// Every token is below it.
  std::int64_t vocabulary() const { return vocabulary_; }
  /// From now on reading refuses tokens that are not below `vocabulary`, which is less than the file's.
  void bound_tokens(std::int64_t vocabulary) { vocabulary_ = vocabulary; }
  /// Whether the file itself states the vocabulary.
  bool states_vocabulary() const { return layout_.vocabulary > 0; }
  /// Ends a document.
  std::optional<std::int32_t> separator() const { return layout_.separator; }
  bool has_mask() const { return layout_.mask_at.has_value(); }
  /// Of the payload, as the header states it (`verify` proves it); in a format without one, of the size and of a sample
  /// of the bytes, all of them up to 4 MiB.
  std::uint64_t checksum() const { return checksum_; }

  /// Copies tokens first, first + 1, ...; refuses one that the vocabulary does not have, with its position.
  void read(std::int64_t first, std::span<std::int32_t> out) const;
  /// Whether predicting tokens first, first + 1, ... counts in the loss, 1 or 0. The file's first is never predicted.
  void read_targets(std::int64_t first, std::span<std::uint8_t> out) const;
  /// The first token that counts; empty when none does. `within_documents`: one that starts a document does not count.
  std::optional<std::int64_t> first_target(bool within_documents = false) const;
  /// Whether the header states a checksum of the payload.
  bool states_checksum() const { return layout_.checksum.has_value(); }
  std::uint64_t payload_bytes() const { return bytes_ - layout_.tokens_at; }
  /// Reads the whole file and proves the payload's checksum, where the header states one; returns early once
  /// `stopping` is set.
  void verify(const std::atomic<bool>& stopping = false) const;

 private:
  [[noreturn]] void refuse(std::string what, std::string found, std::string expected, std::string next = {}) const;
  void check_range(std::int64_t first, std::size_t size) const;
  std::uint64_t sample_checksum(const InputFile& file) const;

  std::string path_;
  std::shared_ptr<OpenFiles> files_;
  std::uint64_t bytes_ = 0;
  TokenLayout layout_;
  std::int64_t vocabulary_ = 0;
  std::uint64_t checksum_ = 0;
};

/// What a token file holds, for those who make one in memory.
struct TokenFileContent {
  std::vector<std::int32_t> tokens;
  std::vector<bool> mask;  ///< empty: every token counts
  std::int64_t vocabulary = 0;
  std::int32_t separator = -1;
};

/// Writes `path` in quern's format, two bytes a token where the vocabulary allows.
void write_token_file(const std::string& path, const TokenFileContent& content);

}  // namespace quern
