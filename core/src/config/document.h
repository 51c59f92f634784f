#pragma once
// A run's TOML as read: a tree of tables and values that each know where they were written, with --set overrides laid
// over the file. Nothing here knows which sections or keys exist. The text is untrusted: its size and nesting are
// capped before and while it is parsed.

#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "quern/options.h"

namespace quern {

/// Where something was written. Orders as a reader meets it: the file from the top, then overrides.
struct Position {
  std::string source;                  ///< file name, or "--set a.b"
  std::uint32_t line = 0, column = 0;  ///< from 1; 0: the source has no lines
  std::string text() const;            ///< "run.toml:3:1", "--set a.b"
  bool operator<(const Position& other) const;
};

struct ConfigNode {
  Position position;
  bool is_table = false;
  std::map<std::string, ConfigNode, std::less<>> children;  ///< of a table
  std::vector<ConfigNode> items;                            ///< of a list of tables, [[a.b]]
  std::optional<OptionValue> value;                         ///< of a leaf; none when no option could take it
  std::string found;                                        ///< how messages call it: `"cpu"`, `a table`, `a date`
};

class ConfigDocument {
 public:
  static constexpr std::size_t kLargestFile = std::size_t{1} << 20;  ///< bytes
  static constexpr int kDeepest = 16;                                ///< tables inside tables

  /// Reads a file; throws an input error when it cannot be read, a config error with file:line:col for bad syntax.
  static ConfigDocument read(const std::filesystem::path& path);
  /// The same with assignments set, in their order.
  static ConfigDocument read(const std::filesystem::path& path, const std::vector<std::string>& assignments);
  /// Parses text that messages call `name`.
  static ConfigDocument parse(std::string_view text, std::string name);

  /// Drops all sections but these.
  void keep(const std::vector<std::string>& sections);
  /// Applies "a.b=value". The value is TOML; text that is not (16GiB, data/train.bin, nothing) is taken as a
  /// text.
  void set(std::string_view assignment);

  const ConfigNode& root() const { return root_; }
  const std::string& name() const { return name_; }

 private:
  std::string name_;
  ConfigNode root_;
};

/// A key as TOML spells it: bare where it may be, else quoted; long ones are cut, for messages.
std::string spell_key(std::string_view key);

}  // namespace quern
