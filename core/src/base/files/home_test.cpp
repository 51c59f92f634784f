// The home directory in paths.
#include "base/files/home.h"

#include <cstdlib>

#include <doctest/doctest.h>

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
