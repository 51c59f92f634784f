// Searching, registering and making. A plugin is registered whole or not at all.
#include "plugin/plugin_host.h"

#define BOOST_DLL_USE_STD_FS
#include <boost/dll/runtime_symbol_info.hpp>

#include <algorithm>
#include <cstdlib>
#include <new>
#include <optional>
#include <set>
#include <system_error>

#include "base/format.h"
#include "base/shorten.h"
#include "plugin/plugin_file.h"

namespace quern {

namespace {

namespace fs = std::filesystem;

constexpr std::string_view kKinds[] = {
    kPluginKind<Device>,       kPluginKind<Model>,        kPluginKind<PrecisionBackend>,
    kPluginKind<Communicator>, kPluginKind<OffloadStore>, kPluginKind<Optimizer>,
    kPluginKind<Schedule>,     kPluginKind<Dataset>,      kPluginKind<LogSink>};

std::string label(std::string_view kind, std::string_view id) {
  return std::string(kind) + " \"" + std::string(id) + "\"";
}

std::vector<std::string> texts_of(const std::vector<fs::path>& paths) {
  return std::vector<std::string>(paths.begin(), paths.end());
}

// Two names of one file are one plugin.
fs::path real_path(const fs::path& path) {
  std::error_code failure;
  fs::path real = fs::canonical(path, failure);
  return failure ? fs::absolute(path) : real;
}

// X of libquern_X.so; empty when the file has another name.
std::string id_in(const fs::path& file) {
  constexpr std::string_view kPrefix = "libquern_", kSuffix = ".so";
  const std::string name = file.filename().string();
  if (!name.starts_with(kPrefix) || !name.ends_with(kSuffix) || name.size() <= kPrefix.size() + kSuffix.size())
    return {};
  const std::string id = name.substr(kPrefix.size(), name.size() - kPrefix.size() - kSuffix.size());
  return is_plugin_name(id) ? id : std::string();
}

// Ids that a folder offers. A folder that is not there offers none.
void collect_ids(const fs::path& folder, std::set<std::string>& ids) {
  std::error_code failure;
  for (fs::directory_iterator it(folder, failure), end; !failure && it != end; it.increment(failure))
    if (std::string id = id_in(it->path()); !id.empty()) ids.insert(id);
}

}  // namespace

std::span<const std::string_view> plugin_kinds() { return kKinds; }

fs::path PluginHost::core_library() { return real_path(boost::dll::this_line_location()); }

std::vector<fs::path> PluginHost::standard_folders() {
  std::vector<fs::path> folders;
  if (const char* list = std::getenv("QUERN_PLUGIN_PATH")) {
    std::string_view rest = list;
    while (!rest.empty()) {
      const std::size_t colon = std::min(rest.find(':'), rest.size());
      if (colon > 0) folders.emplace_back(rest.substr(0, colon));
      rest.remove_prefix(std::min(colon + 1, rest.size()));
    }
  }
  const fs::path library_folder = core_library().parent_path();
  folders.push_back(library_folder.parent_path() / "plugins");
  folders.push_back(library_folder / "quern" / "plugins");
  return folders;
}

const PluginHost::Registered* PluginHost::find(std::string_view kind, std::string_view id) const {
  auto it = factories_.find(Key(kind, id));
  return it == factories_.end() ? nullptr : &it->second;
}

void PluginHost::add_builtin(Factory factory) {
  const std::string where = label(factory.kind, factory.id);
  if (find(factory.kind, factory.id)) fail_internal(where, "registered twice");
  if (std::string faults = option_faults(factory.options); !faults.empty()) fail_internal(where, faults);
  Key key(factory.kind, factory.id);
  factories_.emplace(std::move(key), Registered{std::move(factory), nullptr});
}

void PluginHost::add_builtins(Manifest manifest) {
  for (Factory& factory : manifest.factories) add_builtin(std::move(factory));
  ops_.insert(ops_.end(), manifest.ops.begin(), manifest.ops.end());
  kernels_.insert(kernels_.end(), manifest.kernels.begin(), manifest.kernels.end());
}

fs::path PluginHost::search(std::string_view kind, std::string_view id) const {
  std::error_code failure;
  for (const fs::path& folder : folders_)
    if (fs::path file = folder / plugin_file_name(kind, id);
        fs::exists(fs::symlink_status(file, failure)))  // a link that leads nowhere is refused for that
      return file;
  return {};
}

const Factory& PluginHost::require(std::string_view kind, std::string_view id, const fs::path& path) {
  const Registered* known = find(kind, id);
  if (known && (path.empty() || (known->plugin && known->plugin->path == real_path(path)))) return known->factory;
  fs::path file = path;
  if (file.empty() && is_plugin_name(id)) file = search(kind, id);
  if (!file.empty()) {
    load(kind, id, real_path(file));
    return find(kind, id)->factory;
  }
  const std::vector<std::string> ids = known_ids(kind);
  const std::string near = nearest_name(id, ids), looked_for = !folders_.empty() && is_plugin_name(id)
                                                                   ? " for " + plugin_file_name(kind, id).string()
                                                                   : "";
  throw Error(ErrorCode::config, {.where = {},
                                  .what = "no such " + std::string(kind) + " plugin",
                                  .found = shortened(to_string(OptionValue(std::string(id)))),
                                  .expected = ids.empty() ? "an installed plugin; there are none of this kind"
                                                          : "one of " + format_list(ids),
                                  .next = (near.empty() ? "" : "nearest name `" + near + "`; ") + "searched " +
                                          format_list(texts_of(folders_), "none") + looked_for});
}

std::string PluginHost::faults_of(const Manifest& manifest, std::string_view kind, std::string_view id) const {
  std::string faults, offered;
  auto add = [&faults](const std::string& fault) { faults += (faults.empty() ? "" : "; ") + fault; };
  std::set<Key> seen;
  for (const Factory& factory : manifest.factories) {
    const std::string name = label(factory.kind, factory.id);
    offered += (offered.empty() ? "" : ", ") + name;
    if (std::find(std::begin(kKinds), std::end(kKinds), factory.kind) == std::end(kKinds))
      add("found a factory of kind \"" + factory.kind + "\", expected a kind that quern has");
    if (!is_plugin_name(factory.id))
      add("found a factory with id \"" + factory.id + "\", expected letters, digits, _ and -");
    if (!factory.create) add("found no create function for " + name + ", expected one");
    if (!seen.insert(Key(factory.kind, factory.id)).second) add("found " + name + " twice, expected once");
    if (const Registered* other = find(factory.kind, factory.id))
      add("found " + name + ", which is there already (" + (other->plugin ? other->plugin->path.string() : "built in") +
          "), expected a new id");
    if (std::string bad = option_faults(factory.options); !bad.empty()) add(name + ": " + bad);
  }
  auto wanted = [&](const Key& key) { return key.second == id && (kind.empty() || key.first == kind); };
  if (std::none_of(seen.begin(), seen.end(), wanted))
    add("found " + (offered.empty() ? "no factory" : offered) + ", expected " +
        label(kind.empty() ? "an implementation" : kind, id) + ", the id in QUERN_PLUGIN and in the file's name" +
        (offered.empty() ? "" : ": give it in manifest.add too"));
  return faults;
}

const LoadedPlugin& PluginHost::load(std::string_view kind, std::string_view id, const fs::path& path) {
  if (auto refused = refused_.find(path); refused != refused_.end()) throw refused->second;
  for (const auto& plugin : loaded_)  // its manifest is filled; what it registers is known
    if (plugin->path == path) refuse_plugin(path, "found plugin \"" + plugin->name + "\", expected " + label(kind, id));
  try {
    Manifest manifest = load_manifest(path, kind, id);
    if (std::string faults = faults_of(manifest, kind, id); !faults.empty()) refuse_plugin(path, faults);
    loaded_.push_back(
        std::make_unique<LoadedPlugin>(LoadedPlugin{manifest.name, manifest.version, manifest.licence, path}));
    for (Factory& factory : manifest.factories) {
      Key key(factory.kind, factory.id);
      factories_.emplace(std::move(key), Registered{std::move(factory), loaded_.back().get()});
    }
    ops_.insert(ops_.end(), manifest.ops.begin(), manifest.ops.end());
    kernels_.insert(kernels_.end(), manifest.kernels.begin(), manifest.kernels.end());
  } catch (const Error& error) {
    refused_.emplace(path, error);
    throw;
  }
  return *loaded_.back();
}

std::vector<PluginEntry> PluginHost::load_file(const fs::path& path) {
  const fs::path file = real_path(path);
  const std::string id = id_in(path);  // the name of a link, not of what it links to
  const LoadedPlugin* plugin = nullptr;
  for (const auto& loaded : loaded_)
    if (loaded->path == file) plugin = loaded.get();
  std::error_code failure;
  if (!plugin && id.empty() && fs::exists(file, failure))  // what is not there is refused for that
    refuse_plugin(path, "found the file name " + path.filename().string() + ", expected libquern_<id>.so");
  if (!plugin) plugin = &load({}, id, file);
  std::vector<PluginEntry> entries;
  for (const auto& [key, registered] : factories_)
    if (registered.plugin == plugin) entries.push_back({key.first, key.second, &registered.factory, plugin, {}});
  return entries;
}

std::vector<std::string> PluginHost::known_ids(std::string_view kind) const {
  std::set<std::string> ids;
  for (const auto& [key, unused] : factories_)
    if (key.first == kind) ids.insert(key.second);
  for (const fs::path& folder : folders_) collect_ids(folder / kind, ids);
  return {ids.begin(), ids.end()};
}

std::vector<PluginEntry> PluginHost::list(std::string_view kind) {
  std::map<std::string, std::string> refusals;
  for (const std::string& id : known_ids(kind)) {
    try {
      require(kind, id);
    } catch (const Error& error) {
      refusals[id] = error.what();
    }
  }
  std::vector<PluginEntry> entries;
  for (const std::string& id : known_ids(kind)) {  // again: a loaded plugin may offer more than its file name says
    PluginEntry entry{std::string(kind), id, nullptr, nullptr, refusals[id]};
    if (const Registered* registered = find(kind, id))
      entry.factory = &registered->factory, entry.plugin = registered->plugin;
    entries.push_back(std::move(entry));
  }
  return entries;
}

std::string PluginHost::origin(std::string_view kind, std::string_view id) const {
  const Registered* registered = find(kind, id);
  if (!registered) fail_internal(label(kind, id), "asked for its origin before it was loaded");
  if (!registered->plugin) return "built in";
  const LoadedPlugin& plugin = *registered->plugin;
  return plugin.name + " " + plugin.version + ", " + plugin.path.string();
}

void* PluginHost::create_raw(std::string_view kind, std::string_view id, const OptionValues& values) {
  const Factory& factory = require(kind, id);
  const std::string where = label(kind, id) + " (" + origin(kind, id) + ")";
  auto fail = [&where](const std::string& what) {
    throw Error(ErrorCode::internal, {.where = where,
                                      .what = what,
                                      .found = {},
                                      .expected = {},
                                      .next = "this is a fault in the plugin; please report it to its author"});
  };
  void* made = nullptr;
  const LoadedPlugin* plugin = find(kind, id)->plugin;
  std::optional<PluginAtWork> at_work;
  if (plugin) at_work.emplace(plugin->path);
  try {
    made = factory.create(values);
  } catch (const Error& error) {
    ErrorDetail detail = error.detail();
    detail.where = where + (detail.where.empty() ? "" : ": " + detail.where);
    throw Error(error.code(), std::move(detail));
  } catch (const std::bad_alloc&) {
    throw;  // of the machine, or of a limit
  } catch (const std::exception& e) {
    fail(std::string("its factory threw: ") + e.what());
  } catch (...) {
    fail("its factory threw something that is no std::exception");
  }
  if (!made) fail("its factory returned nothing");
  return made;
}

}  // namespace quern
