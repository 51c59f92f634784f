// Each library here has one fault; its refusal must say what was found and what was expected.
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include <doctest/doctest.h>
#include <unistd.h>

#include "plugin/elf_note.h"
#include "plugin/plugin_host.h"
#include "quern/testkit/refusal.h"
#include "test_paths.h"

using namespace quern;
using testkit::check_holds;
namespace fs = std::filesystem;

namespace {

const fs::path kFolder = fs::path(QUERN_BUILD_DIR) / "tests" / "bad_plugins";

std::string refusal(PluginHost& host, std::string_view id, const fs::path& path = {}) {
  return testkit::refusal(ErrorCode::config, [&] { host.require("log", id, path); });
}

std::string refusal(std::string_view id) {
  PluginHost host({kFolder});
  std::string text = refusal(host, id);
  CHECK(text.starts_with((kFolder / "log").string()));  // says which file
  CHECK(host.loaded().empty());                         // nothing of it is registered
  CHECK(refusal(host, id) == text);                     // and asking again changes nothing
  return text;
}

Error creation(PluginHost& host, const char* id) {
  return testkit::error_of([&] { host.create<LogSink>(id, {}); });
}

// A folder of this test's own, removed at its end.
struct Scratch {
  fs::path folder = fs::path(QUERN_BUILD_DIR) / "tests" / ("scratch_" + std::to_string(getpid()));
  Scratch() { fs::create_directories(folder / "log"); }
  ~Scratch() { fs::remove_all(folder); }
  fs::path copy(const std::string& id) const {
    fs::path to = folder / "log" / ("libquern_" + id + ".so");
    fs::copy_file(kFolder / "log" / ("libquern_" + id + ".so"), to, fs::copy_options::overwrite_existing);
    return to;
  }
};

}  // namespace

TEST_CASE("the plugin without a fault loads, describes itself and makes its sink") {
  PluginHost host({kFolder});
  const Factory& factory = host.require("log", "good");
  CHECK(factory.summary == "writes nothing");
  REQUIRE(host.loaded().size() == 1);
  CHECK(host.loaded()[0]->version == "1.2");
  CHECK(host.origin("log", "good").starts_with("good 1.2, "));
  auto sink = host.create<LogSink>("good", default_values(factory.options));
  sink->write({});
  CHECK(&host.require("log", "good") == &factory);
  CHECK(&host.require("log", "good", kFolder / "log" / "libquern_good.so") == &factory);  // the same file by its path
}

TEST_CASE("a note that mismatches is refused before anything of the library runs") {
  check_holds(refusal("wrong_abi_tag"),
              {"ABI tag: found cxxabi9999-cxx98 (cfront 3), expected " QUERN_ABI_TAG " (" QUERN_COMPILER ")"});
  check_holds(refusal("wrong_sdk_version"), {"SDK version: found 99, expected " + std::to_string(kSdkVersion) +
                                                " (share/quern/CHANGELOG.md lists what each version changed)"});
  check_holds(refusal("no_note"), {"found no note of quern, expected a library made with QUERN_PLUGIN"});
}

TEST_CASE("CHANGELOG.md has an entry for every SDK version, newest first") {
  std::ifstream file(fs::path(QUERN_SOURCE_DIR) / "CHANGELOG.md");
  std::vector<std::string> headings, expected;
  for (std::string line; std::getline(file, line);)
    if (line.starts_with("## SDK ")) headings.push_back(line);
  for (std::uint32_t version = kSdkVersion; version >= 2; --version)
    expected.push_back("## SDK " + std::to_string(version));
  CHECK(headings == expected);
}

TEST_CASE("all mismatches of a note come at once") {
  check_holds(refusal("everything_wrong"),
              {"SDK version: found 98", "ABI tag: found other (nothing)", "plugin kind: found model, expected log",
               "plugin id: found another, expected everything_wrong"});
}

TEST_CASE("a library that is cut off anywhere, or ends in zeros, is refused") {
  Scratch scratch;
  const fs::path file = scratch.copy("good");
  const std::uintmax_t size = fs::file_size(file);
  auto refused = [&](std::uintmax_t kept) {
    PluginHost host({scratch.folder});
    CAPTURE(kept);
    check_holds(refusal(host, "good"), {"plugin refused: found ", "expected"});
  };
  for (std::uintmax_t kept = size - 1; kept > 0; kept = kept * 15 / 16) {
    fs::resize_file(file, kept);
    refused(kept);
  }
  scratch.copy("good");
  fs::resize_file(file, size * 7 / 8);
  fs::resize_file(file, size);  // as after a power cut: the size is there, the bytes are not
  refused(size);
}

TEST_CASE("a library for another machine, or another kind of file, is refused") {
  Scratch scratch;
  const fs::path file = scratch.copy("good");
  auto with = [&](std::streamoff at, char byte) {
    scratch.copy("good");
    std::fstream(file, std::ios::in | std::ios::out | std::ios::binary).seekp(at).put(byte);
    PluginHost host({scratch.folder});
    return refusal(host, "good");
  };
  check_holds(with(18, 8), {"found a library for machine 8", "as of quern"});            // e_machine: MIPS
  check_holds(with(4, 1), {"class 1", "as of quern"});                                   // 32 bits
  check_holds(with(16, 2), {"found an ELF file of type 2, expected a shared library"});  // ET_EXEC
}

