// A file's checks in the order in which they become possible; what its note says is compared before any of its code
// runs.
#include "plugin/plugin_file.h"

#define BOOST_DLL_USE_STD_FS
#include <boost/dll/shared_library.hpp>

#include <dlfcn.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <new>
#include <system_error>

#include "plugin/elf_note.h"
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

/// The note's value of `key`; "nothing" where it has none.
std::string noted(std::string_view note, std::string_view key) {
  while (!note.empty()) {
    const std::string_view entry = note.substr(0, note.find('\0'));
    if (entry.starts_with(key) && entry.substr(key.size()).starts_with('='))
      return std::string(entry.substr(key.size() + 1, 100));
    note.remove_prefix(std::min(entry.size() + 1, note.size()));
  }
  return "nothing";
}

// Everything that can be known before the library's own code runs.
void check_note(const fs::path& path, std::string_view kind, std::string_view id) {
  const ElfNote note = read_elf_note(path, "quern");
  if (!note.fault.empty()) refuse_plugin(path, note.fault);
  auto tag = [](const std::string& abi, const std::string& compiler) { return abi + " (" + compiler + ")"; };
  const std::string abi = noted(note.text, "abi"), compiler = noted(note.text, "compiler");
  std::string faults;
  const std::string sdk = noted(note.text, "sdk"), own_sdk = std::to_string(kSdkVersion);
  if (sdk != own_sdk)
    compare(faults, "SDK version", sdk, own_sdk + " (share/quern/CHANGELOG.md lists what each version changed)");
  if (abi != QUERN_ABI_TAG) compare(faults, "ABI tag", tag(abi, compiler), tag(QUERN_ABI_TAG, QUERN_COMPILER));
  if (!kind.empty()) compare(faults, "plugin kind", noted(note.text, "kind"), std::string(kind));
  compare(faults, "plugin id", noted(note.text, "id"), std::string(id));
  if (!faults.empty()) refuse_plugin(path, faults);
}

using Fill = void(Manifest&);

Fill* load_library(const fs::path& path) {
  using namespace boost::dll;
  // RTLD_NODELETE: the library stays although `library` goes out of scope.
  const auto mode = static_cast<load_mode::type>(load_mode::rtld_now | load_mode::rtld_local | RTLD_NODELETE);
  std::error_code failure;
  shared_library library;
  library.load(path, mode, failure);
  if (failure) {
    const char* reason = dlerror();
    if (reason && std::strstr(reason, std::strerror(ENOMEM)))
      throw Error(ErrorCode::resources, {.where = path.string(),
                                         .what = "the system has no memory for the library",
                                         .found = reason,
                                         .expected = {},
                                         .next = "raise the limit on memory (ulimit -v)"});
    if (reason && std::strstr(reason, "cannot open shared object file"))
      throw Error(ErrorCode::config,
                  {.where = path.string(),
                   .what = "plugin refused: a library that it needs is not here",
                   .found = reason,
                   .next = "install it; CUDA's come with NVIDIA's packages, or with pip install 'quern[cuda13]'"});
    refuse_plugin(path,
                  "the system's loader found: " + std::string(reason ? reason : failure.message().c_str()) +
                      ", expected a shared library whose every symbol is defined by it, libquern or its dependencies");
  }
  if (!library.has(kSymbol))
    refuse_plugin(path, std::string("found no symbol ") + kSymbol + ", expected a library made with QUERN_PLUGIN");
  return &library.get<Fill>(kSymbol);
}

std::atomic<const char*> plugin_file_at_work = nullptr;

}  // namespace

fs::path plugin_file_name(std::string_view kind, std::string_view id) {
  return fs::path(kind) / ("libquern_" + std::string(id) + ".so");
}

bool is_plugin_name(std::string_view name) {
  constexpr std::string_view kLetters = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-";
  return !name.empty() && name.size() <= 64 && name.find_first_not_of(kLetters) == std::string_view::npos;
}

void refuse_plugin(const fs::path& path, const std::string& mismatches) {
  throw Error(
      ErrorCode::config,
      {.where = path.string(),
       .what = "plugin refused: " + mismatches,
       .found = {},
       .expected = {},
       .next =
           "build the plugin with this quern's headers and a compiler of its ABI (quern was built by " QUERN_COMPILER
           "), or correct its path"});
}

PluginAtWork::PluginAtWork(const fs::path& path) : before_(plugin_file_at_work.exchange(path.c_str())) {}
PluginAtWork::~PluginAtWork() { plugin_file_at_work = before_; }
const char* PluginAtWork::path() { return plugin_file_at_work; }

Manifest load_manifest(const fs::path& path, std::string_view kind, std::string_view id) {
  check_file(path);
  check_note(path, kind, id);
  const PluginAtWork at_work(path);
  Fill* fill = load_library(path);
  Manifest manifest;
  try {
    fill(manifest);
  } catch (const std::bad_alloc&) {
    throw;  // of the machine, or of a limit
  } catch (const std::exception& e) {
    refuse_plugin(path, std::string("its manifest threw: found \"") + e.what() + "\", expected no exception");
  } catch (...) {
    refuse_plugin(path, "its manifest threw: found something that is no std::exception, expected no exception");
  }
  manifest.name = id;
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
