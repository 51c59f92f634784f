#include "data/token_file.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <utility>

#include "data/checksum.h"
#include "data/durable_file.h"
#include "data/token_header.h"
#include "quern/error.h"

namespace quern {

namespace {

constexpr const char* kPrepareAgain = "prepare the data again";

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

}  // namespace

TokenFile::TokenFile(std::string path, const TokenReading& reading)
    : file_(std::move(path)), layout_(token_layout(file_, reading.format)) {
  std::int64_t widest = layout_.token_bytes == 2 ? 0x10000 : std::numeric_limits<std::int32_t>::max();
  vocabulary_ = layout_.vocabulary > 0 ? layout_.vocabulary : reading.vocabulary > 0 ? reading.vocabulary : widest;
  checksum_ = layout_.checksum ? *layout_.checksum : sample_checksum();
  if (reading.separator) {
    if (*reading.separator < 0 || *reading.separator >= vocabulary_)
      refuse("the separator is not in its vocabulary", std::to_string(*reading.separator),
             "below " + std::to_string(vocabulary_));
    layout_.separator = reading.separator;
  }
}

void TokenFile::refuse(std::string what, std::string found, std::string expected, std::string next) const {
  throw Error(ErrorCode::input, {path(), std::move(what), std::move(found), std::move(expected), std::move(next)});
}

std::uint64_t TokenFile::sample_checksum() const {
  constexpr std::uint64_t kPieces = 64, kPieceBytes = 1 << 16;
  std::uint64_t size = file_.bytes().size();
  Checksum sum;
  sum.add(std::as_bytes(std::span(&size, 1)));
  if (size <= kPieces * kPieceBytes) {
    sum.add(file_.bytes());
    return sum.value();
  }
  for (std::uint64_t piece = 0; piece < kPieces; ++piece)  // the first and the last bytes among them
    sum.add(file_.bytes().subspan((size - kPieceBytes) / (kPieces - 1) * piece, kPieceBytes));
  sum.add(file_.bytes().last(kPieceBytes));
  return sum.value();
}

std::uint32_t TokenFile::token_at(std::int64_t token) const {
  return layout_.token_bytes == 2 ? load<std::uint16_t>(tokens() + token * 2)
                                  : load<std::uint32_t>(tokens() + token * 4);
}

void TokenFile::read(std::int64_t first, std::span<std::int32_t> out) const {
  if (first < 0 || first > count() || static_cast<std::int64_t>(out.size()) > count() - first)
    fail_internal(path(), "read past the end of a token file");
  const std::byte* from = tokens() + static_cast<std::size_t>(first) * layout_.token_bytes;
  auto limit = static_cast<std::uint32_t>(vocabulary_);
  std::size_t bad = layout_.token_bytes == 2 ? copy_checked<std::uint16_t>(from, out, limit)
                                             : copy_checked<std::uint32_t>(from, out, limit);
  if (bad == out.size()) return;
  std::int64_t token = first + static_cast<std::int64_t>(bad);
  refuse("token " + std::to_string(token) + " is not in the vocabulary", std::to_string(token_at(token)),
         "below " + std::to_string(vocabulary_), kPrepareAgain);
}

bool TokenFile::is_target(std::int64_t token) const {
  if (token < 0 || token >= count()) fail_internal(path(), "target past the end of a token file");
  if (token == 0) return false;
  return !has_mask() || ((std::to_integer<unsigned>(mask()[token / 8]) >> (token % 8)) & 1u) != 0;
}

std::optional<std::int64_t> TokenFile::first_target(bool within_documents) const {
  auto starts_document = [&](std::int64_t token) {
    return layout_.separator && token_at(token - 1) == static_cast<std::uint32_t>(*layout_.separator);
  };
  std::int64_t token = 1;
  while (token < count()) {
    if (is_target(token) && !(within_documents && starts_document(token))) return token;
    // Whole words of zeros are passed over at once.
    bool skip = has_mask() && token % 64 == 0 && token + 64 <= count() && load<std::uint64_t>(mask() + token / 8) == 0;
    token += skip ? 64 : 1;
  }
  return std::nullopt;
}

void TokenFile::verify() const {
  if (layout_.checksum) {
    std::uint64_t actual = checksum_of(file_.bytes().subspan(layout_.tokens_at));
    if (actual != *layout_.checksum)
      refuse("checksum of the payload", checksum_text(actual), checksum_text(*layout_.checksum),
             "the file is damaged; copy or prepare it again");
  }
  std::vector<std::int32_t> buffer(std::size_t{1} << 16);
  for (std::int64_t first = 0; first < count(); first += static_cast<std::int64_t>(buffer.size())) {
    auto size = std::min<std::int64_t>(static_cast<std::int64_t>(buffer.size()), count() - first);
    read(first, std::span(buffer).first(static_cast<std::size_t>(size)));
  }
}

void write_token_file(const std::string& path, const TokenFileContent& content) {
  std::uint32_t token_bytes = content.vocabulary <= 0x10000 ? 2 : 4;
  std::uint64_t count = content.tokens.size();
  if (!content.mask.empty() && content.mask.size() != count) fail_internal(path, "one mask bit a token");
  std::uint64_t mask_at = padded_to_8(count * token_bytes);
  std::vector<std::byte> payload(mask_at + (content.mask.empty() ? 0 : padded_to_8((count + 7) / 8)));
  for (std::size_t i = 0; i < count; ++i)
    std::memcpy(payload.data() + i * token_bytes, &content.tokens[i], token_bytes);
  for (std::size_t i = 0; i < content.mask.size(); ++i)
    if (content.mask[i]) payload[mask_at + i / 8] |= std::byte{1} << (i % 8);

  TokenHeader header{};
  std::memcpy(header.magic, kTokenFileMagic, sizeof header.magic);
  header.version = kTokenFileVersion;
  header.flags = content.mask.empty() ? 0 : kTokenMaskFlag;
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
