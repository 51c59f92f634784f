#include "data/tokens/token_file.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <utility>

#include "base/checksum.h"
#include "base/files/durable_file.h"
#include "data/tokens/token_header.h"
#include "quern/error.h"

namespace quern {

namespace {

constexpr const char* kPrepareAgain = "prepare the data again";

// Widens integers of type T at the end of `out`, where writing never overtakes reading; returns the index of
// the first that is not below `limit`, or out.size().
template <class T>
std::size_t widen_checked(std::span<std::int32_t> out, std::uint32_t limit) {
  const std::byte* from = std::as_bytes(out).data() + out.size_bytes() - out.size() * sizeof(T);
  for (std::size_t i = 0; i < out.size(); ++i) {
    T value;
    std::memcpy(&value, from + i * sizeof(T), sizeof(T));
    out[i] = static_cast<std::int32_t>(value);
    if (value >= limit) return i;
  }
  return out.size();
}

}  // namespace

TokenFile::TokenFile(std::string path, const TokenReading& reading, std::shared_ptr<OpenFiles> files)
    : path_(std::move(path)), files_(files ? std::move(files) : std::make_shared<OpenFiles>(1)) {
  const std::shared_ptr<const InputFile> file = files_->open(path_);
  bytes_ = file->size();
  layout_ = token_layout(*file, reading.format);
  std::int64_t widest = layout_.token_bytes == 2 ? 0x10000 : std::numeric_limits<std::int32_t>::max();
  vocabulary_ = layout_.vocabulary > 0 ? layout_.vocabulary : reading.vocabulary > 0 ? reading.vocabulary : widest;
  checksum_ = layout_.checksum ? *layout_.checksum : sample_checksum(*file);
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

void TokenFile::check_range(std::int64_t first, std::size_t size) const {
  if (first < 0 || first > count() || static_cast<std::int64_t>(size) > count() - first)
    fail_internal(path(), "read past the end of a token file");
}

std::uint64_t TokenFile::sample_checksum(const InputFile& file) const {
  constexpr std::uint64_t kPieces = 64, kPieceBytes = 1 << 16;
  const std::uint64_t size = file.size();
  Checksum sum;
  sum.add(std::as_bytes(std::span(&size, 1)));
  auto add = [&](std::span<const std::byte> piece) {
    sum.add(piece);
    return true;
  };
  if (size <= kPieces * kPieceBytes) {
    file.for_each_piece(0, add);
    return sum.value();
  }
  std::vector<std::byte> buffer(kPieceBytes);
  auto add_at = [&](std::uint64_t offset) {
    file.read(offset, buffer);
    sum.add(buffer);
  };
  for (std::uint64_t piece = 0; piece < kPieces; ++piece)  // the first and the last bytes among them
    add_at((size - kPieceBytes) / (kPieces - 1) * piece);
  add_at(size - kPieceBytes);
  return sum.value();
}

void TokenFile::read(std::int64_t first, std::span<std::int32_t> out) const {
  check_range(first, out.size());
  const std::size_t width = layout_.token_bytes;
  files_->open(path_)->read(layout_.tokens_at + static_cast<std::size_t>(first) * width,
                            std::as_writable_bytes(out).last(out.size() * width));
  const auto limit = static_cast<std::uint32_t>(vocabulary_);
  const std::size_t bad =
      width == 2 ? widen_checked<std::uint16_t>(out, limit) : widen_checked<std::uint32_t>(out, limit);
  if (bad == out.size()) return;
  refuse("token " + std::to_string(first + static_cast<std::int64_t>(bad)) + " is not in the vocabulary",
         std::to_string(static_cast<std::uint32_t>(out[bad])), "below " + std::to_string(vocabulary_), kPrepareAgain);
}

void TokenFile::read_targets(std::int64_t first, std::span<std::uint8_t> out) const {
  check_range(first, out.size());
  std::fill(out.begin(), out.end(), std::uint8_t{1});
  if (out.empty()) return;
  if (has_mask()) {
    const auto begin = static_cast<std::size_t>(first) / 8, bit = static_cast<std::size_t>(first) % 8;
    std::vector<std::uint8_t> mask((bit + out.size() + 7) / 8);
    files_->open(path_)->read(*layout_.mask_at + begin, std::as_writable_bytes(std::span(mask)));
    for (std::size_t i = 0; i < out.size(); ++i)
      out[i] = static_cast<std::uint8_t>((mask[(bit + i) / 8] >> ((bit + i) % 8)) & 1u);
  }
  if (first == 0) out[0] = 0;
}

std::optional<std::int64_t> TokenFile::first_target(bool within_documents) const {
  constexpr std::int64_t kPiece = 1 << 16;  // tokens
  const bool documents = within_documents && layout_.separator;
  std::vector<std::uint8_t> counts;
  std::vector<std::int32_t> before;
  for (std::int64_t first = 1; first < count(); first += kPiece) {
    const auto size = static_cast<std::size_t>(std::min(kPiece, count() - first));
    counts.resize(size);
    read_targets(first, counts);
    auto target = std::find(counts.begin(), counts.end(), std::uint8_t{1});
    if (target == counts.end()) continue;
    before.resize(documents ? size : 0);
    read(first - 1, before);
    auto starts_document = [&](std::size_t i) { return documents && before[i] == *layout_.separator; };
    for (auto i = static_cast<std::size_t>(target - counts.begin()); i < size; ++i)
      if (counts[i] != 0 && !starts_document(i)) return first + static_cast<std::int64_t>(i);
  }
  return std::nullopt;
}

void TokenFile::verify(const std::atomic<bool>& stopping) const {
  if (!layout_.checksum) return;
  Checksum sum;
  files_->open(path_)->for_each_piece(layout_.tokens_at, [&](std::span<const std::byte> piece) {
    sum.add(piece);
    return !stopping;
  });
  if (!stopping && sum.value() != *layout_.checksum)
    refuse("checksum of the payload", checksum_text(sum.value()), checksum_text(*layout_.checksum),
           "the file is damaged; copy or prepare it again");
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
