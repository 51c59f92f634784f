#pragma once
// A folder of images by class, and the order in which training takes them.

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

namespace quern::images {

/// Classes and images in the order of their names, whatever order the file system has.
struct Folder {
  struct Item {
    std::filesystem::path path;
    std::int32_t label = 0;
  };
  std::vector<std::string> classes;
  std::vector<Item> items;

  /// Of names and classes: a saved position is of a folder with the same.
  std::uint64_t digest() const;
  /// Of a class: the mean size of a class divided by its own.
  std::vector<float> balance() const;
};

/// An input error without classes, for a class without images, and unless classes are `expected` (if there are any).
Folder read_folder(const std::filesystem::path& path, const std::vector<std::string>& expected = {});

/// The images of an epoch in a random order, which depends on the seed and the epoch alone.
std::vector<std::int64_t> order_of_epoch(std::int64_t count, std::uint64_t seed, std::int64_t epoch);

}  // namespace quern::images
