#pragma once
// Files of tokens: what data preparation writes and training reads, mapped and trusted in nothing. token_layout.h has
// the formats; docs/token-files.md describes quern's own.

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "data/mapped_file.h"
#include "data/token_layout.h"

namespace quern {

/// How to read a file where the file itself does not say.
struct TokenReading {
  TokenFormat format = TokenFormat::by_magic;
  std::int64_t vocabulary = 0;            ///< bound of the tokens when the file states none; 0: what its width holds
  std::optional<std::int32_t> separator;  ///< ends a document, in place of what the file states
};

class TokenFile {
 public:
  /// Maps the file and checks the header against its size. Every fault, here and below, is an input error that names
  /// the file.
  explicit TokenFile(std::string path, const TokenReading& reading = {});

  const std::string& path() const { return file_.path(); }
  std::int64_t count() const { return layout_.count; }
  /// Every token is below it.
  std::int64_t vocabulary() const { return vocabulary_; }
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
  /// Whether predicting this token counts in the loss. The first token of the file is never predicted.
  bool is_target(std::int64_t token) const;
  /// The first token that counts; empty when none does. `within_documents`: one that starts a document does not count.
  std::optional<std::int64_t> first_target(bool within_documents = false) const;
  /// Reads the whole file: checksum, and every token against the vocabulary.
  void verify() const;

 private:
  [[noreturn]] void refuse(std::string what, std::string found, std::string expected, std::string next = {}) const;
  const std::byte* tokens() const { return file_.bytes().data() + layout_.tokens_at; }
  const std::byte* mask() const { return file_.bytes().data() + *layout_.mask_at; }
  std::uint32_t token_at(std::int64_t token) const;
  std::uint64_t sample_checksum() const;

  MappedFile file_;
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
