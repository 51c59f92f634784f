#pragma once
// The implementations that a run may select, by kind and id: built in, or in shared libraries found by file name.
// An object that is passed around; only requested plugins are loaded, so a broken plugin that a run does not use cannot
// stop it. For one thread, at set-up.

#include <filesystem>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "quern/error.h"
#include "quern/plugin.h"

namespace quern {

struct LoadedPlugin {
  std::string name, version, licence;
  std::filesystem::path path;
};

/// One implementation as a listing shows it.
struct PluginEntry {
  std::string kind, id;
  const Factory* factory = nullptr;      ///< null: refused
  const LoadedPlugin* plugin = nullptr;  ///< null: built in, or refused
  std::string refusal;
};

/// Every kind of plugin that there is.
std::span<const std::string_view> plugin_kinds();

class PluginHost {
 public:
  /// `folders` are searched in order for <kind>/libquern_<id>.so.
  explicit PluginHost(std::vector<std::filesystem::path> folders) : folders_(std::move(folders)) {}
  /// The entries of QUERN_PLUGIN_PATH (colons between), then the build tree's and the install tree's plugins beside
  /// libquern.
  static std::vector<std::filesystem::path> standard_folders();

  /// The file that holds quern itself.
  static std::filesystem::path core_library();

  // ---- set-up ----
  /// Adds a factory that is part of quern. A kind and id that is there already, or a bad default, is internal.
  void add_builtin(Factory factory);
  /// Adds all factories of a manifest that a built-in component filled as a plugin does.
  void add_builtins(Manifest manifest);

  /// The factory of an implementation, its plugin loaded when need be. `path` names a file; empty: search.
  /// Throws a config error: unknown (with the known ids and the nearest) or refused (with every mismatch).
  const Factory& require(std::string_view kind, std::string_view id, const std::filesystem::path& path = {});
  /// Loads a plugin by its file alone, which must be named libquern_<id>.so, and returns everything that it offers.
  /// Throws as `require` does.
  std::vector<PluginEntry> load_file(const std::filesystem::path& path);
  /// Makes an implementation; `values` must have been validated. What its factory throws comes out as an Error that
  /// names the plugin; the code of an Error is kept.
  template <class Interface>
  std::unique_ptr<Interface> create(std::string_view id, const OptionValues& values) {
    return std::unique_ptr<Interface>(static_cast<Interface*>(create_raw(kPluginKind<Interface>, id, values)));
  }

  // ---- the plugins found ----
  /// Built-in, loaded and found by file name, sorted; loads nothing.
  std::vector<std::string> known_ids(std::string_view kind) const;
  /// Every known implementation of a kind, sorted by id, loaded; a broken one is listed with its refusal.
  std::vector<PluginEntry> list(std::string_view kind);
  const std::vector<std::unique_ptr<LoadedPlugin>>& loaded() const { return loaded_; }
  /// "built in" or "name version, path".
  std::string origin(std::string_view kind, std::string_view id) const;
  /// Custom ops and kernels of the loaded plugins, in loading order.
  const std::vector<OpSpec>& ops() const { return ops_; }
  const std::vector<CustomKernel>& kernels() const { return kernels_; }
  const std::vector<std::filesystem::path>& folders() const { return folders_; }

 private:
  struct Registered {
    Factory factory;
    const LoadedPlugin* plugin;  // null: built in
  };
  using Key = std::pair<std::string, std::string>;  // kind, id

  const Registered* find(std::string_view kind, std::string_view id) const;
  std::filesystem::path search(std::string_view kind, std::string_view id) const;
  /// An empty kind: any.
  const LoadedPlugin& load(std::string_view kind, std::string_view id, const std::filesystem::path& path);
  std::string faults_of(const Manifest& manifest, std::string_view kind, std::string_view id) const;
  void* create_raw(std::string_view kind, std::string_view id, const OptionValues& values);

  std::vector<std::filesystem::path> folders_;
  std::map<Key, Registered> factories_;
  std::vector<std::unique_ptr<LoadedPlugin>> loaded_;
  std::map<std::filesystem::path, Error> refused_;  // a library is loaded once, so a refusal is remembered
  std::vector<OpSpec> ops_;
  std::vector<CustomKernel> kernels_;
};

}  // namespace quern
