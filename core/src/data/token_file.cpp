#include "data/token_file.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>
#include <utility>

#include "data/checksum.h"
#include "data/durable_file.h"
#include "quern/error.h"

namespace quern {

static_assert(std::endian::native == std::endian::little, "token files are read in place");

namespace {

constexpr std::size_t kHeaderBytes = 64;
constexpr char kMagic[] = "QUERNTOK";
constexpr std::uint32_t kVersion = 1;
constexpr std::uint32_t kMaskFlag = 1;
constexpr const char* kPrepareAgain = "prepare the data again";

// Offsets are those of the file.
struct Header {
  char magic[8];
  std::uint32_t version, flags;
  std::uint64_t token_count;
  std::uint32_t vocab_size, token_bytes;
  std::uint64_t checksum;
  std::int32_t separator;
  std::uint8_t reserved[20];
};
static_assert(sizeof(Header) == kHeaderBytes);

template <class T>
T load(const std::byte* from) {
  T value;
  std::memcpy(&value, from, sizeof(T));
  return value;
}

// Copies integers of type T; returns the index of the first that is not below `limit`, or out.size().
template <class T>
std::size_t copy_checked(const std::byte* from, std::span<std::int32_t> out, std::uint32_t limit) {
  for (std::size_t i = 0; i < out.size(); ++i) {
    T value = load<T>(from + i * sizeof(T));
    if (value >= limit) return i;
    out[i] = static_cast<std::int32_t>(value);
  }
  return out.size();
}

constexpr std::uint64_t padded(std::uint64_t bytes) { return (bytes + 7) / 8 * 8; }

}  // namespace

TokenFile::TokenFile(std::string path) : file_(std::move(path)) { read_header(); }

void TokenFile::refuse(std::string what, std::string found, std::string expected, std::string next) const {
  throw Error(ErrorCode::input, {path(), std::move(what), std::move(found), std::move(expected), std::move(next)});
}

void TokenFile::read_header() {
  std::size_t size = file_.bytes().size();
  if (size < kHeaderBytes)
    refuse("not a whole token file", std::to_string(size) + " bytes", "at least the 64 bytes of a header",
           kPrepareAgain);
  auto header = load<Header>(file_.bytes().data());
  if (std::memcmp(header.magic, kMagic, sizeof header.magic) != 0)
    refuse("not a token file", "another magic number", kMagic, "make one with the data preparation script");
  if (header.version != kVersion)
    refuse("token file version", std::to_string(header.version), std::to_string(kVersion), kPrepareAgain);
  if ((header.flags & ~kMaskFlag) != 0) refuse("unknown flags of a token file", std::to_string(header.flags), "0 or 1");
  if (header.token_bytes != 2 && header.token_bytes != 4)
    refuse("token_bytes", std::to_string(header.token_bytes), "2 or 4");
  constexpr std::uint32_t kLargest = std::numeric_limits<std::int32_t>::max();
  if (header.vocab_size == 0 || header.vocab_size > kLargest)
    refuse("vocab_size", std::to_string(header.vocab_size), "1 to " + std::to_string(kLargest));
  if (header.separator < -1 || header.separator >= static_cast<std::int64_t>(header.vocab_size))
    refuse("separator_token", std::to_string(header.separator),
           "-1 or a token below " + std::to_string(header.vocab_size));
  for (std::uint8_t byte : header.reserved)
    if (byte != 0) refuse("reserved bytes of the header", std::to_string(byte), "zeros");
  if (header.token_count == 0) refuse("token_count", "0", "at least one token", kPrepareAgain);
  check_size(header.token_count, header.token_bytes, (header.flags & kMaskFlag) != 0);

  count_ = static_cast<std::int64_t>(header.token_count);
  vocabulary_ = header.vocab_size;
  token_bytes_ = header.token_bytes;
  checksum_ = header.checksum;
  if (header.separator >= 0) separator_ = header.separator;
  tokens_ = file_.bytes().data() + kHeaderBytes;
  if ((header.flags & kMaskFlag) != 0) mask_ = tokens_ + padded(header.token_count * header.token_bytes);
}

void TokenFile::check_size(std::uint64_t token_count, std::uint32_t token_bytes, bool masked) {
  constexpr std::uint64_t kMostTokens = std::uint64_t{1} << 56;  // nothing below overflows up to here
  std::uint64_t size = file_.bytes().size();
  if (token_count > kMostTokens)
    refuse("token_count", std::to_string(token_count), "what the file's " + std::to_string(size) + " bytes can hold");
  std::uint64_t implied = kHeaderBytes + padded(token_count * token_bytes);
  if (masked) implied += padded((token_count + 7) / 8);
  if (size != implied)
    refuse(size < implied ? "file is truncated" : "file is too long", std::to_string(size) + " bytes",
           std::to_string(implied) + " bytes for " + std::to_string(token_count) + " tokens", kPrepareAgain);
}

void TokenFile::read(std::int64_t first, std::span<std::int32_t> out) const {
  if (first < 0 || first > count_ || static_cast<std::int64_t>(out.size()) > count_ - first)
    fail_internal(path(), "read past the end of a token file");
  const std::byte* from = tokens_ + static_cast<std::size_t>(first) * token_bytes_;
  auto limit = static_cast<std::uint32_t>(vocabulary_);
  std::size_t bad =
      token_bytes_ == 2 ? copy_checked<std::uint16_t>(from, out, limit) : copy_checked<std::uint32_t>(from, out, limit);
  if (bad == out.size()) return;
  std::uint32_t token = token_bytes_ == 2 ? load<std::uint16_t>(from + bad * 2) : load<std::uint32_t>(from + bad * 4);
  refuse("token " + std::to_string(first + static_cast<std::int64_t>(bad)) + " is not in the vocabulary",
         std::to_string(token), "below " + std::to_string(vocabulary_), kPrepareAgain);
}

bool TokenFile::is_target(std::int64_t token) const {
  if (token < 0 || token >= count_) fail_internal(path(), "target past the end of a token file");
  if (token == 0) return false;
  return mask_ == nullptr || ((std::to_integer<unsigned>(mask_[token / 8]) >> (token % 8)) & 1u) != 0;
}

std::optional<std::int64_t> TokenFile::first_target() const {
  std::int64_t token = 1;
  while (token < count_) {
    if (is_target(token)) return token;
    // Whole words of zeros are passed over at once.
    bool skip = token % 64 == 0 && token + 64 <= count_ && load<std::uint64_t>(mask_ + token / 8) == 0;
    token += skip ? 64 : 1;
  }
  return std::nullopt;
}

void TokenFile::verify() const {
  std::uint64_t actual = checksum_of(file_.bytes().subspan(kHeaderBytes));
  if (actual != checksum_)
    refuse("checksum of the payload", checksum_text(actual), checksum_text(checksum_),
           "the file is damaged; copy or prepare it again");
  std::vector<std::int32_t> buffer(std::size_t{1} << 16);
  for (std::int64_t first = 0; first < count_; first += static_cast<std::int64_t>(buffer.size())) {
    auto size = std::min<std::int64_t>(static_cast<std::int64_t>(buffer.size()), count_ - first);
    read(first, std::span(buffer).first(static_cast<std::size_t>(size)));
  }
}

void write_token_file(const std::string& path, const TokenFileContent& content) {
  std::uint32_t token_bytes = content.vocabulary <= 0x10000 ? 2 : 4;
  std::uint64_t count = content.tokens.size();
  if (!content.mask.empty() && content.mask.size() != count) fail_internal(path, "one mask bit a token");
  std::uint64_t mask_at = padded(count * token_bytes);
  std::vector<std::byte> payload(mask_at + (content.mask.empty() ? 0 : padded((count + 7) / 8)));
  for (std::size_t i = 0; i < count; ++i)
    std::memcpy(payload.data() + i * token_bytes, &content.tokens[i], token_bytes);
  for (std::size_t i = 0; i < content.mask.size(); ++i)
    if (content.mask[i]) payload[mask_at + i / 8] |= std::byte{1} << (i % 8);

  Header header{};
  std::memcpy(header.magic, kMagic, sizeof header.magic);
  header.version = kVersion;
  header.flags = content.mask.empty() ? 0 : kMaskFlag;
  header.token_count = count;
  header.vocab_size = static_cast<std::uint32_t>(content.vocabulary);
  header.token_bytes = token_bytes;
  header.checksum = checksum_of(payload);
  header.separator = content.separator;
  DurableFile file(path);
  file.write(std::as_bytes(std::span(&header, 1)));
  file.write(payload);
  file.commit();
}

}  // namespace quern