TEST_CASE("any one wrong byte of a header is refused or harmless to read") {
  Scratch scratch;
  const fs::path file = scratch.copy("good");
  std::fstream bytes(file, std::ios::in | std::ios::out | std::ios::binary);
  bytes.seekg(56);
  const int segments = bytes.get();  // e_phnum
  for (std::streamoff at = 0; at < 64 + 56 * segments; ++at) {
    bytes.seekg(at);
    const char before = static_cast<char>(bytes.get());
    for (char byte : {'\0', '\x7f', '\xff'}) {
      bytes.seekp(at).put(byte).flush();
      const ElfNote note = read_elf_note(file, "quern");
      CHECK(note.text.empty() == !note.fault.empty());
    }
    bytes.seekp(at).put(before).flush();
  }
}

TEST_CASE("a manifest that mismatches is refused") {
  check_holds(refusal("throwing_fill"), {"its manifest threw: found \"no licence file\", expected no exception"});
  check_holds(refusal("duplicate_id"), {"found log \"duplicate_id\" twice, expected once"});
  check_holds(refusal("wrong_id"), {"found log \"another\", expected log \"wrong_id\", the id in QUERN_PLUGIN and in the file's name: give it in manifest.add too"});
  check_holds(refusal("bad_default"),
              {"default of option every: out of range, found 0, expected an integer of at least 1",
               "found option twice twice, expected once"});
}

TEST_CASE("a file that is no plugin is refused") {
  check_holds(refusal("no_symbol"), {"found no symbol quern_plugin_manifest, expected"});
  check_holds(refusal("missing_library"), {"a library that it needs is not here", "libquern_gone.so", "install it"});
  check_holds(refusal("undefined_symbol"), {"undefined symbol: quern_test_symbol_that_nobody_defines", "expected"});
  Scratch scratch;
  PluginHost host({scratch.folder});
  std::ofstream(scratch.folder / "log" / "libquern_text.so")
      << "this is text, and long enough for an ELF header: " << std::string(200, '.');
  check_holds(refusal(host, "text"), {"found no ELF header, expected a shared library"});
  fs::create_directory(scratch.folder / "log" / "libquern_folder.so");
  check_holds(refusal(host, "folder"), {"found a directory, expected a regular file"});
  check_holds(refusal(host, "good", scratch.folder / "absent.so"),
              {"absent.so", "found no file, expected a regular file"});
}

TEST_CASE("a file or folder that everyone may write is refused") {
  Scratch scratch;
  const fs::path file = scratch.copy("good");
  fs::permissions(file, fs::perms::others_write, fs::perm_options::add);
  {
    PluginHost host({scratch.folder});
    check_holds(refusal(host, "good"),
                {"found a file that everyone may write, expected write permission for its owner only"});
  }
  fs::permissions(file, fs::perms::others_write, fs::perm_options::remove);
  fs::permissions(file.parent_path(), fs::perms::others_write, fs::perm_options::add);
  {
    PluginHost host({scratch.folder});
    check_holds(refusal(host, "good"), {"found a folder that everyone may write", "sticky"});
  }
  fs::permissions(file.parent_path(), fs::perms::sticky_bit, fs::perm_options::add);
  PluginHost host({scratch.folder});
  CHECK(refusal(host, "good") == "accepted");
}

TEST_CASE("an id that is taken is refused, and leaves the first in place") {
  Scratch scratch;
  const fs::path copy = scratch.copy("good");
  PluginHost host({kFolder});
  const Factory& first = host.require("log", "good");
  check_holds(refusal(host, "good", copy), {"found log \"good\", which is there already", "expected a new id"});
  CHECK(&host.require("log", "good") == &first);
}

TEST_CASE("a factory that throws names its plugin, and an Error keeps its code") {
  PluginHost host({kFolder});
  const Error standard = creation(host, "throwing_factory");
  CHECK(standard.code() == ErrorCode::internal);
  check_holds(standard.what(), {"log \"throwing_factory\"", "libquern_throwing_factory.so", "socket closed"});
  const Error error = creation(host, "throws_error");
  CHECK(error.code() == ErrorCode::input);
  check_holds(error.what(), {"libquern_throwing_factory.so", "a.json:3: bad field: found x, expected y; mend it"});
  check_holds(creation(host, "throws_int").what(), {"no std::exception"});
  check_holds(creation(host, "returns_null").what(), {"returned nothing"});
}

TEST_CASE("a listing shows broken plugins with their refusal") {
  PluginHost host({kFolder});
  std::size_t sound = 0, broken = 0;
  for (const PluginEntry& entry : host.list("log")) (entry.factory ? sound : broken) += 1;
  CHECK(sound == 5);  // good, and the four of throwing_factory
  CHECK(broken == 11);
}
