#pragma once
// Tokens as text, by a tokenizer.json: only to show them to people. Byte-level and SentencePiece-like vocabularies are
// known; encoding, and decoding in all detail, are the tokenizers library's.

#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace quern {

class TokenText {
 public:
  /// Reads `path`, a tokenizer.json or a folder that has one. A file that is none is an input error.
  explicit TokenText(std::string path);

  /// The tokens' bytes one after another; a token that the vocabulary does not have is "<ID>".
  std::string of(std::span<const std::int32_t> tokens) const;

 private:
  std::vector<std::string> pieces_;  ///< by token, as bytes; empty: no such token
};

/// In double quotes; control characters, bytes that are no UTF-8, quotes and backslashes escaped.
std::string quoted_text(const std::string& bytes);

}  // namespace quern
