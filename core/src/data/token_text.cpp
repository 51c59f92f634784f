#include "data/token_text.h"

#include <array>
#include <filesystem>
#include <utility>

#include <nlohmann/json.hpp>

#include "base/files/input_file.h"
#include "quern/error.h"

namespace quern {

using nlohmann::json;

namespace {

constexpr std::size_t kLargestFile = std::size_t{256} << 20;
constexpr std::int64_t kMostTokens = 1 << 24;

// Code point of the UTF-8 sequence at `at`, which is moved past it; -1 and one byte on where there is none.
std::int32_t next_code_point(const std::string& text, std::size_t& at) {
  auto byte = [&](std::size_t i) { return i < text.size() ? static_cast<unsigned char>(text[i]) : 0u; };
  const unsigned lead = byte(at);
  const int more = lead < 0x80 ? 0 : lead >= 0xc2 && lead < 0xe0 ? 1 : lead >= 0xe0 && lead < 0xf0 ? 2 : 3;
  std::uint32_t point = more == 0 ? lead : lead & (0x3fu >> more);
  bool good = lead < 0x80 || (lead >= 0xc2 && lead < 0xf5);
  for (int i = 1; good && i <= more; ++i) {
    const unsigned next = byte(at + static_cast<std::size_t>(i));
    good = (next & 0xc0u) == 0x80;
    point = point << 6 | (next & 0x3fu);
  }
  static constexpr std::uint32_t kLeast[] = {0, 0x80, 0x800, 0x10000};  // shorter forms exist below
  good = good && point >= kLeast[more] && point <= 0x10ffff && (point < 0xd800 || point > 0xdfff);
  at += good ? static_cast<std::size_t>(more) + 1 : 1;
  return good ? static_cast<std::int32_t>(point) : -1;
}

// Byte-level vocabularies spell each byte as a printable character: printable Latin-1 as itself, the others from 256 on
// in order (Radford et al., GPT-2's encoder).
std::array<int, 512> byte_of_character() {
  std::array<int, 512> bytes;
  bytes.fill(-1);
  std::size_t other = 256;
  for (int byte = 0; byte < 256; ++byte) {
    bool printable = (byte >= 33 && byte <= 126) || (byte >= 161 && byte != 173);
    bytes[printable ? static_cast<std::size_t>(byte) : other++] = byte;
  }
  return bytes;
}

std::string byte_level(const std::string& piece) {
  static const std::array<int, 512> kBytes = byte_of_character();
  std::string bytes;
  for (std::size_t at = 0; at < piece.size();) {
    std::size_t from = at;
    std::int32_t point = next_code_point(piece, at);
    int byte = point >= 0 && point < 512 ? kBytes[static_cast<std::size_t>(point)] : -1;
    byte < 0 ? bytes.append(piece, from, at - from) : bytes.append(1, static_cast<char>(byte));
  }
  return bytes;
}

// "▁" is a space, and "<0x0A>" a byte.
std::string sentence_piece(const std::string& piece) {
  if (piece.size() == 6 && piece.starts_with("<0x") && piece.ends_with('>') &&
      piece.find_first_not_of("0123456789ABCDEFabcdef", 3) == 5)
    return std::string(1, static_cast<char>(std::stoi(piece.substr(3, 2), nullptr, 16)));
  std::string text = piece;
  for (std::size_t at = text.find("\u2581"); at != std::string::npos; at = text.find("\u2581", at))
    text.replace(at, 3, " ");
  return text;
}

// Whether a decoder, or one of a sequence of them, is of that type.
bool has_type(const json& part, const std::string& type) {
  if (!part.is_object()) return false;
  if (part.value("type", json()) == type) return true;
  for (const char* list : {"decoders", "pretokenizers"})
    if (auto parts = part.find(list); parts != part.end() && parts->is_array())
      for (const json& inner : *parts)
        if (inner.is_object() && inner.value("type", json()) == type) return true;
  return false;
}

}  // namespace

TokenText::TokenText(std::string path) {
  if (std::error_code ignored; std::filesystem::is_directory(path, ignored)) path += "/tokenizer.json";
  auto refuse = [&](const std::string& found) {
    throw Error(ErrorCode::input, {path, "not a usable tokenizer.json", found, "one of the tokenizers library", ""});
  };
  const InputFile file(path);
  if (file.size() > kLargestFile) refuse(std::to_string(file.size()) + " bytes");
  const json root = json::parse(file.text(), nullptr, false);
  if (!root.is_object() || !root.contains("model") || !root["model"].is_object() || !root["model"].contains("vocab"))
    refuse("no model with a vocabulary");
  const bool bytes = has_type(root.value("decoder", json()), "ByteLevel") ||
                     has_type(root.value("pre_tokenizer", json()), "ByteLevel");
  auto set = [&](const json& id, std::string piece) {
    if (!id.is_number_integer() || id < 0 || id >= kMostTokens) refuse("a token numbered " + id.dump().substr(0, 40));
    auto token = id.get<std::size_t>();
    if (token >= pieces_.size()) pieces_.resize(token + 1);
    pieces_[token] = std::move(piece);
  };
  auto spelled = [&](const std::string& piece) { return bytes ? byte_level(piece) : sentence_piece(piece); };
  const json& vocabulary = root["model"]["vocab"];
  if (vocabulary.is_object())
    for (const auto& [piece, id] : vocabulary.items()) set(id, spelled(piece));
  else if (vocabulary.is_array())  // Unigram: [piece, score] in the order of the tokens
    for (std::size_t token = 0; token < vocabulary.size(); ++token) {
      const json& entry = vocabulary[token];
      if (!entry.is_array() || entry.empty() || !entry[0].is_string()) refuse("a vocabulary entry without a text");
      set(json(token), spelled(entry[0].get<std::string>()));
    }
  const json added = root.value("added_tokens", json());
  if (added.is_array())
    for (const json& entry : added) {
      if (!entry.is_object() || !entry.contains("id") || !entry.contains("content") || !entry["content"].is_string())
        refuse("an added token without id or content");
      set(entry["id"], entry["content"].get<std::string>());
    }
}

std::string TokenText::of(std::span<const std::int32_t> tokens) const {
  std::string text;
  for (std::int32_t token : tokens) {
    auto index = static_cast<std::size_t>(token);
    bool known = token >= 0 && index < pieces_.size() && !pieces_[index].empty();
    text += known ? pieces_[index] : "<" + std::to_string(token) + ">";
  }
  return text;
}

std::string quoted_text(const std::string& bytes) {
  static constexpr char kDigits[] = "0123456789abcdef";
  std::string text = "\"";
  for (std::size_t at = 0; at < bytes.size();) {
    std::size_t from = at;
    std::int32_t point = next_code_point(bytes, at);
    auto byte = static_cast<unsigned char>(bytes[from]);
    if (point == '\n')
      text += "\\n";
    else if (point == '\t')
      text += "\\t";
    else if (point == '"' || point == '\\')
      text.append(1, '\\').append(1, bytes[from]);
    else if (point < 32 || point == 127)
      text.append("\\x").append(1, kDigits[byte >> 4]).append(1, kDigits[byte & 15]);
    else if (point >= 128 && point < 160)  // control characters of two bytes
      text.append("\\u00").append(1, kDigits[point >> 4]).append(1, kDigits[point & 15]);
    else
      text.append(bytes, from, at - from);
  }
  return text + "\"";
}

}  // namespace quern
