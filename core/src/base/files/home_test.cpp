// The home directory in paths.
#include "base/files/home.h"

#include <cstdlib>
#include <filesystem>

#include <doctest/doctest.h>

#include "base/files/test_directory.h"

using namespace quern;

TEST_CASE("~ is the home directory at the beginning of a path, and a letter elsewhere") {
  const char* before = std::getenv("HOME");
  const std::string saved = before ? before : "";
  ::setenv("HOME", "/home/anna", 1);
  CHECK(expand_home("~") == "/home/anna");
  CHECK(expand_home("~/runs/a") == "/home/anna/runs/a");
  for (const char* path : {"", "runs/~", "./~/runs", "/~", "~no-such-user-here/runs", "$HOME"})
    CHECK(expand_home(path) == path);
  CHECK(expand_home("~root/a").ends_with("/a"));
  CHECK(expand_home("~root/a")[0] == '/');
  ::unsetenv("HOME");
  CHECK(expand_home("~/a")[0] == '/');  // the user's, as the system knows it
  before ? ::setenv("HOME", saved.c_str(), 1) : ::unsetenv("HOME");
}

TEST_CASE("a name of a model is its newest download in the hub's cache, unless it is a path") {
  TestDirectory directory;
  const std::filesystem::path model = directory / "models--Qwen--Qwen2.5-0.5B";
  std::filesystem::create_directories(model / "snapshots/abc1");
  std::filesystem::create_directories(model / "refs");
  write_text(model / "refs/main", "abc1\n");
  ::setenv("HF_HUB_CACHE", directory.path().c_str(), 1);
  CHECK(cached_model("Qwen/Qwen2.5-0.5B") == model / "snapshots/abc1");
  for (const char* other : {"Qwen/Qwen3", "Qwen2.5-0.5B", "/Qwen/Qwen2.5-0.5B", "a/Qwen/Qwen2.5-0.5B", "./Qwen2.5-0.5B",
                            "../Qwen2.5-0.5B", "Qwen/", "/", ""})
    CHECK(cached_model(other) == other);
  write_text(model / "refs/main", "gone");  // an interrupted download
  CHECK(cached_model("Qwen/Qwen2.5-0.5B") == "Qwen/Qwen2.5-0.5B");
  ::unsetenv("HF_HUB_CACHE");
}
