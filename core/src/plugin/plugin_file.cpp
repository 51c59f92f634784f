// A file's checks in the order in which they become possible; the head of the manifest is plain C and is compared
// before any C++ object is shared with the plugin.
#include "plugin/plugin_file.h"

#define BOOST_DLL_USE_STD_FS
#include <boost/dll/shared_library.hpp>

#include <dlfcn.h>

#include <cstddef>
#include <system_error>

#include "quern/error.h"

namespace quern {

namespace {

namespace fs = std::filesystem;

constexpr const char* kSymbol = "quern_plugin_manifest";

void add(std::string& faults, const std::string& fault) {
  if (!faults.empty()) faults += "; ";
  faults += fault;
}

void compare(std::string& faults, const std::string& what, const std::string& found, const std::string& expected) {
  if (found != expected) add(faults, what + ": found " + found + ", expected " + expected);
}

std::string_view kind_of(fs::file_type type) {
  switch (type) {
    case fs::file_type::not_found: return "no file";
    case fs::file_type::directory: return "a directory";
    default: return "a special file";
  }
}

// Code that anyone may replace is not run. A sticky folder (/tmp) keeps others from replacing the file.
void check_file(const fs::path& path) {
  std::error_code failure;
  const fs::file_status file = fs::status(path, failure);
  if (failure && file.type() != fs::file_type::not_found)
    refuse_plugin(path, "cannot be examined: " + failure.message());
  if (file.type() == fs::file_type::not_found && fs::is_symlink(path, failure))
    refuse_plugin(path, "found a link to " + fs::read_symlink(path, failure).string() +
                            ", which is not there, expected a regular file");
  if (file.type() != fs::file_type::regular)
    refuse_plugin(path, "found " + std::string(kind_of(file.type())) + ", expected a regular file");
  std::string faults;
  if ((file.permissions() & fs::perms::others_write) != fs::perms::none)
    add(faults, "found a file that everyone may write, expected write permission for its owner only");
  const fs::perms folder = fs::status(path.parent_path()).permissions();
  if ((folder & fs::perms::others_write) != fs::perms::none && (folder & fs::perms::sticky_bit) == fs::perms::none)
    add(faults,
        "found a folder that everyone may write, expected write permission for its owner only, or a sticky folder");
  if (!faults.empty()) refuse_plugin(path, faults);
}

const ManifestHead* load_head(const fs::path& path) {
  using namespace boost::dll;
  // RTLD_NODELETE: the library stays although `library` goes out of scope.
  const auto mode = static_cast<load_mode::type>(load_mode::rtld_now | load_mode::rtld_local | RTLD_NODELETE);
  std::error_code failure;
  shared_library library;
  library.load(path, mode, failure);
  if (failure) {
    const char* reason = dlerror();
    refuse_plugin(path,
                  "the system's loader found: " + std::string(reason ? reason : failure.message().c_str()) +
                      ", expected a shared library whose every symbol is defined by it, libquern or its dependencies");
  }
  if (!library.has(kSymbol))
    refuse_plugin(path, std::string("found no symbol ") + kSymbol + ", expected a library made with QUERN_PLUGIN");
  const auto manifest = library.get<const ManifestHead*()>(kSymbol);
  const ManifestHead* head = manifest();
  if (head == nullptr) refuse_plugin(path, std::string("found null from ") + kSymbol + "(), expected a manifest");
  return head;
}

// Fields beyond the stated size are not there to be read.
void check_head(const fs::path& path, const ManifestHead& head, std::string_view id) {
  auto has = [&head](std::size_t end) { return head.struct_size >= end; };
  auto text = [](const char* s) { return s == nullptr ? "null" : to_string(OptionValue(std::string(s))); };
  std::string faults;
  compare(faults, "size of the manifest's head", std::to_string(head.struct_size),
          std::to_string(sizeof(ManifestHead)));
  if (has(offsetof(ManifestHead, abi_tag)))
    compare(faults, "SDK version", std::to_string(head.sdk_version), std::to_string(kSdkVersion));
  if (has(offsetof(ManifestHead, name))) compare(faults, "ABI tag", text(head.abi_tag), text(QUERN_ABI_TAG));
  if (has(offsetof(ManifestHead, fill))) compare(faults, "plugin name", text(head.name), text(std::string(id).c_str()));
  if (faults.empty() && head.fill == nullptr) add(faults, "found no fill function");
  if (!faults.empty()) refuse_plugin(path, faults);
}

}  // namespace

fs::path plugin_file_name(std::string_view kind, std::string_view id) {
  return fs::path(kind) / ("libquern_" + std::string(id) + ".so");
}

bool is_plugin_name(std::string_view name) {
  constexpr std::string_view kLetters = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-";
  return !name.empty() && name.size() <= 64 && name.find_first_not_of(kLetters) == std::string_view::npos;
}

void refuse_plugin(const fs::path& path, const std::string& mismatches) {
  throw Error(ErrorCode::config,
              {.where = path.string(),
               .what = "plugin refused: " + mismatches,
               .found = {},
               .expected = {},
               .next = "build the plugin with this quern's headers and compiler, or correct its path"});
}

Manifest load_manifest(const fs::path& path, std::string_view id) {
  check_file(path);
  const ManifestHead* head = load_head(path);
  check_head(path, *head, id);
  Manifest manifest;
  try {
    head->fill(manifest);
  } catch (const std::exception& e) {
    refuse_plugin(path, std::string("its fill() threw: found \"") + e.what() + "\", expected no exception");
  } catch (...) {
    refuse_plugin(path, "its fill() threw: found something that is no std::exception, expected no exception");
  }
  manifest.name = head->name;
  return manifest;
}

std::string option_faults(const std::vector<OptionSpec>& options) {
  std::string faults;
  for (std::size_t i = 0; i < options.size(); ++i) {
    const OptionSpec& spec = options[i];
    OptionValue value = spec.default_value;
    if (!spec.required)
      if (auto fault = check_option(spec, value)) add(faults, "default of option " + spec.key + ": " + *fault);
    if (spec.key.empty()) add(faults, "found an option without a key, expected a key");
    for (std::size_t j = 0; j < options.size(); ++j) {
      if (i < j && spec.key == options[j].key) add(faults, "found option " + spec.key + " twice, expected once");
      if (options[j].key.starts_with(spec.key + "."))
        add(faults, "found option " + spec.key + " and its table's " + options[j].key + ", expected one of them");
    }
  }
  return faults;
}

}  // namespace quern
