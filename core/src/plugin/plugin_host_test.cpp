// Search order and names; what a plugin file may not be is checked in tests/bad_plugins.
#include "plugin/plugin_host.h"

#include <cstdlib>
#include <filesystem>

#include <doctest/doctest.h>

#include "base/files/test_directory.h"
#include "plugin/plugin_file.h"
#include "quern/testkit/refusal.h"
#include "test_paths.h"

using namespace quern;

namespace {

Factory sink_factory(std::string id) {
  struct Sink final : LogSink {
    void open(const RunPlace&) override {}
    void write(const LogEvent&) override {}
  };
  Manifest manifest;
  manifest.add<LogSink>(std::move(id), "nothing", {}, [](const OptionValues&) { return std::make_unique<Sink>(); });
  return manifest.factories.front();
}

std::string unknown(PluginHost& host, std::string_view id) {
  return testkit::refusal(ErrorCode::config, [&] { host.require("log", id); });
}

}  // namespace

TEST_CASE("built-in factories are found and made") {
  PluginHost host({});
  host.add_builtin(sink_factory("console"));
  CHECK(host.require("log", "console").id == "console");
  CHECK(host.create<LogSink>("console", {}) != nullptr);
  CHECK(host.origin("log", "console") == "built in");
  CHECK(host.known_ids("log") == std::vector<std::string>{"console"});
  CHECK(host.list("device").empty());
  CHECK_THROWS_AS(host.add_builtin(sink_factory("console")), const Error&);
}

TEST_CASE("an unknown id lists the known ones, the nearest, and where was searched") {
  PluginHost host({"/nowhere/plugins"});
  host.add_builtin(sink_factory("console"));
  host.add_builtin(sink_factory("jsonl"));
  CHECK(unknown(host, "consol") ==
        "no such log plugin: found \"consol\", expected one of console, jsonl; nearest name `console`; searched "
        "/nowhere/plugins for log/libquern_consol.so");
}

TEST_CASE("a link that leads nowhere is refused for that") {
  TestDirectory folder;
  std::filesystem::create_directory(folder / "log");
  std::filesystem::create_symlink("/nowhere/libquern_x.so", folder / "log/libquern_x.so");
  PluginHost host({folder.path()});
  CHECK(
      unknown(host, "x").find("log/libquern_x.so: plugin refused: found a link to /nowhere/libquern_x.so, which is not "
                              "there, expected a regular file") != std::string::npos);
}

TEST_CASE("an id never becomes a path") {
  PluginHost host({QUERN_BUILD_DIR});
  for (const char* id : {"../evil", "", "a/b", ".", "a b", "x\n"}) {
    CHECK_FALSE(is_plugin_name(id));
    CHECK(unknown(host, id).starts_with("no such log plugin"));
  }
  CHECK(is_plugin_name("e4m3_rows-2"));
}

TEST_CASE("QUERN_PLUGIN_PATH comes before the trees beside the library") {
  setenv("QUERN_PLUGIN_PATH", "/first::/second/plugins", 1);
  auto folders = PluginHost::standard_folders();
  unsetenv("QUERN_PLUGIN_PATH");
  REQUIRE(folders.size() == 4);
  CHECK(folders[0] == "/first");
  CHECK(folders[1] == "/second/plugins");
  CHECK(folders[2] == std::filesystem::canonical(QUERN_BUILD_DIR) / "plugins");
  CHECK(folders[3] == std::filesystem::canonical(QUERN_BUILD_DIR) / "lib" / "quern" / "plugins");
  CHECK(PluginHost::standard_folders().size() == 2);
}
