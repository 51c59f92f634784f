#pragma once
// `quern plugins new`: a plugin to begin with, made of an installed example.

#include <filesystem>
#include <string>
#include <vector>

namespace quern::cli {

/// A folder of the installed examples that is a plugin.
struct Example {
  std::string kind, id;
  std::filesystem::path folder;
};

/// Ordered by id. A resources error if the folder is not there.
std::vector<Example> examples_in(const std::filesystem::path& folder);

/// The text with the example's name in each of its spellings, as in "my_op" and "MyOp", replaced.
std::string renamed(std::string text, const std::string& from, const std::string& to);

/// Writes folder `into`/`name`; a config error for a name that no plugin may have, or a folder that is there.
void copy_example(const Example& example, const std::string& name, const std::filesystem::path& into);

}  // namespace quern::cli
