#include "folder.h"

#include <algorithm>
#include <numeric>
#include <system_error>

#include "quern/error.h"
#include "quern/random.h"

namespace quern::images {

namespace fs = std::filesystem;

namespace {

[[noreturn]] void refuse(const fs::path& path, const std::string& what, const std::string& found,
                         const std::string& expected) {
  throw Error(ErrorCode::input, {.where = path.string(), .what = what, .found = found, .expected = expected});
}

/// Names of a folder's entries, in order; hidden ones are passed over.
std::vector<std::string> names_in(const fs::path& folder) {
  std::error_code fault;
  std::vector<std::string> names;
  for (fs::directory_iterator at(folder, fault), end; !fault && at != end; at.increment(fault))
    if (std::string name = at->path().filename().string(); name[0] != '.') names.push_back(std::move(name));
  if (fault) refuse(folder, "cannot be read", fault.message(), "a folder with one folder of images for each class");
  std::sort(names.begin(), names.end());
  return names;
}

/// Other files are passed over, but not images that it cannot read.
bool is_image(const fs::path& path) {
  std::string extension = path.extension().string();
  std::transform(extension.begin(), extension.end(), extension.begin(),
                 [](unsigned char c) { return std::tolower(c); });
  for (const char* other : {".webp", ".bmp", ".gif", ".tif", ".tiff", ".avif", ".heic", ".jp2"})
    if (extension == other) refuse(path, "an image of another format", extension, ".png, .jpg or .jpeg: convert it");
  if (extension != ".png" && extension != ".jpg" && extension != ".jpeg") return false;
  std::error_code fault;
  if (!fs::is_regular_file(path, fault)) refuse(path, "named as an image", "no regular file", "a file");
  return true;
}

std::string listed(const std::vector<std::string>& names) {
  std::string text = std::to_string(names.size()) + " classes";
  for (std::size_t i = 0; i < std::min<std::size_t>(names.size(), 5); ++i) text += (i == 0 ? ": " : ", ") + names[i];
  return text + (names.size() > 5 ? " and so on" : "");
}

}  // namespace

std::uint64_t Folder::digest() const {
  std::uint64_t hash = 0xCBF29CE484222325u;  // FNV-1a
  auto add = [&](const std::string& text) {
    for (const unsigned char c : text) hash = (hash ^ c) * 0x100000001B3u;
    hash = (hash ^ 0xFF) * 0x100000001B3u;
  };
  for (const std::string& name : classes) add(name);
  for (const Item& item : items) add(classes[static_cast<std::size_t>(item.label)]), add(item.path.filename().string());
  return hash;
}

std::vector<float> Folder::balance() const {
  std::vector<double> sizes(classes.size(), 0.0);
  for (const Item& item : items) sizes[static_cast<std::size_t>(item.label)] += 1;
  std::vector<float> weights;
  for (const double size : sizes)
    weights.push_back(
        static_cast<float>(static_cast<double>(items.size()) / static_cast<double>(classes.size()) / size));
  return weights;
}

Folder read_folder(const fs::path& path, const std::vector<std::string>& expected) {
  Folder folder;
  for (const std::string& name : names_in(path)) {
    std::error_code fault;
    if (!fs::is_directory(path / name, fault)) continue;
    const auto label = static_cast<std::int32_t>(folder.classes.size());
    const std::size_t before = folder.items.size();
    for (const std::string& file : names_in(path / name))
      if (is_image(path / name / file)) folder.items.push_back({path / name / file, label});
    if (folder.items.size() == before)
      refuse(path / name, "a class without images", "none", ".png, .jpg or .jpeg files");
    folder.classes.push_back(name);
  }
  if (folder.classes.empty()) refuse(path, "has no classes", "no folders", "one folder of images for each class");
  if (!expected.empty() && folder.classes != expected)
    refuse(path, "has other classes than the training images", listed(folder.classes), listed(expected));
  return folder;
}

std::vector<std::int64_t> order_of_epoch(std::int64_t count, std::uint64_t seed, std::int64_t epoch) {
  std::vector<std::int64_t> order(static_cast<std::size_t>(count));
  std::iota(order.begin(), order.end(), std::int64_t{0});
  const RandomKey key{seed, RandomPurpose::shuffle, 0};
  for (std::int64_t i = count - 1; i > 0; --i) {  // Fisher and Yates
    const std::uint64_t word = random_word(key, static_cast<std::uint32_t>(epoch), static_cast<std::uint64_t>(i));
    std::swap(order[static_cast<std::size_t>(i)],
              order[static_cast<std::size_t>(word * static_cast<std::uint64_t>(i + 1) >> 32)]);
  }
  return order;
}

}  // namespace quern::images
