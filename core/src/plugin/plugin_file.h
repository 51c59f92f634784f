#pragma once
// One plugin file: whether it may be trusted, loading it, and its manifest. A loaded file is never unloaded, not even
// after a refusal: its code may be behind exceptions, types and threads that outlive whoever asked for it.

#include <filesystem>
#include <string>
#include <string_view>

#include "quern/plugin.h"

namespace quern {

/// File name of a plugin inside a search folder: "<kind>/libquern_<id>.so".
std::filesystem::path plugin_file_name(std::string_view kind, std::string_view id);

/// Ids and kinds become file names, so they are letters, digits, '_' and '-' only.
bool is_plugin_name(std::string_view name);

/// Loads the file and returns the manifest of the plugin `id`; an empty kind: any. Throws a config error that states
/// everything that mismatches: the file's permissions and headers, then its note, before anything of it runs; then the
/// loader's own text (undefined symbols), then what filling the manifest threw.
Manifest load_manifest(const std::filesystem::path& path, std::string_view kind, std::string_view id);

/// While one lives, code of that plugin file runs that should return: for the message of a program that it ends
/// instead. `path` is borrowed.
class PluginAtWork {
 public:
  explicit PluginAtWork(const std::filesystem::path& path);
  ~PluginAtWork();
  PluginAtWork(const PluginAtWork&) = delete;
  PluginAtWork& operator=(const PluginAtWork&) = delete;
  /// Of the innermost; null when there is none.
  static const char* path();

 private:
  const char* before_;
};

/// Faults of an option list, empty when none: a default that its own spec refuses, keys that collide.
std::string option_faults(const std::vector<OptionSpec>& options);

/// The refusal of a plugin file, for all checks made elsewhere.
[[noreturn]] void refuse_plugin(const std::filesystem::path& path, const std::string& mismatches);

}  // namespace quern
