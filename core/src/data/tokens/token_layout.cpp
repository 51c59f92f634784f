#include "data/tokens/token_layout.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "data/tokens/token_header.h"
#include "quern/error.h"

namespace quern {

static_assert(std::endian::native == std::endian::little, "token files are read in place");

namespace {

constexpr std::uint32_t kLargestVocabulary = std::numeric_limits<std::int32_t>::max();
constexpr const char* kPrepareAgain = "prepare the data again";
constexpr char kLlmqMagic[] = "BIN.TOK\n";
constexpr std::size_t kLlmqHeaderBytes = 1024;

struct LlmqHeader {
  char magic[8];
  std::int32_t version, token_bytes, token_count, vocab_size, has_mask;
};

class Reader {
 public:
  explicit Reader(const InputFile& file) : file_(file), begin_(std::min<std::uint64_t>(file.size(), kLlmqHeaderBytes)) {
    file.read(0, begin_);
  }

  TokenLayout read(TokenFormat format) const {
    const bool ours = starts_with(kTokenFileMagic), llmq = starts_with(kLlmqMagic);
    if (format == TokenFormat::uint16) {
      if (ours || llmq)
        refuse("has a header, so it is not headerless", ours ? kTokenFileMagic : "BIN.TOK", "raw tokens");
      return headerless();
    }
    if (llmq) return llmqs();
    if (size() < kTokenHeaderBytes)
      refuse("not a whole token file", std::to_string(size()) + " bytes", "at least the 64 bytes of a header",
             kPrepareAgain);
    if (!ours)
      refuse("not a token file", "another magic number", std::string(kTokenFileMagic) + " or BIN.TOK",
             "make one with the data preparation script");
    return querns();
  }

 private:
  [[noreturn]] void refuse(std::string what, std::string found, std::string expected, std::string next = {}) const {
    throw Error(ErrorCode::input,
                {file_.path(), std::move(what), std::move(found), std::move(expected), std::move(next)});
  }

  std::uint64_t size() const { return file_.size(); }
  bool starts_with(const char* magic) const { return size() >= 8 && std::memcmp(begin_.data(), magic, 8) == 0; }
  template <class Header>
  Header header() const {
    Header header;
    std::memcpy(&header, begin_.data(), sizeof header);
    return header;
  }

  void check_size(std::uint64_t implied, std::uint64_t count) const {
    if (size() != implied)
      refuse(size() < implied ? "file is truncated" : "file is too long", std::to_string(size()) + " bytes",
             std::to_string(implied) + " bytes for " + std::to_string(count) + " tokens", kPrepareAgain);
  }

  TokenLayout querns() const {
    auto h = header<TokenHeader>();
    if (h.version != kTokenFileVersion)
      refuse("token file version", std::to_string(h.version), std::to_string(kTokenFileVersion), kPrepareAgain);
    if ((h.flags & ~kTokenMaskFlag) != 0) refuse("unknown flags of a token file", std::to_string(h.flags), "0 or 1");
    if (h.token_bytes != 2 && h.token_bytes != 4) refuse("token_bytes", std::to_string(h.token_bytes), "2 or 4");
    if (h.vocab_size == 0 || h.vocab_size > kLargestVocabulary)
      refuse("vocab_size", std::to_string(h.vocab_size), "1 to " + std::to_string(kLargestVocabulary));
    if (h.separator < -1 || h.separator >= static_cast<std::int64_t>(h.vocab_size))
      refuse("separator_token", std::to_string(h.separator), "-1 or a token below " + std::to_string(h.vocab_size));
    for (std::uint8_t byte : h.reserved)
      if (byte != 0) refuse("reserved bytes of the header", std::to_string(byte), "zeros");
    if (h.token_count == 0) refuse("token_count", "0", "at least one token", kPrepareAgain);
    constexpr std::uint64_t kMostTokens = std::uint64_t{1} << 56;  // nothing below overflows up to here
    if (h.token_count > kMostTokens)
      refuse("token_count", std::to_string(h.token_count),
             "what the file's " + std::to_string(size()) + " bytes can hold");
    const bool masked = (h.flags & kTokenMaskFlag) != 0;
    std::uint64_t mask_at = kTokenHeaderBytes + padded_to_8(h.token_count * h.token_bytes);
    check_size(mask_at + (masked ? padded_to_8((h.token_count + 7) / 8) : 0), h.token_count);

    TokenLayout layout{.count = static_cast<std::int64_t>(h.token_count),
                       .token_bytes = h.token_bytes,
                       .vocabulary = h.vocab_size,
                       .tokens_at = kTokenHeaderBytes,
                       .mask_at = {},
                       .separator = {},
                       .checksum = h.checksum};
    if (masked) layout.mask_at = mask_at;
    if (h.separator >= 0) layout.separator = h.separator;
    return layout;
  }

  TokenLayout llmqs() const {
    if (size() < kLlmqHeaderBytes)
      refuse("not a whole BIN.TOK file", std::to_string(size()) + " bytes", "at least the 1024 bytes of a header",
             kPrepareAgain);
    auto h = header<LlmqHeader>();
    if (h.version != 1 && h.version != 2) refuse("BIN.TOK version", std::to_string(h.version), "1 or 2");
    if (h.token_bytes != 2 && h.token_bytes != 4)
      refuse("bytes a token of a BIN.TOK file", std::to_string(h.token_bytes), "2 or 4");
    if (h.token_count < 1)
      refuse("token count of a BIN.TOK file", std::to_string(h.token_count), "1 to 2147483647",
             "files of LLMQ end at 2^31 tokens; split it, or prepare the data again");
    const bool second = h.version == 2;  // the first version's header ends here, with filling behind it
    if (second && h.vocab_size < 1)
      refuse("vocabulary of a BIN.TOK file", std::to_string(h.vocab_size), "at least 1", kPrepareAgain);
    if (second && h.has_mask != 0 && h.has_mask != 1)
      refuse("mask flag of a BIN.TOK file", std::to_string(h.has_mask), "0 or 1", kPrepareAgain);
    const bool masked = second && h.has_mask == 1;
    auto count = static_cast<std::uint64_t>(h.token_count);
    std::uint64_t mask_at = kLlmqHeaderBytes + count * static_cast<std::uint64_t>(h.token_bytes);
    check_size(mask_at + (masked ? (count + 7) / 8 : 0), count);

    TokenLayout layout{.count = h.token_count,
                       .token_bytes = static_cast<std::uint32_t>(h.token_bytes),
                       .vocabulary = second ? h.vocab_size : 0,
                       .tokens_at = kLlmqHeaderBytes,
                       .mask_at = {},
                       .separator = {},
                       .checksum = {}};
    if (masked) layout.mask_at = mask_at;
    return layout;
  }

  TokenLayout headerless() const {
    if (size() == 0 || size() % 2 != 0)
      refuse("not a file of u16 tokens", std::to_string(size()) + " bytes", "an even number of at least 2");
    TokenLayout layout;
    layout.count = static_cast<std::int64_t>(size() / 2);
    return layout;
  }

  const InputFile& file_;
  std::vector<std::byte> begin_;  ///< as much as the longest header has
};

}  // namespace

TokenLayout token_layout(const InputFile& file, TokenFormat format) { return Reader(file).read(format); }

}  // namespace quern
