#include "matmul_choices.h"

#include <unistd.h>

#include <cinttypes>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>

#include <nlohmann/json.hpp>

namespace quern::cuda {

namespace {

using nlohmann::json;

constexpr std::size_t kWords = sizeof(cublasLtMatmulAlgo_t) / sizeof(std::uint64_t);

std::string encode(const cublasLtMatmulAlgo_t& algorithm) {
  std::uint64_t words[kWords];
  std::memcpy(words, &algorithm, sizeof words);
  std::string text;
  for (std::uint64_t word : words) {
    char digits[17];
    std::snprintf(digits, sizeof digits, "%016" PRIx64, word);
    text += digits;
  }
  return text;
}

std::optional<cublasLtMatmulAlgo_t> decode(const std::string& text) {
  if (text.size() != 16 * kWords || text.find_first_not_of("0123456789abcdef") != std::string::npos) return {};
  std::uint64_t words[kWords];
  for (std::size_t i = 0; i < kWords; ++i) words[i] = std::stoull(text.substr(16 * i, 16), nullptr, 16);
  cublasLtMatmulAlgo_t algorithm;
  std::memcpy(&algorithm, words, sizeof words);
  return algorithm;
}

/// An object whose values are objects of texts; anything else becomes an empty one.
json parse(std::string_view text) {
  json root = json::parse(text, nullptr, false);
  return root.is_object() ? root : json::object();
}

std::string contents_of(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

}  // namespace

MatmulChoices::MatmulChoices(const std::string& gpu)
    : owner_(gpu + ", cuBLASLt " + std::to_string(cublasLtGetVersion())) {}

std::optional<cublasLtMatmulAlgo_t> MatmulChoices::find(const std::string& product) const {
  auto it = algorithms_.find(product);
  return it == algorithms_.end() ? std::nullopt : decode(it->second);
}

void MatmulChoices::set(const std::string& product, const cublasLtMatmulAlgo_t& algorithm) {
  algorithms_[product] = encode(algorithm);
}

std::string MatmulChoices::text() const { return json{{owner_, algorithms_}}.dump(); }

void MatmulChoices::add(std::string_view text) {
  json root = parse(text);
  auto mine = root.find(owner_);
  if (mine == root.end() || !mine->is_object()) return;
  for (const auto& [product, algorithm] : mine->items())
    if (algorithm.is_string() && decode(algorithm.get<std::string>())) algorithms_[product] = algorithm;
}

void MatmulChoices::read_file(const std::string& path) { add(contents_of(path)); }

void MatmulChoices::write_file(const std::string& path) const noexcept {
  try {
    std::filesystem::create_directories(std::filesystem::path(path).parent_path());
    json root = parse(contents_of(path));
    json& mine = root[owner_];
    if (!mine.is_object()) mine = json::object();
    for (const auto& [product, algorithm] : algorithms_) mine[product] = algorithm;
    std::string fresh = path + "." + std::to_string(getpid());
    std::ofstream file(fresh, std::ios::binary);
    file << root.dump(1) << "\n";
    file.close();
    if (file)
      std::filesystem::rename(fresh, path);
    else
      std::filesystem::remove(fresh);
  } catch (...) {  // the next run times the products again
  }
}

}  // namespace quern::cuda
